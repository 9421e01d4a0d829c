"""Sensors: each watches the live ranks and returns evidence. None of them decides, blocks, or keeps a task of its own:
the supervisor calls them in its loop, so evidence, verdict and action follow one another without a queue in between."""

from collections.abc import Collection
from typing import Protocol

from elastic.view import Member
from healer.clock import Clock
from healer.evidence import Evidence, RankRef, Severity, What


class Sensor(Protocol):
    name: str
    last_contact: float
    """Monotonic time of the last reading that worked; the sensor's own silence must not pass for health."""

    def watch(self, members: Collection[Member]) -> None:
        """The live members, given at the start and whenever they change. Everything known about others is forgotten."""
        ...

    def tick(self) -> list[Evidence]:
        """Called by the supervisor at its rate: what changed since the last call."""
        ...


def ref(member: Member) -> RankRef:
    return RankRef(member.slot, member.incarnation)


class Scribe:
    """Numbers and stamps the evidence of one source."""

    def __init__(self, source: str, clock: Clock) -> None:
        self.source = source
        self.clock = clock
        self._seq = 0

    def note(
        self,
        subject: RankRef,
        what: What,
        value: str | int | float,
        severity: Severity,
        *,
        reporter: RankRef | None = None,
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
            at=self.clock.monotonic() if at is None else at,
            wall=self.clock.wall(),
        )
