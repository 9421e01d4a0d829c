"""Conditions that hold for no case that there can be: for the warnings of `healer policy check`.

A condition is tried on every combination of the values that could decide it: for a word all words that there are, for a
number those that it is compared with and their neighbours. Where that is not all that matters (arithmetic, patterns, lists),
or there are too many combinations, nothing is claimed.
"""

import difflib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from healer.diagnosis import Cause, Confidence, Health
from healer.evidence import Severity, What
from healer.policy.expressions import Condition, ExpressionError

MOST_COMBINATIONS = 4000
"""About 10 us each."""

_TEXT = re.compile(r"'[^']*'|\"[^\"]*\"")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")
_BEYOND = re.compile(r"[+*/%]|(?<![\s(,=<>!&|?:])-|\b(?:matches|size)\s*\(")
"""Arithmetic, patterns and sizes of lists."""

WORDS: Mapping[str, tuple[str, ...]] = {
    "verdict": tuple(Health),
    "cause": tuple(Cause),
    "confidence": tuple(Confidence),
    "severity": ("", *Severity),
}
EVIDENCE_WORDS: Mapping[str, tuple[str, ...]] = {"what": tuple(What), "severity": tuple(Severity)}
EVIDENCE_KEYS = ("what", "source", "value", "severity", "ageSeconds")


def texts_in(condition: str) -> tuple[str, ...]:
    """The strings that a condition is written with."""
    return tuple(found[0][1:-1] for found in _TEXT.finditer(condition))


def numbers_in(condition: str) -> tuple[float, ...]:
    return tuple(float(found[0]) for found in _NUMBER.finditer(_TEXT.sub("''", condition)))


def never_holds(condition: Condition, domains: Mapping[str, Sequence[object]]) -> bool:
    """`domains`: by variable, all values that need to be tried. False where nothing can be claimed."""
    if _BEYOND.search(_TEXT.sub("''", condition.text)) or not condition.names <= domains.keys():
        return False
    tried = {name: domains[name] for name in sorted(condition.names)}
    if math.prod(len(values) for values in tried.values()) > MOST_COMBINATIONS:
        return False
    return not any(_met(condition, dict(zip(tried, one, strict=True))) for one in itertools.product(*tried.values()))


def around(numbers: Sequence[float], low: float, high: float, step: float) -> tuple[float, ...]:
    """The ends of a range, and each of the numbers with its neighbours, as far as they lie within."""
    near = {value + shift for number in numbers for value in (number, -number) for shift in (-step, 0.0, step)}
    return tuple(sorted({low, high, *(value for value in near if low <= value <= high)}))


def unknown_words(condition: str) -> Iterator[str]:
    """Strings that are compared with a variable that never has such a value, each as a sentence."""
    loops = "|".join(dict.fromkeys(re.findall(r"\bevidence\s*\.\s*\w+\(\s*(\w+)\s*,", condition)))
    items = rf"(?:evidence\s*\[\s*\d+\s*\]{'|(?:' + loops + ')' if loops else ''})"
    for name, known in WORDS.items():
        yield from _unknown(condition, rf"(?<![\w.]){name}\b", name, known)
    for name, known in EVIDENCE_WORDS.items():
        yield from _unknown(condition, rf"(?<![\w.]){items}\s*\.\s*{name}\b", f"evidence.{name}", known)
    plain = _TEXT.sub(lambda found: "'" + "_" * (len(found[0]) - 2) + "'", condition)
    for key in re.findall(rf"(?<![\w.]){items}\s*\.\s*(\w+)", plain):
        if key not in EVIDENCE_KEYS:
            yield f"evidence has no {key}, expected one of {', '.join(EVIDENCE_KEYS)}{_close(key, EVIDENCE_KEYS)}"


def _unknown(condition: str, variable: str, name: str, known: Sequence[str]) -> Iterator[str]:
    text = r"('[^']*'|\"[^\"]*\")"
    compared = [
        *re.findall(rf"{variable}\s*[=!]=\s*{text}", condition),
        *re.findall(rf"{text}\s*[=!]=\s*{variable}", condition),
    ]
    for words in re.findall(rf"{variable}\s+in\s*\[([^\]]*)\]", condition):
        compared += _TEXT.findall(words)
    for word in dict.fromkeys(one[1:-1] for one in compared):
        if word not in known:
            close = _close(word, known)
            yield f"{name} is never {word!r}{close or ', expected one of ' + ', '.join(filter(None, known))}"


def _close(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _met(condition: Condition, values: Mapping[str, object]) -> bool:
    try:
        return condition.holds(values)
    except ExpressionError:
        return False
