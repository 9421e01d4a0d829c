"""Time, injected wherever a decision depends on it."""

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds; only differences mean anything. All rules use this one: a jump of the wall clock changes nothing."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for records that people read."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
