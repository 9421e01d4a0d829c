"""`python -m healer.policy.docs` writes the generated parts of `docs/policies.md`, and `policies/schema.json`.

Between a line `<!-- begin NAME -->` and the next `<!-- end -->` everything is replaced; the rest is written by hand.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from healer.policy.expressions import HEALING_VARIABLES
from healer.policy.json_schema import Node, build, schema_text
from healer.policy.schema.base import DURATION_PATTERN, SPAN_PATTERN

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/policies.md"
SCHEMA = ROOT / "policies/schema.json"
_MANY = 7
_PART = re.compile(r"<!-- begin (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def rendered(document: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """The document with its generated parts up to date. Raises KeyError for a part that does not exist."""
    return _PART.sub(lambda m: f"<!-- begin {m[1]} -->\n\n{parts[m[1]]().strip()}\n\n<!-- end -->", document)


def options() -> str:
    """A table for each mapping of a policy file."""
    schema = build()
    return "\n\n".join(_section(schema, path, node) for path, node in sections(schema))


def sections(schema: Node) -> Iterator[tuple[str, Node]]:
    """Each mapping of a file with its place, in the order of the schema: "spec.target", "spec.hooks.NAME", "spec.schedules[]"."""
    yield from _sections(schema, schema, "")


def keys(schema: Node) -> Iterator[str]:
    """The place of every key."""
    for path, node in sections(schema):
        for key in node["properties"]:
            yield f"{path}.{key}".lstrip(".")


def _sections(schema: Node, node: Node, path: str) -> Iterator[tuple[str, Node]]:
    yield path, node
    for key, value in node["properties"].items():
        for suffix, inner in mappings(schema, value):
            yield from _sections(schema, inner, f"{path}.{key}{suffix}".lstrip("."))


def mappings(schema: Node, value: Node) -> Iterator[tuple[str, Node]]:
    """The mappings that a value may be or hold, and how their place is written."""
    if "$ref" in value:
        yield "", schema["$defs"][value["$ref"].rsplit("/", 1)[1]]
    for one in value.get("anyOf", ()):
        yield from mappings(schema, one)
    for one in value.get("oneOf", ()):
        for suffix, node in mappings(schema, one):
            yield f" of kind {node['properties']['kind']['const']}{suffix}", node
    if isinstance(value.get("items"), dict):
        yield from (("[]" + suffix, node) for suffix, node in mappings(schema, value["items"]))
    named = _of_names(value)
    if named is not None:
        yield from ((".NAME" + suffix, node) for suffix, node in mappings(schema, named))


def _of_names(value: Node) -> Node | None:
    """What a mapping of names holds; None for other values."""
    for one in (value.get("additionalProperties"), *value.get("patternProperties", {}).values()):
        if isinstance(one, dict):
            return one
    return None


def _section(schema: Node, path: str, node: Node) -> str:
    lines = [
        f"### {path or 'The file'}",
        "",
        node["description"],
        "",
        "| Key | Value | Default | |",
        "|---|---|---|---|",
    ]
    needed = node.get("required", ())
    for key, value in node["properties"].items():
        default = "required" if key in needed else _default(value)
        text = value.get("description") or _reference(schema, value)
        lines.append(f"| `{key}` | {_cell(_values(value))} | {default} | {_cell(text)} |")
    return "\n".join(lines)


def _reference(schema: Node, value: Node) -> str:
    return next((str(node["description"]) for _, node in mappings(schema, value)), "")


def _default(value: Node) -> str:
    if "default" not in value:
        return "empty" if _of_names(value) else "see below"
    default: Any = value["default"]
    if default is None:
        return "absent"
    if default in ("", [], {}):
        return "empty"
    if isinstance(default, list):
        return f"`[{', '.join(map(str, default))}]`"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _values(value: Node) -> str:
    """What may stand there, in words."""
    if "$ref" in value:
        return "mapping"
    if "const" in value:
        return str(value["const"])
    if "enum" in value:
        choices = value["enum"]
        return (
            " ".join(f"`{one}`" for one in choices)
            if len(choices) <= _MANY
            else f"one of {len(choices)}, [listed above](#long-lists)"
        )
    for union in ("anyOf", "oneOf"):
        if union in value:
            kinds = [_values(one) for one in value[union] if one != {"type": "null"}]
            return " or ".join(dict.fromkeys(kinds))
    if value.get("pattern") == DURATION_PATTERN:
        return "duration"
    if value.get("pattern") == SPAN_PATTERN:
        return "range"
    return _VALUES[value["type"]](value)


def _array(value: Node) -> str:
    return f"list: {_values(value['items'])}"


def _object(value: Node) -> str:
    named = _of_names(value)
    return "mapping" if named is None else f"mapping of names: {_values(named)}"


def _number(value: Node) -> str:
    limits = [f"{sign} {value[key]:,}" for key, sign in _LIMITS.items() if key in value]
    return ", ".join([_NUMBERS[value["type"]], *limits])


_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_NUMBERS = {"integer": "whole number", "number": "number"}
_VALUES: Mapping[str, Callable[[Node], str]] = {
    "array": _array,
    "boolean": lambda _: "`true` `false`",
    "integer": _number,
    "number": _number,
    "object": _object,
    "string": lambda value: value.get("format", "text"),
}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def choices() -> str:
    """The long lists of values."""
    schema = build()
    rows = []
    for path, node in sections(schema):
        for key, value in node["properties"].items():
            for array in (value, *value.get("anyOf", ())):
                values = array.get("items", {}).get("enum", ())
                if len(values) > _MANY:
                    named = path.removeprefix("spec.").replace("healing.rules[].", "")
                    rows.append(f"`{named}.{key}`: " + ", ".join(f"`{one}`" for one in values) + ".")
    return "\n\n".join(rows)


def variables() -> str:
    """What a condition of a healing rule may name."""
    rows = [f"| `{name}` | {_cell(text)} |" for name, (_, text) in HEALING_VARIABLES.items()]
    return "\n".join(["| Name | |", "|---|---|", *rows])


def policies() -> str:
    """The ready policies, in the words of their headers."""
    return "\n\n".join(_header(file) for file in sorted((ROOT / "policies").glob("*.yaml")) if _header(file))


def _header(file: Path) -> str:
    text = file.read_text()
    if "kind: Policy" not in text:
        return ""
    lines = [line.removeprefix("#").strip() for line in text.split("apiVersion", 1)[0].splitlines()]
    prose = " ".join(line for line in lines if line and not line.startswith("yaml-language-server"))
    return f"**[{file.name}](../policies/{file.name})** {prose}"


PARTS: Mapping[str, Callable[[], str]] = {
    "options": options,
    "choices": choices,
    "variables": variables,
    "policies": policies,
}


def main() -> None:
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(), PARTS))
    SCHEMA.write_text(schema_text())


if __name__ == "__main__":
    main()
