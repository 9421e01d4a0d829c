"""Arithmetic over the moments at which a rank's committed steps ended: ascending, seconds of one monotonic clock."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise


def first_after(ends: Sequence[float], moment: float) -> float | None:
    """The first step that ended after `moment`; None where no such step is known."""
    at = bisect_right(ends, moment)
    return ends[at] if at < len(ends) else None


def gap_around(ends: Sequence[float], moment: float) -> float | None:
    """From the last step that had ended at `moment` to the next; None where either is unknown."""
    at = bisect_right(ends, moment)
    return ends[at] - ends[at - 1] if 0 < at < len(ends) else None


def longest_gap(ends: Sequence[float], since: float, until: float) -> float | None:
    """The longest time between two neighbouring steps of which any moment lies within `since` and `until`; None where no
    two steps are known there."""
    return max((b - a for a, b in pairwise(ends) if b > since and a < until), default=None)


def gaps(ends: Sequence[float], since: float, until: float) -> list[float]:
    """Between neighbouring steps that both ended within `since` and `until`."""
    return [b - a for a, b in pairwise(ends) if a >= since and b <= until]
