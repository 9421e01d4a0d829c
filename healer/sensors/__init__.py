"""Sensors: each watches part of the group or of its machine and returns evidence. None of them decides or blocks: the
supervisor calls them in its loop, so evidence, verdict and action follow one another without a queue in between.

A sensor that has to wait for something waits elsewhere (a child process, the event loop's own watch on a file descriptor)
and calls `wake`; its next `tick` hands over what came. A sensor that sees nothing says so, by evidence where somebody was
relying on it (`What.SENSOR_BLIND`, `What.SENSOR_SILENT`) and in its status always: no reading is never good news.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol

import msgspec

from elastic.view import Member
from healer.clock import Clock
from healer.evidence import DETAIL_CHARS, Evidence, RankRef, Severity, Subject, What


class SensorState(StrEnum):
    STARTING = "starting"
    """Asked to start, nothing read yet."""
    OK = "ok"
    BLIND = "blind"
    """It works, but is not allowed or not able to see: no permission, no driver for the GPU that is there."""
    SILENT = "silent"
    """It should have answered by now."""
    OFF = "off"
    """There is nothing for it to watch here, or it was stopped. Says nothing about health."""


class SensorCost(msgspec.Struct, frozen=True):
    cpu_s: float
    """Processor seconds so far, those of a child process included."""
    mean_s: float
    """Latency of one reading, as the sensor took it."""
    max_s: float


class SensorStatus(msgspec.Struct, frozen=True):
    name: str
    state: SensorState
    why: str
    """Why the state is not OK, or what is missing although it is; empty where there is nothing to say."""
    age_s: float
    """Since the last reading that worked; where none did, since the start."""
    readings: int
    """That worked, so far."""
    cost: SensorCost


class Sensor(Protocol):
    """All methods are called by the supervisor, in the daemon's event loop."""

    name: str

    def start(self, wake: Callable[[], None]) -> None:
        """Called once, in the running loop. The sensor keeps `wake` and calls it, in this loop, whenever `tick` would
        return something before its regular turn. Never blocks, never raises: a sensor that cannot work says so in its
        status."""
        ...

    async def stop(self) -> None:
        """Called once, at the end, also when the start went wrong. Releases files and ends child processes; returns
        within `STOP_DEADLINE_S`, whatever they do. Afterwards the sensor is OFF."""
        ...

    def watch(self, members: Collection[Member]) -> None:
        """The live members, given at the start and whenever they change. Everything known about other ranks is
        forgotten; what is known about GPUs and the host stays."""
        ...

    def tick(self) -> list[Evidence]:
        """Called about ten times a second and after each `wake`: what changed since the last call."""
        ...

    def status(self) -> SensorStatus: ...


STOP_DEADLINE_S = 3.0


def ref(member: Member) -> RankRef:
    return RankRef(member.slot, member.incarnation)


def no_wake() -> None:
    """The `wake` of a sensor that nobody has started."""


class Tally:
    """Counts one sensor's readings and what they cost, for its status."""

    def __init__(self, clock: Clock) -> None:
        self.last_contact = clock.monotonic()
        """Monotonic seconds of the last reading that worked, or of the start."""
        self.readings = 0
        self.cpu_s = 0.0
        self._clock = clock
        self._total_s = self._max_s = 0.0

    def read(self, took_s: float = 0.0, *, at: float | None = None) -> None:
        """One reading worked and took `took_s` seconds."""
        self.last_contact = self._clock.monotonic() if at is None else at
        self.readings += 1
        self._total_s += took_s
        self._max_s = max(self._max_s, took_s)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Adds the processor time of the block, which runs in the daemon's own thread."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.cpu_s += time.thread_time() - began

    def status(self, name: str, state: SensorState, why: str = "") -> SensorStatus:
        mean_s = self._total_s / self.readings if self.readings else 0.0
        age_s = max(0.0, self._clock.monotonic() - self.last_contact)
        return SensorStatus(name, state, why, age_s, self.readings, SensorCost(self.cpu_s, mean_s, self._max_s))


class Scribe:
    """Numbers and stamps the evidence of one source."""

    def __init__(self, source: str, clock: Clock) -> None:
        self.source = source
        self.clock = clock
        self._seq = 0

    def note(
        self,
        subject: Subject,
        what: What,
        value: str | int | float,
        severity: Severity,
        *,
        reporter: RankRef | None = None,
        detail: str = "",
        at: float | None = None,
    ) -> Evidence:
        self._seq += 1
        return Evidence(
            source=self.source,
            seq=self._seq,
            subject=subject,
            what=what,
            value=value,
            severity=severity,
            reporter=reporter,
            detail=detail[:DETAIL_CHARS],
            at=self.clock.monotonic() if at is None else at,
            wall=self.clock.wall(),
        )
