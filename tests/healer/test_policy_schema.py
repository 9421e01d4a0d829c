"""The schema as a whole: every key is read, documented and in the JSON Schema."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from elastic.config import GroupConfig
from healer.diagnosis import Limits
from healer.policy import docs
from healer.policy.json_schema import build, schema_text
from healer.policy.load import load_policy, parse_policy
from healer.policy.schema import Model, Policy
from tests.healer.support import POLICY

REPOSITORY = Path(__file__).parents[2]
FULL = Path(__file__).parent / "policies/full.yaml"
FULL_VLLM = FULL.with_name("full-vllm.yaml")
READY = sorted(f for f in (REPOSITORY / "policies").glob("*.yaml") if "kind: Policy" in f.read_text())
SCHEMA = build()
KEYS = tuple(docs.keys(SCHEMA))
FIXED = {
    "apiVersion",
    "kind",
    "spec.target.kind",
    "spec.target of kind embedded.kind",
    "spec.target of kind vllm.kind",
    "spec.load.rules[] of kind predictive.method",
}
"""Keys that take one value only."""


def plain(file: Path) -> Any:
    return YAML(typ="safe", pure=True).load(file)


def written(node: Any, value: Any, path: str) -> dict[str, list[Any]]:
    """The values in a file, by the places that `docs.keys` gives them."""
    found: dict[str, list[Any]] = {}
    if not isinstance(value, dict):
        return found
    for key, inner in value.items():
        place = f"{path}.{key}".lstrip(".")
        found.setdefault(place, []).append(inner)
        for suffix, schema in docs.mappings(SCHEMA, node["properties"][key]):
            for one in chosen(suffix, inner):
                for deeper, values in written(schema, one, f"{place}{suffix}").items():
                    found.setdefault(deeper, []).extend(values)
    return found


def chosen(suffix: str, value: Any) -> list[Any]:
    """What stands in a list or a mapping of names, of the kind that is asked for where there is one."""
    kind = suffix.partition(" of kind ")[2]
    entries = value if "[]" in suffix else list(value.values()) if ".NAME" in suffix else [value]
    return [one for one in entries if not kind or one["kind"] == kind]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_read_and_documented(key: str) -> None:
    """A full policy has a value for it other than its default; the document has a row for it."""
    values = [value for file in (FULL, FULL_VLLM) for value in written(SCHEMA, plain(file), "").get(key, ())]
    assert values, f"no value for {key} in {FULL.name} or {FULL_VLLM.name}"
    section, _, name = key.rpartition(".")
    node = dict(docs.sections(SCHEMA))[section]
    default = node["properties"][name].get("default")
    assert key in FIXED or any(value != default for value in values)
    text = docs.DOCUMENT.read_text().split(f"\n### {section or 'The file'}\n", 1)[1].split("\n### ", 1)[0]
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
    assert len(row.split("|")[-2].strip()) > 3, f"{key} has no description"


def differing(policy: Any, other: Any, path: str) -> set[str]:
    """The fields of two policies that differ, down to where one of them has nothing."""
    if not isinstance(policy, Model) or not isinstance(other, Model):
        return {path} if policy != other else set()
    return {
        found
        for name in type(policy).model_fields
        for found in differing(getattr(policy, name), getattr(other, name, None), f"{path}.{name}".lstrip("."))
    }


def test_what_is_written_in_the_full_policy_arrives_in_the_loaded_one() -> None:
    policy, least = load_policy(FULL), parse_policy(POLICY, name="p", base=Path("/base"))
    unread = {
        f"spec.{part}.{name}"
        for part in ("api", "detection", "bounds", "load", "healing")
        for name in type(getattr(policy.spec, part)).model_fields
    } - differing(policy, least, "")
    assert {u for u in unread if not any(d.startswith(u + ".") for d in differing(policy, least, ""))} == set()
    target, warned = policy.spec.target, policy.spec.healing.rules[0]
    assert target.labels_of(2) == {"rack": "b", "power": "low"}
    assert (target.labels_of(1), target.labels_of(5)) == ({"rack": "a"}, {})
    assert [str(span) for span in warned.match.xid or ()] == ["13", "144-150"]
    assert (warned.attempts_of(warned.ladder[0]), warned.backoff_of(warned.ladder[0])) == (2, 3.0)
    assert (warned.attempts_of(warned.ladder[1]), warned.backoff_of(warned.ladder[1])) == (4, 2.0)
    assert policy.spec.healing.rules[1].actions == ("retry", "replace", "hook", "drain", "scale-down", "human")
    assert policy.max_ranks == 6


def test_every_setting_of_the_group_reaches_the_executor() -> None:
    group, default = load_policy(FULL).group(), parse_policy(POLICY, name="p", base=Path("/base")).group()
    same = {name for name in GroupConfig.__struct_fields__ if getattr(group, name) == getattr(default, name)}
    assert same <= {"ranks", "fault_injection"}


def test_every_limit_of_the_diagnosis_can_be_set_and_has_its_default() -> None:
    limits, default = load_policy(FULL).limits, parse_policy(POLICY, name="p", base=Path("/base")).limits
    assert default == Limits(stall_after_s=1.0, silent_after_s=10.0, fault_window_s=30.0)
    assert [n for n in Limits.__struct_fields__ if getattr(limits, n) == getattr(default, n)] == []


def test_the_generated_documents_are_up_to_date() -> None:
    """`python -m healer.policy.docs` writes them."""
    assert docs.SCHEMA.read_text() == schema_text()
    text = docs.DOCUMENT.read_text()
    assert docs.rendered(text, docs.PARTS) == text


@pytest.mark.parametrize("file", [*READY, FULL, FULL_VLLM], ids=lambda file: file.stem)
def test_the_json_schema_accepts_what_the_daemon_accepts(file: Path) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(plain(file))


def test_the_json_schema_refuses_unknown_keys_and_wrong_values() -> None:
    check = jsonschema.Draft202012Validator(SCHEMA)
    check.check_schema(SCHEMA)
    for path, value in (
        (("spec", "target", "ranks"), "4"),
        (("spec", "detection", "stallAfter"), 2),
        (("spec", "healing", "rules", 0, "actions", 1), "reboot"),
        (("spec", "load", "rules", 0, "kind"), "guess"),
        (("spec", "dryrun"), True),
    ):
        document = node = plain(FULL)
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = value
        assert not check.is_valid(document), path


def test_descriptions_are_sentences_on_what_a_value_does() -> None:
    nodes = [SCHEMA, *SCHEMA["$defs"].values()]
    missing = [n.get("description", "")[:20] for n in nodes if len(n.get("description", "")) < 8]
    assert missing == []
    assert json.loads(schema_text()) == SCHEMA
    assert Policy.model_fields.keys() <= {"api_version", "kind", "metadata", "spec"}
