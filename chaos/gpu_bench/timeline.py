"""Arithmetic over the committed steps of one rank: ascending, seconds of one monotonic clock."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from chaos.gpu_bench.records import Gap
from elastic.protocol import StepTaken, Work


def first_under(steps: Sequence[StepTaken], epoch: int) -> int | None:
    """Index of the first step that ran under a view of this epoch or a later one; None where no such step is known."""
    return next((i for i, step in enumerate(steps) if step.epoch >= epoch), None)


def last_before(steps: Sequence[StepTaken], moment: float) -> int | None:
    """Index of the last step that had ended at `moment`; None where no such step is known."""
    at = bisect_right([step.end for step in steps], moment) - 1
    return at if at >= 0 else None


def longest(steps: Sequence[StepTaken], since: float, until: float) -> int | None:
    """Index of the step that ends the longest time between two neighbouring steps of which any moment lies within `since` and
    `until`; None where no two steps are known there."""
    found = [i for i in range(1, len(steps)) if steps[i].end > since and steps[i - 1].end < until]
    return max(found, key=lambda i: steps[i].end - steps[i - 1].end, default=None)


def gap(steps: Sequence[StepTaken], works: Iterable[Work], at: int) -> Gap:
    """Between step `at` - 1 and step `at`."""
    before, step = steps[at - 1], steps[at]
    took_s = step.end - before.end
    known_s = before.settle_s + step.build_s + step.launch_s + step.wait_s
    return Gap(
        at=step.end,
        took_s=took_s,
        settle_s=before.settle_s,
        stand_s=max(0.0, took_s - known_s),
        build_s=step.build_s,
        launch_s=step.launch_s,
        wait_s=step.wait_s,
        works=tuple((w.what, w.begin, w.end - w.begin) for w in works if w.end > before.end and w.begin < step.end),
    )


def gaps(steps: Sequence[StepTaken], since: float, until: float) -> list[float]:
    """Between neighbouring steps that both ended within `since` and `until`."""
    return [b.end - a.end for a, b in pairwise(steps) if a.end >= since and b.end <= until]
