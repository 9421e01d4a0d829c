"""Keeps one probe process running: when it is replaced, how long it is waited, and what happens to one that will not die.

A process inside a driver call that never returns cannot be killed before the driver lets go. Such a one is left behind; a
second is tried, since the fault may concern the first alone; with `MAX_STUCK` of them no more is started until one has
gone, so a broken driver does not fill the process table.
"""

from collections.abc import Callable

from healer.clock import Clock
from healer.sensors.nvml import wire
from healer.sensors.nvml.child import Child
from healer.sensors.nvml.config import NvmlConfig

MAX_STUCK = 2
_STUCK_AFTER_S = 1.0
_REAP_S = 0.2
CLOSE_S = 2.5
"""For an orderly end: the probe gives its threads 1 s and NVML another."""

Spawn = Callable[[NvmlConfig, Callable[[wire.Line], None], Callable[[], None]], Child]


class Keeper:
    """Used by the sensor, in the loop."""

    def __init__(
        self, config: NvmlConfig, clock: Clock, on_line: Callable[[wire.Line], None], spawn: Spawn = Child
    ) -> None:
        self.child: Child | None = None
        self.since = clock.monotonic()
        """When the present process was started."""
        self.started = 0
        self.why = ""
        """Why there is no process now, or why the last one was replaced."""
        self._config, self._clock, self._on_line, self._spawn = config, clock, on_line, spawn
        self._dying: list[tuple[Child, float]] = []
        self._failures = 0
        self._next_start = self._next_replace = self.since
        self._renewing = self._closed = False
        self._failed_child: Child | None = None  # that ended by itself, until it is known how

    @property
    def stuck(self) -> int:
        """Processes that were killed and have not ended."""
        now = self._clock.monotonic()
        return sum(now - since >= _STUCK_AFTER_S for _, since in self._dying)

    def tick(self) -> bool:
        """Start a process where one is due; True when it did."""
        now = self._clock.monotonic()
        for child, _ in self._dying:
            if child.ended and child is self._failed_child:
                self.why, self._failed_child = f"the probe {child.end_reason}", None
        self._dying = [(child, since) for child, since in self._dying if not child.ended]
        if self.child is not None:
            if self._failures and now - self.since >= self._config.settled_s and now >= self._next_replace:
                self._failures = 0
            return False
        if self._closed or now < self._next_start or len(self._dying) >= MAX_STUCK:
            return False
        self.since = now
        number = self.started + 1
        try:
            self.child = self._spawn(self._config, lambda line: self._line(number, line), lambda: self._ended(number))
        except (OSError, ImportError) as error:
            self._failed(f"the probe cannot be started: {error}")
            return False
        self.started += 1
        return True

    def replace(self, why: str) -> bool:
        """The process hangs: kill it and start another, unless that was done too short a time ago. True when it was."""
        now = self._clock.monotonic()
        if self.child is None or now < self._next_replace:
            return False
        self._failures += 1
        self._next_replace = now + self._backoff_s()
        self._next_start = now
        self.why = why
        self._drop(self.child, now)
        return True

    def hold(self, why: str, delay_s: float) -> None:
        """The driver refuses: end the process, in order, and try again after `delay_s`."""
        self.why, self._next_start = why, self._clock.monotonic() + delay_s
        if self.child is not None:
            child, self.child = self.child, None
            child.ask_to_end()
            self._dying.append((child, self._clock.monotonic()))

    def renew(self, why: str) -> None:
        """End the process, in order, and start another at once: NVML finds a GPU that came back only when it is opened."""
        if self.child is not None and not self._renewing:
            self.why, self._renewing = why, True
            self.child.ask_to_end()

    async def close(self) -> None:
        """End the process, in order if it can, within `CLOSE_S`. A stuck one is left to the kernel."""
        self._closed = True
        if self.child is not None:
            child, self.child = self.child, None
            child.ask_to_end()
            self._dying.append((child, self._clock.monotonic()))
        end = self._clock.monotonic() + CLOSE_S
        for child, _ in self._dying:
            await child.wait(max(0.0, end - self._clock.monotonic()))
            child.kill()
            child.let_go()
        for child, _ in self._dying:
            await child.wait(_REAP_S)

    def _drop(self, child: Child, now: float) -> None:
        self.child = None
        self._renewing = False
        child.kill()
        child.let_go()
        self._dying.append((child, now))

    def _line(self, number: int, line: wire.Line) -> None:
        """What a process that was given up still has to say does not count."""
        if self.child is not None and number == self.started:
            self._on_line(line)

    def _ended(self, number: int) -> None:
        if self.child is None or number != self.started:
            return
        child, self.child = self.child, None
        now = self._clock.monotonic()
        self._dying.append((child, now))
        if self._renewing:
            self._renewing, self._next_start = False, now
        else:
            self._failed_child = child
            self._failed("the probe has ended")

    def _failed(self, why: str) -> None:
        self._failures += 1
        self.why, self._next_start = why, self._clock.monotonic() + self._backoff_s()

    def _backoff_s(self) -> float:
        return min(self._config.restart_s * 2.0 ** (self._failures - 1), self._config.restart_max_s)
