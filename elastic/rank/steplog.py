"""What a rank did lately: its committed steps, part by part, and the work of its other threads that may have held them up.

Kept in the rank, since only it knows. Written by the round loop (steps) and the worker (works), read by any thread.
"""

import contextlib
import gc
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from typing import Any

from elastic.protocol import StepTaken, Work

KEPT = 16384
"""800 KiB; half a minute of steps of 2 ms."""
WORKS = 256
GC_S = 0.001
"""A collection of garbage shorter than this is no work."""

_COLUMNS = len(StepTaken.__struct_fields__)


class StepLog:
    """A reader sees a step at the earliest when it is whole."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._columns = [array("d", bytes(8 * kept)) for _ in range(_COLUMNS)]
        self._count = 0

    def add(self, end: float, epoch: int, build_s: float, launch_s: float, wait_s: float, settle_s: float) -> None:
        """As the fields of `StepTaken`."""
        at = self._count % self._kept
        for column, value in zip(self._columns, (end, epoch, build_s, launch_s, wait_s, settle_s), strict=True):
            column[at] = value
        self._count += 1

    def since(self, moment: float) -> tuple[StepTaken, ...]:
        """Steps that ended after `moment`, ascending; the newest only, where the log is full.

        Steps that end while this is read may be missing; the oldest of a full log may then be half replaced, so it is
        left out.
        """
        count = self._count
        first = max(0, count - self._kept + 1)
        order = [i % self._kept for i in range(first, count)]
        skip = bisect_right([self._columns[0][i] for i in order], moment)
        rows = (tuple(column[i] for column in self._columns) for i in order[skip:])
        return tuple(StepTaken(end, int(epoch), *parts) for end, epoch, *parts in rows)


class WorkLog:
    """The newest works; each is there when it has ended."""

    def __init__(self) -> None:
        self._works: deque[Work] = deque(maxlen=WORKS)

    def add(self, what: str, begin: float, end: float) -> None:
        self._works.append(Work(what, begin, end))

    @contextlib.contextmanager
    def note(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(what, began, time.monotonic())

    def watch_garbage(self) -> None:
        """Note the collections of this process's garbage, during which no thread of Python runs."""
        began = [0.0]

        def collected(phase: str, info: dict[str, Any]) -> None:
            now = time.monotonic()
            if phase == "start":
                began[0] = now
            elif now - began[0] > GC_S:
                self.add(f"garbage of generation {info['generation']}", began[0], now)

        gc.callbacks.append(collected)

    def since(self, moment: float) -> tuple[Work, ...]:
        """Those that ended after `moment`."""
        return tuple(work for work in tuple(self._works) if work.end > moment)
