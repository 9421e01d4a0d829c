"""The wall-clock sensor: tells when the host's clock is set. No rule measures by it; people who compare logs do."""

import socket
from collections.abc import Callable, Collection

from elastic.view import Member
from healer.clock import Clock
from healer.evidence import Evidence, HostRef, Severity, What
from healer.sensors import Scribe, SensorState, SensorStatus, Tally


class WallClockSensor:
    name = "wall-clock"

    def __init__(self, clock: Clock, limit_s: float = 1.0) -> None:
        """`limit_s`: smaller corrections, such as those of NTP, are no news."""
        self._clock, self._limit_s = clock, limit_s
        self._tally, self._scribe = Tally(clock), Scribe(self.name, clock)
        self._host, self._state = HostRef(socket.gethostname()), SensorState.OFF
        self._offset_s = self._offset()

    def start(self, wake: Callable[[], None]) -> None:
        self._state, self._offset_s = SensorState.OK, self._offset()

    async def stop(self) -> None:
        self._state = SensorState.OFF

    def watch(self, members: Collection[Member]) -> None:
        """It concerns no rank."""

    def tick(self) -> list[Evidence]:
        self._tally.read()
        before, now = self._offset_s, self._offset()
        if abs(now - before) < self._limit_s:
            return []
        self._offset_s = now
        return [self._scribe.note(self._host, What.CLOCK_JUMP, now - before, Severity.INFO)]

    def status(self) -> SensorStatus:
        return self._tally.status(self.name, self._state)

    def _offset(self) -> float:
        return self._clock.wall() - self._clock.monotonic()
