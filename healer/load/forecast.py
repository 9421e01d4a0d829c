"""What load is to be expected: Holt-Winters' exponential smoothing with a season, by statsmodels.

A fit takes from some hundredths of a second to several, and the library 100 MB: it runs in a process of its own that ends
with its answer, so the daemon neither waits nor grows.
"""

import asyncio
import contextlib
import json
import math
import sys
from collections.abc import Sequence

import msgspec

from elastic import process
from healer.clock import Clock

POINTS = 96
"""In a season: a quarter of an hour of a day."""
SEASONS = 4
"""Kept at most."""
SEASONS_NEEDED = 2
"""Fewer than two seasons cannot tell a season from a trend; statsmodels refuses them too."""
DEADLINE_S = 60.0


class Forecast(msgspec.Struct, frozen=True):
    """What a signal is expected to be."""

    made_at: float
    """Monotonic seconds of the last point that it knows."""
    step_s: float
    values: tuple[float, ...]
    """One for each step after `made_at`, never below 0."""
    error: str = ""
    """Why there is none; empty when there is."""

    def peak(self, now: float, horizon_s: float) -> float | None:
        """The highest value expected from `now` to the horizon; None where the forecast does not reach that far."""
        first = max(0, math.floor((now - self.made_at) / self.step_s))
        last = math.ceil((now + horizon_s - self.made_at) / self.step_s)
        if not self.values or last > len(self.values) or now < self.made_at:
            return None
        return max(self.values[first:last])


class History:
    """One signal, as means over steps of a season. A step without a value repeats the one before it; after a gap of more
    than a tenth of a season everything before it is dropped."""

    def __init__(self, season_s: float) -> None:
        self.step_s = season_s / POINTS
        self.season_s = season_s
        self.points: list[float] = []
        self.end: float | None = None
        """Of the last complete step."""
        self._sum, self._count = 0.0, 0

    def add(self, at: float, value: float) -> None:
        if self.end is None:
            self.end = at
        if at >= self.end + self.step_s:
            self._close(at)
        self._sum += value
        self._count += 1

    def _close(self, at: float) -> None:
        assert self.end is not None
        steps = math.floor((at - self.end) / self.step_s)
        if steps > POINTS // 10:
            self.points, self.end = [], at
        else:
            if self._count:
                self.points += [self._sum / self._count] * steps
            self.end += steps * self.step_s
        del self.points[: -POINTS * SEASONS]
        self._sum, self._count = 0.0, 0

    @property
    def enough(self) -> bool:
        return len(self.points) >= SEASONS_NEEDED * POINTS


def fit(points: Sequence[float], season: int, steps: int) -> list[float]:
    """The next `steps` values after `points`, by additive trend and season. Imports statsmodels; slow."""
    import warnings

    import numpy as np
    from statsmodels.tsa.holtwinters import ExponentialSmoothing

    data = np.asarray(points, dtype=float)
    if float(data.std()) == 0.0:
        return [float(data[-1])] * steps  # nothing to fit, and the optimiser would divide by it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ExponentialSmoothing(
            data,
            trend="add",
            damped_trend=True,
            seasonal="add",
            seasonal_periods=season,
            initialization_method="heuristic",
        )
        expected = model.fit(optimized=True).forecast(steps)
    return [max(0.0, float(value)) for value in expected]


class Forecaster:
    """Fits one series in a child process. `make` is awaited by one task at a time."""

    def __init__(self, clock: Clock, deadline_s: float = DEADLINE_S) -> None:
        self._clock, self._deadline_s = clock, deadline_s

    async def make(self, history: History, horizon_s: float) -> Forecast:
        """Never raises for what the child does: `error` says what went wrong."""
        made_at = history.end if history.end is not None else self._clock.monotonic()
        none = Forecast(made_at, history.step_s, ())
        if not history.enough:
            have = len(history.points) * history.step_s / history.season_s
            return msgspec.structs.replace(
                none, error=f"{have:.1f} seasons are known, a forecast needs {SEASONS_NEEDED}"
            )
        # a forecast serves until the next is made, which may take a season's eighth
        steps = math.ceil(horizon_s / history.step_s) + POINTS // 8
        task = json.dumps({"points": history.points, "season": POINTS, "steps": steps}).encode()
        child = await asyncio.create_subprocess_exec(
            *process.ordinary([sys.executable, "-m", "healer.load.forecast"]),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._deadline_s):
                out, err = await child.communicate(task)
        except TimeoutError:
            return msgspec.structs.replace(none, error=f"the fit took more than {self._deadline_s:g} s")
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        if child.returncode:
            words = err.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"]
            return msgspec.structs.replace(none, error=words[-1][:200])
        return msgspec.structs.replace(none, values=tuple(json.loads(out)))


def main() -> None:
    task = json.load(sys.stdin)
    try:
        found = fit(task["points"], task["season"], task["steps"])
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is not installed: pip install 'healer[forecast]'")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
