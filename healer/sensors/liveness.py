"""The liveness sensor: turns the executor's events into evidence, in the call that reports them."""

from elastic.controller.records import PeerFaultSeen, RankGone
from healer.clock import Clock
from healer.evidence import Evidence, RankRef, Severity, What
from healer.sensors import Scribe, ref

_WITNESS = {"lifeline": What.LIFELINE_CUT, "socket": What.SOCKET_CLOSED, "pidfd": What.PIDFD_FIRED}


class LivenessSensor:
    name = "liveness"

    def __init__(self, clock: Clock) -> None:
        self.last_contact = clock.monotonic()
        self._clock = clock
        self._scribe = Scribe(self.name, clock)

    def gone(self, event: RankGone) -> Evidence:
        self.last_contact = self._clock.monotonic()
        return self._scribe.note(
            ref(event.member), _WITNESS[event.witness], event.process_state, Severity.CRITICAL, at=event.at
        )

    def peer_fault(self, event: PeerFaultSeen, peer: RankRef) -> Evidence:
        self.last_contact = self._clock.monotonic()
        value = f"{event.what}/{event.source}"
        return self._scribe.note(
            peer, What.PEER_FAULT, value, Severity.WARNING, reporter=ref(event.reporter), at=event.at
        )
