"""How fast a process grows, and whether that will bring the host down."""

import itertools
from collections import deque
from pathlib import Path

import msgspec

_PAGE_BYTES = 4096
_PARTS = 4


class MemoryConfig(msgspec.Struct, frozen=True):
    window_s: float = 60.0
    """Growth is measured over so long; loading weights is over sooner."""
    sample_s: float = 2.0
    horizon_s: float = 600.0
    """Told when, at this rate, the host's available memory is used up within so long."""


def resident_bytes(pid: int, proc: Path) -> int | None:
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def available_bytes(proc: Path) -> int | None:
    """MemAvailable: what can be had without swapping."""
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


class Growth:
    """Of one process."""

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config
        self._samples: deque[tuple[float, int]] = deque()
        self._over = False

    def due(self, now: float) -> bool:
        return not self._samples or now - self._samples[-1][0] >= self._config.sample_s

    def sample(self, now: float, resident: int, available: int) -> tuple[float, bool] | None:
        """Bytes per second, and whether that is too fast, when that has changed; else None. Silent until a whole window
        has been seen."""
        self._samples.append((now, resident))
        while len(self._samples) > 1 and self._samples[1][0] <= now - self._config.window_s:
            self._samples.popleft()
        if now - self._samples[0][0] < self._config.window_s or len(self._samples) <= _PARTS:
            return None
        # in each quarter of the window: what was loaded and is loaded no more is no growth
        marks = [self._samples[round(part * (len(self._samples) - 1) / _PARTS)] for part in range(_PARTS + 1)]
        per_s = min((after - was) / (then - at) for (at, was), (then, after) in itertools.pairwise(marks))
        over = per_s > 0 and available / per_s < self._config.horizon_s
        if over == self._over:
            return None
        self._over = over
        return per_s, over
