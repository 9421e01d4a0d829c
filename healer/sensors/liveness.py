"""The liveness sensor: turns the executor's events into evidence, in the call that reports them."""

from collections.abc import Callable, Collection

from elastic.controller.records import PeerFaultSeen, RankGone
from elastic.view import Member
from healer.clock import Clock
from healer.evidence import Evidence, RankRef, Severity, What
from healer.sensors import Scribe, SensorState, SensorStatus, Tally, ref

_WITNESS = {"lifeline": What.LIFELINE_CUT, "socket": What.SOCKET_CLOSED, "pidfd": What.PIDFD_FIRED}


class LivenessSensor:
    name = "liveness"

    def __init__(self, clock: Clock) -> None:
        self._tally = Tally(clock)
        self._state = SensorState.OFF
        self._scribe = Scribe(self.name, clock)

    def start(self, wake: Callable[[], None]) -> None:
        """The executor holds the sockets and watches them in the same loop."""
        self._state = SensorState.OK

    async def stop(self) -> None:
        self._state = SensorState.OFF

    def status(self) -> SensorStatus:
        """`age_s` is that of the last event; a group in which nothing happens has none, and that is well."""
        return self._tally.status(self.name, self._state)

    def watch(self, members: Collection[Member]) -> None:
        """The executor reports on the members that it has."""

    def tick(self) -> list[Evidence]:
        """Empty: what happens is handed over by `gone` and `peer_fault` as it happens."""
        return []

    def gone(self, event: RankGone) -> Evidence:
        self._tally.read()
        return self._scribe.note(
            ref(event.member), _WITNESS[event.witness], event.process_state, Severity.CRITICAL, at=event.at
        )

    def peer_fault(self, event: PeerFaultSeen, peer: RankRef) -> Evidence:
        self._tally.read()
        value = f"{event.what}/{event.source}"
        return self._scribe.note(
            peer, What.PEER_FAULT, value, Severity.WARNING, reporter=ref(event.reporter), at=event.at
        )
