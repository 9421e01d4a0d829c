"""Counters that the driver keeps: what matters is how much they grew between two readings."""

import msgspec


class Growth(msgspec.Struct, frozen=True):
    delta: int
    elapsed_s: float

    @property
    def per_s(self) -> float:
        return self.delta / self.elapsed_s if self.elapsed_s > 0 else 0.0


class Counter:
    """One counter, as last read."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def read(self, value: int | None, at: float) -> Growth | None:
        """How much it grew since the reading before; None for the first reading, which is history, and where there is no
        value: a blank is not a zero. A counter that is smaller than before was set back (by a GPU reset or a new driver)
        and has counted from 0 since."""
        if value is None:
            return None
        before, self._last = self._last, (value, at)
        if before is None:
            return None
        last, since = before
        return Growth(value - last if value >= last else value, at - since)
