"""Reading a policy file: every error at once, each with its place, what is wrong, and what was expected."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from elastic.config import read_model_shape
from elastic.errors import ElasticError
from healer.clock import Clock, SystemClock
from healer.policy.conflict import Contradiction
from healer.policy.document import Document, PolicyError
from healer.policy.lint import warnings
from healer.policy.messages import explain
from healer.policy.relations import contradictions
from healer.policy.schema import KeyPath, Policy, Target

__all__ = ["MAX_BYTES", "Checked", "PolicyError", "check_policy", "check_text", "load_policy", "parse_policy"]

MAX_BYTES = 1 << 20
MANY = 200
"""Wrong values from which on the rest of a file is not looked into: it is something else than a policy."""


class Checked(NamedTuple):
    """A policy without errors."""

    policy: Policy
    warnings: tuple[str, ...]
    """One line each, "file:line:column: path: what may not be meant"."""


def load_policy(path: str | Path) -> Policy:
    """Read and check a policy file; relative paths in it are taken from its own folder. Raises PolicyError."""
    file = Path(path)
    return parse_policy(_read(file), name=str(path), base=file.absolute().parent)


def check_policy(path: str | Path) -> Checked:
    """As `load_policy`, with what may not be meant. Raises PolicyError."""
    file = Path(path)
    return check_text(_read(file), name=str(path), base=file.absolute().parent)


def parse_policy(text: str, *, name: str, base: Path) -> Policy:
    """`name` is what errors call the file. Raises PolicyError."""
    return _policy(Document(name, text), base)


def check_text(text: str, *, name: str, base: Path, clock: Clock | None = None) -> Checked:
    """As `parse_policy`, with what may not be meant, which takes longer. Raises PolicyError."""
    document = Document(name, text)
    policy = _policy(document, base)
    wall = (clock or SystemClock()).wall()
    doubts = sorted({document.problem(one.path, one.text) for one in warnings(policy, wall)})
    return Checked(policy, tuple(_line(name, doubt) for doubt in doubts))


def _policy(document: Document, base: Path) -> Policy:
    name, context = document.name, {"base": str(base)}
    try:
        policy = Policy.model_validate(document.data, context=context)
    except ValidationError as error:
        details = error.errors(include_url=False)
        wrong = {document.written(tuple(one["loc"])) for one in details}
        found = [_told(document, one) for one in details if not _follows(one, wrong)]
        found += [document.conflict(one) for one in _rest(document.data, wrong, context)]
    else:
        found = [document.conflict(one) for one in contradictions(policy)]
        if not found:
            found = [document.problem(path, text) for path, text in _against_model(policy)]
        if not found:
            return policy
    raise PolicyError([_line(name, one) for one in sorted(set(found))])


def _told(document: Document, details: ErrorDetails) -> tuple[int, int, str]:
    path, text, at_key = explain(details)
    return document.problem(document.written(path), text, at_key)


def _line(name: str, found: tuple[int, int, str]) -> str:
    line, column, text = found
    return f"{name}:{line}:{column}: {text}"


def _read(file: Path) -> str:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            # a pipe would be waited for, and a device has no end
            kind = "a directory" if file.is_dir() else "no regular file"
            raise PolicyError([f"{file}:1:1: is {kind}, expected a policy file"])
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise PolicyError([f"{file}: no such file, expected a policy (see policies/default.yaml)"]) from None
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise PolicyError([f"{file}: cannot be read: {what}, expected a policy file"]) from None
    if len(content) > MAX_BYTES:
        raise PolicyError([f"{file}:1:1: is larger than {MAX_BYTES} bytes, expected a policy file"])
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        before = content[: error.start].decode()
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        wide = (
            " (it looks like UTF-16 or UTF-32)" if content.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe")) else ""
        )
        raise PolicyError([f"{file}:{line}:{column}: is not UTF-8 text{wide}, expected a policy file"]) from None


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
_VLLM_STAND_IN: dict[str, Any] = _STAND_IN | {
    "spec": {"target": {"kind": "vllm", "runDir": "x", "ranks": 2, "maxRanks": 2, "model": "x"}}
}
"""What a policy must hold, so that the rest can be checked although some of it is wrong."""


def _rest(data: dict[str, Any], wrong: set[KeyPath], context: dict[str, str]) -> Iterator[Contradiction]:
    """The contradictions among the values that are valid."""
    if len(wrong) > MANY:
        return
    # an entry that is wrong puts its whole list in doubt: the indices of the others would shift
    wrong = {path[: next((i for i, part in enumerate(path) if isinstance(part, int)), len(path))] for path in wrong}
    copy: Any = data
    for path in wrong:
        copy = _without(copy, path)
    spec = copy.get("spec") if isinstance(copy, dict) else None
    target = spec.get("target") if isinstance(spec, dict) else None
    is_vllm = isinstance(target, dict) and target.get("kind") == "vllm"
    try:
        policy = Policy.model_validate(_filled(copy, _VLLM_STAND_IN if is_vllm else _STAND_IN), context=context)
    except ValidationError:  # a relative of what is told already
        return
    for one in contradictions(policy):
        doubtful = any(path[: len(w)] == w for w in wrong for path in (one.path, one.other))
        if not doubtful:
            yield one


def _against_model(policy: Policy) -> Iterator[tuple[KeyPath, str]]:
    """What the model of the checkpoint contradicts. A checkpoint that is not on this machine contradicts nothing: a policy
    may be checked elsewhere than it runs."""
    target = policy.spec.target
    if not isinstance(target, Target):
        return  # `healer vllm check` does that
    if not Path(target.checkpoint, "config.json").exists():
        return
    try:
        model = read_model_shape(target.checkpoint)
    except ElasticError as error:
        yield ("spec", "target", "checkpoint"), str(error)
        return
    bounds = policy.spec.bounds
    survivable = max(0, target.ranks * target.slots_per_rank - model.experts) // target.slots_per_rank
    if bounds.redundancy_floor > survivable:
        text = f"{bounds.redundancy_floor} losses leave too few expert slots for {model.experts} experts, "
        yield ("spec", "bounds", "redundancyFloor"), f"{text}expected at most {survivable}"
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
