"""When the last committed steps ended and how long each ran: kept in the rank, since only it knows."""

from array import array
from bisect import bisect_right

KEPT = 16384
"""256 KiB; half a minute of steps of 2 ms."""


class StepLog:
    """Written by the round loop; read by any thread, which sees a step at the earliest when it is whole."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._ends, self._took = array("d", bytes(8 * kept)), array("d", bytes(8 * kept))
        self._count = 0

    def add(self, end: float, took_s: float) -> None:
        at = self._count % self._kept
        self._ends[at], self._took[at] = end, took_s
        self._count += 1

    def since(self, moment: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Ends after `moment`, ascending, and the seconds that each step ran; the newest only, where the log is full.

        Steps that end while this is read may be missing; the oldest of a full log may then be half replaced, so it is
        left out.
        """
        count = self._count
        first = max(0, count - self._kept + 1)
        order = [i % self._kept for i in range(first, count)]
        ends = [self._ends[i] for i in order]
        skip = bisect_right(ends, moment)
        return tuple(ends[skip:]), tuple(self._took[i] for i in order[skip:])
