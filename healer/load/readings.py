"""The newest value of each signal, and what it is over the whole group.

A value is one of three things: a number; *idle*, when the source answered and nothing happened that could be measured
(no request, so no latency); *missing*, when nobody told in time. Missing is not zero, and idle is not missing.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum

import msgspec

GROUP = -1
"""In place of a slot: the value is of the group as a whole."""


class Reading(msgspec.Struct, frozen=True):
    """One signal as one look at its source found it."""

    signal: str
    at: float
    """Seconds of the monotonic clock."""
    values: dict[int, float]
    """By slot, or under `GROUP`. NaN: idle."""


class Known(StrEnum):
    VALUE = "value"
    IDLE = "idle"
    MISSING = "missing"


class Level(msgspec.Struct, frozen=True):
    """A signal over the group at one moment."""

    known: Known
    value: float = math.nan
    """After the aggregate; NaN unless `known` is VALUE."""
    ranks: int = 0
    """Ranks that it was made from; 0 for a group's value."""
    age_s: float = math.nan
    """Of the oldest value that took part."""


MISSING = Level(Known.MISSING)


def quantile(values: Collection[float], q: float) -> float:
    """The smallest value that a share `q` of all does not exceed. `values` must not be empty."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


AGGREGATES: Mapping[str, Callable[[Collection[float]], float]] = {
    "sum": math.fsum,
    "mean": lambda values: math.fsum(values) / len(values),
    "max": max,
    "min": min,
    "p50": lambda values: quantile(values, 0.5),
    "p95": lambda values: quantile(values, 0.95),
}


class Readings:
    """Keeps what was read last. Values of a rank stand by themselves: one silent endpoint ages out alone."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, float]] = {}
        self._times: dict[str, dict[int, float]] = {}

    def add(self, readings: Iterable[Reading]) -> None:
        for reading in readings:
            self._values.setdefault(reading.signal, {}).update(reading.values)
            self._times.setdefault(reading.signal, {}).update(dict.fromkeys(reading.values, reading.at))

    def level(self, signal: str, aggregate: str, ranks: AbstractSet[int], now: float, max_age_s: float) -> Level:
        """The signal over `ranks` and the group. Values older than `max_age_s`, or of ranks that are not among `ranks`, do
        not count; neither does a value with a time after `now`. Where fewer than half of `ranks` are known, the signal
        is missing: the rest need not be like them."""
        values, times = self._values.get(signal), self._times.get(signal)
        if not values or not times:
            return MISSING
        oldest = now - max_age_s
        if GROUP in values:
            return _single(values[GROUP], times[GROUP], oldest, now)
        if values.keys() == ranks and oldest <= min(times.values()) and max(times.values()) <= now:
            fresh: Collection[int] = ranks  # the usual case, at the speed of the built-ins
            found: Collection[float] = values.values()
            if math.isnan(math.fsum(found)):
                found = [value for value in found if not math.isnan(value)]
        else:
            fresh = [slot for slot in ranks if oldest <= times.get(slot, -math.inf) <= now]
            if not fresh or 2 * len(fresh) < len(ranks):
                return MISSING
            found = [value for slot in fresh if not math.isnan(value := values[slot])]
        age_s = now - min(map(times.__getitem__, fresh))
        if not found:
            return Level(Known.IDLE, ranks=len(fresh), age_s=age_s)
        value = AGGREGATES[aggregate](found)
        if aggregate == "sum":  # ranks that did not tell are taken to be as loaded as the others
            value *= len(ranks) / len(fresh)
        return Level(Known.VALUE, value, len(fresh), age_s)

    def forget(self, live: AbstractSet[int]) -> None:
        """Drop the values of ranks that are gone, so that memory stays bounded."""
        kept = live | {GROUP}
        for table in (self._values, self._times):
            for one in table.values():
                for slot in one.keys() - kept:
                    del one[slot]


def _single(value: float, at: float, oldest: float, now: float) -> Level:
    if not oldest <= at <= now:
        return MISSING
    if math.isnan(value):
        return Level(Known.IDLE, age_s=now - at)
    return Level(Known.VALUE, value, 0, now - at)
