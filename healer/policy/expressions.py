"""Conditions in CEL, the Common Expression Language: compiled and tried out when the policy is loaded.

The library is imported only where a policy has a condition: it takes 0.1 s.
"""

import contextlib
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from elastic.errors import ElasticError

HEALING_VARIABLES: Mapping[str, tuple[object, str]] = {
    "verdict": ("unhealthy", "string; healthy, unhealthy or unknown"),
    "cause": ("process-death", "string"),
    "confidence": ("conclusive", "string; conclusive, quorum, deadline or none"),
    "severity": ("critical", "string, of the worst supporting evidence; info, warning or critical"),
    "slot": (1, "int"),
    "host": ("node-1", "string"),
    "labels": ({}, "map of strings, of the slot"),
    "xid": (79, "int, the latest XID; 0 without one"),
    "evidence": (
        [{"what": "xid", "source": "nvml", "value": 79, "severity": "critical", "ageSeconds": 0.5}],
        "list of maps with what, source, value, severity and ageSeconds: the supporting evidence",
    ),
    "sources": (1, "int, independent sources of it"),
    "failures": (1, "int, of this slot within bounds.faultBudget.window (1h without a budget), this one included"),
    "live": (4, "int, ranks that are live"),
    "target": (4, "int, ranks that there should be"),
    "lost": (1, "int, ranks that are unhealthy at this moment"),
}
"""What `match.when` may name: an example, and what it is."""

MACRO_NAMES = re.compile(r"\.(?:all|exists|exists_one|map|filter)\(\s*([A-Za-z_]\w*)\s*,")
LOOP = re.compile(r"\.\s*(?:all|exists|exists_one|map|filter)\s*\(")
MAX_CHARS, MAX_LOOPS = 2000, 2
"""The library has no limit of cost: ten loops within one another would hold up the daemon for ever."""
_AT = re.compile(r"ERROR: <input>:(\d+):(\d+): (?:Syntax error: )?(.*)")


class ExpressionError(ElasticError):
    """`at`: the character of the text, from 1, where it is wrong; None where that is not known."""

    def __init__(self, message: str, at: int | None = None) -> None:
        super().__init__(message)
        self.at = at


class MissingKey(ExpressionError):
    """A map lacks a key that the condition asks for without `has()`."""


class Condition:
    """A compiled condition. Working it out is pure and has no loops but those over the lists given to it."""

    def __init__(self, text: str) -> None:
        """Raises ExpressionError."""
        import cel

        self.text = text
        if len(text) > MAX_CHARS:
            raise ExpressionError(f"{_short(text)} has {len(text)} characters, expected at most {MAX_CHARS}")
        loops = [found.start() for found in LOOP.finditer(text)]
        if len(loops) > MAX_LOOPS:
            words = f"{len(loops)} loops (all, exists, exists_one, map, filter), expected at most {MAX_LOOPS}"
            raise ExpressionError(f"{_short(text)} has {words}", loops[MAX_LOOPS] + 1)
        try:
            self._program = cel.compile(text)
        except Exception as error:
            match = _AT.search(str(error))
            what = (match[3] if match else str(error)).split(" expecting ")[0]
            at = sum(len(line) + 1 for line in text.split("\n")[: int(match[1]) - 1]) + int(match[2]) if match else None
            raise ExpressionError(f"{_short(text)} is no condition: {what}", at) from None

    @property
    def names(self) -> frozenset[str]:
        """The variables that it needs."""
        return frozenset(self._program.variables()) - frozenset(MACRO_NAMES.findall(self.text))

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Raises ExpressionError where a value is missing or of the wrong type, or the result is neither true nor false."""
        try:
            result = self._program.execute(dict(values))
        except KeyError as error:
            raise MissingKey(f"{_short(self.text)} cannot be worked out: no key {error}") from None
        except Exception as error:
            raise ExpressionError(f"{_short(self.text)} cannot be worked out: {error}") from None
        if not isinstance(result, bool):
            raise ExpressionError(f"{_short(self.text)} gives {result!r}, expected true or false")
        return result


@lru_cache(maxsize=4096)
def compiled(text: str) -> Condition:
    """The condition, compiled once: that takes milliseconds, and a decision must not wait for it. Raises ExpressionError."""
    return Condition(text)


def check(text: str, examples: Mapping[str, Any]) -> Condition:
    """Compile it and try it out on examples of all variables. Raises ExpressionError."""
    condition = compiled(text)
    unknown = sorted(condition.names - examples.keys())
    if unknown:
        position = re.search(rf"\b{re.escape(unknown[0])}\b", text)
        named = ", ".join(one if len(one) <= 40 else f"{one[:37]}..." for one in unknown[:8])
        raise ExpressionError(
            f"{_short(text)} names {named}, expected names among {', '.join(sorted(examples)) or 'none'}",
            position.start() + 1 if position else None,
        )
    with contextlib.suppress(MissingKey):  # labels of the site, which the examples cannot know
        condition.holds(examples)
    return condition


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"{line[:57]}...")
