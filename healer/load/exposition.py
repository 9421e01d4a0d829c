"""A metrics endpoint's text as values of signals, by slot.

Only lines of the metrics that are asked for reach the parser: an endpoint of vLLM shows hundreds of series, and the rules
read a handful.
"""

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from healer.load.readings import AGGREGATES, GROUP, Reading
from healer.load.series import Counter, histogram_quantile, rate

MAX_BYTES = 8 << 20


class Kind(StrEnum):
    GAUGE = "gauge"
    RATE = "rate"
    QUANTILE = "quantile"


class Query(msgspec.Struct, frozen=True):
    """What of an endpoint's metrics makes one signal."""

    signal: str
    metric: str
    """As the text spells it: a counter with `_total`, a histogram without `_bucket`."""
    kind: Kind
    q: float = 0.95
    """Of QUANTILE, 0 to 1."""
    labels: tuple[tuple[str, str], ...] = ()
    """Series must carry these."""
    slot_label: str = ""
    """The label whose value is the slot; empty: the endpoint's own slot."""
    window_s: float = 30.0
    """RATE and QUANTILE: of what happened within this."""
    aggregate: str = "sum"
    """GAUGE: how the series of one slot become one value; counters are always summed."""

    @property
    def sample(self) -> str:
        return f"{self.metric}_bucket" if self.kind is Kind.QUANTILE else self.metric


_Sample = tuple[Mapping[str, str], float]


class BadText(ValueError):
    """What an endpoint sent is not the exposition format."""


class Endpoint:
    """The state that turns successive texts of one endpoint into readings. Not for use by two tasks at once."""

    def __init__(self, queries: Iterable[Query], slot: int = GROUP) -> None:
        self._slot = slot
        self._queries = tuple(queries)
        self._prefixes = tuple({query.sample for query in self._queries})
        self._counters: dict[tuple[str, int], Counter] = {}
        self._known: dict[str, tuple[str, Mapping[str, str]]] = {}
        """Name and labels by the text before the value: an endpoint shows the same series each time."""

    def read(self, text: str, at: float) -> tuple[Reading, ...]:
        """The readings of one text; a metric that it does not show gives none. Raises BadText."""
        series = self._series(text)
        found = (self._reading(query, series.get(query.sample, ()), at) for query in self._queries)
        return tuple(reading for reading in found if reading is not None)

    def _series(self, text: str) -> dict[str, list[_Sample]]:
        if len(text) > MAX_BYTES:
            raise BadText(f"is longer than {MAX_BYTES} bytes")
        known, self._known = self._known, {}
        series: dict[str, list[_Sample]] = {}
        for line in text.splitlines():
            if not line.startswith(self._prefixes):
                continue
            head, _, tail = line.rpartition("}") if "}" in line else line.partition(" ")
            family = known.get(head) or _family(line)
            self._known[head] = family
            try:
                value = float(tail.split(maxsplit=1)[0])
            except (ValueError, IndexError):
                raise BadText(f"is not the Prometheus text format: {line[:100]!r} has no value") from None
            series.setdefault(family[0], []).append((family[1], value))
        return series

    def _reading(self, query: Query, series: Iterable[tuple[Mapping[str, str], float]], at: float) -> Reading | None:
        gauges: dict[int, list[float]] = {}
        counts: dict[int, dict[float, float]] = {}
        for labels, value in series:
            if any(labels.get(name) != wanted for name, wanted in query.labels) or not math.isfinite(value):
                continue
            slot = self._slot_of(query, labels)
            bound = _bound(labels.get("le", "")) if query.kind is Kind.QUANTILE else 0.0
            if slot is None or bound is None:
                continue
            if query.kind is Kind.GAUGE:
                gauges.setdefault(slot, []).append(value)
            else:
                one = counts.setdefault(slot, {})
                one[bound] = one.get(bound, 0.0) + value
        values = {slot: AGGREGATES[query.aggregate](found) for slot, found in gauges.items()}
        for slot, one in counts.items():
            if (lately := self._lately(query, slot, one, at)) is not None:
                values[slot] = lately
        return Reading(query.signal, at, values) if values else None

    def _slot_of(self, query: Query, labels: Mapping[str, str]) -> int | None:
        if not query.slot_label:
            return self._slot
        shown = labels.get(query.slot_label, "")
        return int(shown) if shown.isdecimal() else None

    def _lately(self, query: Query, slot: int, counts: dict[float, float], at: float) -> float | None:
        counter = self._counters.get((query.signal, slot))
        if counter is None:
            counter = self._counters[query.signal, slot] = Counter(query.window_s)
        counter.add(at, counts)
        if counter.span_s <= 0:
            return None
        return rate(counter) if query.kind is Kind.RATE else histogram_quantile(counter.grown(), query.q)


def _family(line: str) -> tuple[str, Mapping[str, str]]:
    try:
        ((sample,),) = (family.samples for family in text_string_to_metric_families(line + "\n"))
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise BadText(f"is not the Prometheus text format: {line[:100]!r}: {error}") from None
    return sample.name, sample.labels


def _bound(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
