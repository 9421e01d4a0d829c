"""What pydantic found wrong, in the words of a policy file."""

import datetime
import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from healer.policy.schema import KeyPath, Policy
from healer.policy.schema.policy import NAME_PATTERN
from healer.policy.schema.scaling import SIGNAL_NAME

_LONGEST = 60
"""Characters of a value that a message repeats."""


def kind_of(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, datetime.date):
        return f"the date {value} (with quotes it is a string)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float, str)):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    return "a value with a tag of YAML"


def explain(details: ErrorDetails) -> tuple[KeyPath, str, bool]:
    """Path, text, and whether the key rather than the value is at fault."""
    path, kind, value = tuple(details["loc"]), details["type"], details["input"]
    context = details.get("ctx", {})
    if path and path[-1] == "[key]":
        return path[:-1], f"{kind_of(value)} is no name that is allowed here, expected {_named(kind, context)}", True
    if kind == "extra_forbidden":
        known = _keys(path[:-1])
        close = difflib.get_close_matches(str(path[-1]), known, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return path, f"unknown key{hint}, expected one of {', '.join(known)}", True
    if kind == "missing":
        return path, "is missing, expected a value", True
    if kind == "union_tag_not_found":
        return (*path, "kind"), f"is missing, expected one of {_kinds(path)}", True
    if kind == "union_tag_invalid":
        return (*path, "kind"), f"{context['tag']!r} is not valid, expected one of {context['expected_tags']}", False
    if kind == "value_error":
        return path, str(context["error"]), False
    shown = kind_of(value)
    if kind in ("tuple_type", "list_type") and isinstance(value, (bool, int, float, str)) and len(shown) <= _LONGEST:
        return path, f"{shown} is not valid, expected a list, such as [{_as_written(value)}]", False
    if kind == "string_pattern_mismatch":
        return path, f"{shown} does not fit, expected {_named(kind, context)}", False
    expected = _EXPECTED.get(kind, details["msg"])
    try:
        expected = expected.format(**context)
    except (KeyError, IndexError):
        expected = details["msg"]
    hint = _HINTS.get(str(value), "") if kind == "literal_error" and path[-3:-2] == ("actions",) else ""
    return path, f"{shown} is not valid, expected {expected}{hint}", False


def _as_written(value: object) -> str:
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return repr(value)
    return kind_of(value) if isinstance(value, bool) else str(value)


def _named(kind: str, context: dict[str, Any]) -> str:
    if kind != "string_pattern_mismatch":
        return "a string of 1 to 63 characters"
    return _PATTERNS.get(str(context.get("pattern")), "another form")


def _kinds(path: KeyPath) -> str:
    return ", ".join(repr(k) for model in _models_at(path) if (k := _kind_of_model(model)))


_PATTERNS = {
    NAME_PATTERN: "lower-case letters, digits, '-' and '.', at most 63",
    SIGNAL_NAME: "a lower-case letter, then letters and digits, at most 63",
}

_PLAIN = re.compile(r"[A-Za-z][\w.*/-]*", re.ASCII)

_HOOK = " ({hook: NAME} calls one of spec.hooks)"
_HINTS = {
    "quarantine": " (bounds.faultBudget puts slots into quarantine)",
    "notify": " (spec.notifications tells people)",
    "restart": " (replace ends a rank and starts another)",
} | dict.fromkeys(("reset", "reboot", "webhook", "exec", "page"), _HOOK)
"""Actions that people look for."""

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
    "too_long": "at most {max_length} entries",
    "string_too_long": "at most {max_length} characters",
    "dict_type": "a mapping",
    "finite_number": "a number",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
}


def _keys(path: KeyPath) -> list[str]:
    """The keys that the schema knows at a place."""
    return list(dict.fromkeys(field.alias or "" for model in _models_at(path) for field in model.model_fields.values()))


def _models_at(path: KeyPath) -> list[type[BaseModel]]:
    """What may stand at a place: several where a union has not been told apart."""
    models: list[type[BaseModel]] = [Policy]
    named = False  # the next part is a name that the file chose
    for part in path:
        if isinstance(part, int) or named:
            named = False
            continue
        of_kind = [model for model in models if _kind_of_model(model) == part]
        if of_kind:
            models = of_kind
            continue
        annotations = [f.annotation for model in models for f in model.model_fields.values() if f.alias == part]
        if not annotations:
            break
        named = any(get_origin(one) is dict for annotation in annotations for one in _parts(annotation))
        models = [one for annotation in annotations for one in _parts(annotation) if _is_model(one)] or models
    return models


def _kind_of_model(model: type[BaseModel]) -> str | None:
    kind = model.model_fields.get("kind")
    choices = get_args(kind.annotation) if kind else ()
    return choices[0] if len(choices) == 1 else None


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in get_args(annotation):
        yield from _parts(argument)


def _is_model(one: Any) -> bool:
    return isinstance(one, type) and issubclass(one, BaseModel)
