"""What the parts of the schema share: the model, and values with units. Errors of values say what was expected."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel
from pydantic_core import core_schema

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)
DURATION_PATTERN = r"^[0-9]+(\.[0-9]+)?(ms|s|m|h|d)$"
_LONGEST_S = 3660 * 86400.0

SPAN_PATTERN = "^[0-9]+(-[0-9]+)?$"
_SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def parse_duration(value: object) -> float:
    """Seconds of "100ms", "2s", "1.5m", "1h" or "7d". Raises ValueError that says what was expected."""
    seconds = _seconds(value)
    if not seconds:
        raise ValueError(
            f'{_shown(value)} is not a duration, expected a positive number with a unit, such as "100ms" or "2s"'
        )
    return seconds


def parse_window(value: object) -> float:
    """As `parse_duration`, or 0 for "0s"."""
    seconds = _seconds(value)
    if seconds is None:
        raise ValueError(f'{_shown(value)} is not a duration, expected a number with a unit, such as "0s" or "5m"')
    return seconds


def _seconds(value: object) -> float | None:
    match = _DURATION.fullmatch(value) if isinstance(value, str) and len(value) < 64 else None
    seconds = float(match[1]) * _UNITS[match[2]] if match else None
    if seconds is not None and seconds > _LONGEST_S:
        raise ValueError(f"{_shown(value)} is too long, expected at most {_LONGEST_S / 86400:g}d")
    return seconds


def show_duration(seconds: float) -> str:
    return f"{seconds * 1000:g}ms" if 0 < seconds < 1 else f"{seconds:g}s"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Span(NamedTuple):
    """Whole numbers from `first` to `last`, both included."""

    first: int
    last: int

    def holds(self, number: int) -> bool:
        return self.first <= number <= self.last

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def parse_span(value: object) -> Span:
    """13 or "144-150". Raises ValueError that says what was expected."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Span(value, value)
    match = _SPAN.fullmatch(value) if isinstance(value, str) else None
    span = Span(int(match[1]), int(match[2] or match[1])) if match else None
    if span is None or span.first > span.last:
        raise ValueError(f'{_shown(value)} is not valid, expected a whole number or a range such as "144-150"')
    return span


def _absolute(value: str, info: ValidationInfo) -> str:
    if not value:
        raise ValueError("'' is empty, expected a path")
    if "\0" in value:
        raise ValueError("holds a zero byte, expected a path")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{_shown(value)} has a character that no path can have, expected a path") from None
    base = Path((info.context or {}).get("base", "."))
    try:
        return str((base / Path(value).expanduser()).resolve())
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{_shown(value)} cannot be followed ({error}), expected a path") from None


def is_url(text: str) -> bool:
    """Whether it is an http or https address with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


@dataclass(frozen=True)
class OneOf:
    """Annotation of a string that must be one of `values`."""

    values: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.literal_schema(list(self.values))


Listed = Field(strict=False)
"""For a tuple: a YAML list is one."""
Duration = Annotated[
    float, BeforeValidator(parse_duration), WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN})
]
"""Seconds; above 0."""
Window = Annotated[
    float, BeforeValidator(parse_window), WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN})
]
"""Seconds; 0 is allowed."""
Numbers = Annotated[
    Span,
    PlainValidator(parse_span),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": SPAN_PATTERN}]}),
]
PathText = Annotated[str, AfterValidator(_absolute), WithJsonSchema({"type": "string", "format": "path"})]
"""Relative paths are relative to the policy file."""
Port = Annotated[int, Field(ge=0, le=65535)]
"""0: any free port."""
Name = Annotated[str, Field(min_length=1, max_length=63)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=1_000_000)]
Positive = Annotated[float, Field(gt=0)]


def _alias(name: str) -> str:
    return to_camel(name.removesuffix("_s"))


class Model(BaseModel):
    """A mapping of the file: unknown keys are refused, numbers are not taken from strings, values never change."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        defer_build=True,
        alias_generator=_alias,
    )


KeyPath = tuple[str | int, ...]
"""Where in the file: keys and list indices."""
