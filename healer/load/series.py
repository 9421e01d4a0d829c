"""Counters and histograms over time: rates and quantiles of what happened lately, continuous across restarts.

A counter that is smaller than before was reset: what it shows now has been counted since. A first sight of a counter is a
beginning, never a jump, so that the totals of a long life do not look like one second's work.
"""

import math
from collections import deque
from collections.abc import Mapping

STEPS = 6
"""A window is kept as so many parts: bounded memory, and a window is at most a sixth longer than asked for."""


class Counter:
    """One counter, or one histogram as a mapping of upper bounds to cumulative counts."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._last: dict[float, float] = {}
        self._total: dict[float, float] = {}
        self._marks: deque[tuple[float, dict[float, float]]] = deque()

    def add(self, at: float, counts: Mapping[float, float]) -> None:
        """`counts` as the source shows them at `at` (seconds)."""
        last = self._last
        # one series of a histogram that fell means that all were reset with it
        reset = any(count < last.get(key, -math.inf) for key, count in counts.items())
        for key, count in counts.items():
            before = last.get(key)
            grown = count if reset else 0.0 if before is None and not last else count - (before or 0.0)
            self._total[key] = self._total.get(key, 0.0) + grown
        self._last = dict(counts)
        marks = self._marks
        if len(marks) < 2 or at - marks[-2][0] >= self._window_s / STEPS:
            marks.append((at, dict(self._total)))
        else:
            marks[-1] = (at, dict(self._total))
        while len(marks) > 2 and marks[1][0] <= at - self._window_s:
            marks.popleft()

    @property
    def span_s(self) -> float:
        return self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0

    def grown(self) -> dict[float, float]:
        """By how much each count grew within the window."""
        (_, first), (_, last) = self._marks[0], self._marks[-1]
        return {key: total - first.get(key, 0.0) for key, total in last.items()}


def rate(counter: Counter) -> float | None:
    """A second, within the window; None before the second sight. The counter's key is 0."""
    return counter.grown().get(0.0, 0.0) / counter.span_s if counter.span_s > 0 else None


def histogram_quantile(grown: Mapping[float, float], q: float) -> float:
    """The `q` quantile of cumulative counts by upper bound, linear within a bucket, as in Prometheus: the lowest bucket
    begins at 0, and what lies in the last one counts as the highest finite bound. NaN where nothing was observed."""
    bounds = sorted(grown)
    if not bounds or not (total := grown[bounds[-1]]) > 0:
        return math.nan
    wanted, lower, below = q * total, 0.0, 0.0
    for bound in bounds:
        count = grown[bound]
        if count >= wanted and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = (lower if math.isinf(bound) else bound), max(below, count)
    return lower
