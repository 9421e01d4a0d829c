"""Reading a policy file: every error at once, each with its place, what is wrong, and what was expected."""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from elastic.config import read_model_shape
from elastic.errors import ElasticError
from healer.policy.schema import KeyPath, Policy, contradictions

MAX_BYTES = 1 << 20
_MAX_NODES = 20_000
_MAX_DEPTH = 32

_Place = tuple[int, int]


class PolicyError(ElasticError):
    """`problems`: one line each, "file:line:column: path: what is wrong, expected what"."""

    def __init__(self, problems: list[str]) -> None:
        several = [f"the policy has {len(problems)} problems", *problems]
        super().__init__("\n".join(several if len(problems) > 1 else problems))
        self.problems = tuple(problems)


def load_policy(path: str | Path) -> Policy:
    """Read and check a policy file; relative paths in it are taken from its own folder. Raises PolicyError."""
    file = Path(path)
    return parse_policy(_read(file), name=str(path), base=file.absolute().parent)


def parse_policy(text: str, *, name: str, base: Path) -> Policy:
    """`name` is what errors call the file. Raises PolicyError."""
    document = _Document(name, text)
    context = {"base": str(base)}
    try:
        policy = Policy.model_validate(document.data, context=context)
    except ValidationError as error:
        details = error.errors(include_url=False)
        wrong = {tuple(one["loc"]) for one in details}
        found = [document.problem(*_explain(one)) for one in details if not _follows(one, wrong)]
        found += [document.problem(*one) for one in _rest(document.data, wrong, context)]
    else:
        found = [document.problem(one.path, one.text) for one in contradictions(policy)]
        if not found:
            found = [document.problem(path, text) for path, text in _against_model(policy)]
        if not found:
            return policy
    raise PolicyError([f"{name}:{line}:{column}: {text}" for line, column, text in sorted(set(found))])


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise PolicyError([f"{file}: is larger than {MAX_BYTES} bytes, expected a policy file"])
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PolicyError([f"{file}: no such file, expected a policy (see policies/default.yaml)"]) from None
    except UnicodeDecodeError as error:
        raise PolicyError([f"{file}: is not UTF-8 text (byte {error.start})"]) from None
    except OSError as error:
        raise PolicyError([f"{file}: cannot be read: {error.strerror}"]) from None


_STAND_IN: dict[str, Any] = {
    "apiVersion": "healer/v1",
    "kind": "Policy",
    "metadata": {"name": "x"},
    "spec": {
        "target": {
            "kind": "embedded",
            "checkpoint": "x",
            "runDir": "x",
            "ranks": 1,
            "maxRanks": 1,
            "slotsPerRank": 1,
        }
    },
}
"""What a policy must hold, so that the rest can be checked although some of it is wrong."""


def _rest(data: dict[str, Any], wrong: set[KeyPath], context: dict[str, str]) -> Iterator[tuple[KeyPath, str]]:
    """The contradictions among the values that are valid."""
    # an entry that is wrong puts its whole list in doubt: the indices of the others would shift
    wrong = {path[: next((i for i, part in enumerate(path) if isinstance(part, int)), len(path))] for path in wrong}
    copy: Any = data
    for path in wrong:
        copy = _without(copy, path)
    try:
        policy = Policy.model_validate(_filled(copy, _STAND_IN), context=context)
    except ValidationError:  # a relative of what is told already
        return
    for one in contradictions(policy):
        doubtful = any(path[: len(w)] == w for w in wrong for path in (one.path, one.other))
        if not doubtful:
            yield one.path, one.text


def _against_model(policy: Policy) -> Iterator[tuple[KeyPath, str]]:
    """What the model of the checkpoint contradicts. A checkpoint that is not on this machine contradicts nothing: a policy
    may be checked elsewhere than it runs."""
    target = policy.spec.target
    if not Path(target.checkpoint, "config.json").exists():
        return
    try:
        model = read_model_shape(target.checkpoint)
    except ElasticError as error:
        yield ("spec", "target", "checkpoint"), str(error)
        return
    for field, text in policy.group().problems(model):
        if field in type(target).model_fields:
            yield ("spec", "target", to_camel(field)), text


def _filled(data: Any, stand_in: Any) -> Any:
    if not isinstance(data, dict) or not isinstance(stand_in, dict):
        return data
    filled = {key: _filled(data[key], value) if key in data else value for key, value in stand_in.items()}
    return {**data, **filled}


def _follows(details: ErrorDetails, wrong: set[KeyPath]) -> bool:
    """A list is "too short" only because its wrong entries do not count."""
    path = tuple(details["loc"])
    return details["type"] == "too_short" and any(len(w) > len(path) and w[: len(path)] == path for w in wrong)


def _without(data: Any, path: KeyPath) -> Any:
    if not path or not isinstance(data, dict) or path[0] not in data:
        return data
    if len(path) == 1:
        return {key: value for key, value in data.items() if key != path[0]}
    return {**data, path[0]: _without(data[path[0]], path[1:])}


class _Document:
    """A YAML file as plain values, and the place of each."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._places: dict[KeyPath, tuple[_Place, _Place]] = {(): ((1, 1), (1, 1))}
        self._nodes = 0
        yaml = YAML(typ="rt", pure=True)
        try:
            root = yaml.load(text)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            what = " ".join(str(error.problem or error.context).split())
            raise PolicyError([f"{name}:{line}:{column}: not valid YAML: {what}"]) from None
        except (YAMLError, ValueError, RecursionError) as error:
            raise PolicyError([f"{name}:1:1: not valid YAML: {' '.join(str(error).split())}"]) from None
        if not isinstance(root, CommentedMap):
            raise PolicyError([f"{name}:1:1: is {_kind(root)}, expected a mapping with apiVersion: healer/v1"])
        self.data = self._plain(root, ())

    def problem(self, path: KeyPath, text: str, at_key: bool = False) -> tuple[int, int, str]:
        known = path
        while known not in self._places:
            known = known[:-1]
        key, value = self._places[known]
        # what is missing is reported where its parent's key stands
        line, column = key if at_key or known != path else value
        shown = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
        return line, column, f"{shown}: {text}"

    def _plain(self, node: Any, path: KeyPath) -> Any:
        self._nodes += 1
        if self._nodes > _MAX_NODES or len(path) > _MAX_DEPTH:
            raise PolicyError(
                [f"{self.name}:1:1: is too large or too deeply nested (aliases count), expected a policy"]
            )
        if isinstance(node, CommentedMap):
            result = {}
            for key, value in node.items():
                self._note(node, key, (*path, key), path)
                result[key] = self._plain(value, (*path, key))
            return result
        if isinstance(node, CommentedSeq):
            for index in range(len(node)):
                self._note(node, index, (*path, index), path)
            return [self._plain(value, (*path, index)) for index, value in enumerate(node)]
        for kind in (bool, int, float, str):
            if isinstance(node, kind):
                return kind(node)
        return node

    def _note(self, node: Any, key: Any, path: KeyPath, parent: KeyPath) -> None:
        try:
            line, column = node.lc.item(key) if isinstance(node, CommentedSeq) else node.lc.value(key)
            key_line, key_column = (line, column) if isinstance(node, CommentedSeq) else node.lc.key(key)
        except (KeyError, TypeError):  # merged in from an anchor
            self._places[path] = self._places[parent]
            return
        self._places[path] = ((key_line + 1, key_column + 1), (line + 1, column + 1))


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if value else "an empty list"


def _explain(details: ErrorDetails) -> tuple[KeyPath, str, bool]:
    """Path, text, and whether the key rather than the value is at fault."""
    path, kind, value = tuple(details["loc"]), details["type"], details["input"]
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        known = _keys(path[:-1])
        close = difflib.get_close_matches(str(path[-1]), known, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return path, f"unknown key{hint}, expected one of {', '.join(known)}", True
    if kind == "missing":
        return path, "is missing, expected a value", True
    if kind == "value_error":
        return path, str(context["error"]), False
    shown = _kind(value)
    if kind == "string_pattern_mismatch":
        return path, f"{shown} does not fit, expected lower-case letters, digits, '-' and '.', at most 63", False
    expected = _EXPECTED.get(kind, details["msg"])
    try:
        expected = expected.format(**context)
    except (KeyError, IndexError):
        expected = details["msg"]
    return path, f"{shown} is not valid, expected {expected}", False


_EXPECTED = {
    "invalid_key": "a string as key",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "string_too_short": "at least {min_length} character",
    "bool_type": "true or false",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "too_short": "at least {min_length} entry",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
}


def _keys(path: KeyPath) -> list[str]:
    """The keys that the schema knows at a place."""
    model: type[BaseModel] = Policy
    for part in path:
        if isinstance(part, int):
            continue
        field = next((f for f in model.model_fields.values() if f.alias == part), None)
        if field is None:
            break
        model = next(iter(_models(field.annotation)), model)
    return [field.alias or "" for field in model.model_fields.values()]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
