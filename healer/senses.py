"""All sensors together, as the supervisor calls them: which is asked when, and which is asked because another is in doubt."""

from collections.abc import Collection

from elastic.controller.records import PeerFaultSeen, RankBeat, RankGone
from elastic.view import Member
from healer.clock import Clock
from healer.evidence import Evidence, RankRef, What
from healer.policy.schema import Detection
from healer.sensors.heartbeats import HeartbeatSensor
from healer.sensors.liveness import LivenessSensor
from healer.sensors.processes import DEAD, ProcessSensor
from healer.status import SensorStatus

LATE_FRACTION = 0.25
"""Of the stall time: when the loop woke later than this, the silence that it would see is its own."""


class Senses:
    """Owned by the supervisor, called in its loop."""

    def __init__(self, detection: Detection, clock: Clock) -> None:
        self._clock, self._scan_s = clock, detection.process_interval_s
        self._late_limit_s = LATE_FRACTION * detection.stall_after_s
        self._liveness, self._processes = LivenessSensor(clock), ProcessSensor(clock)
        self._heartbeats = HeartbeatSensor(
            clock, stall_after_s=detection.stall_after_s, silent_after_s=detection.silent_after_s
        )
        self._next_scan = clock.monotonic()

    def watch(self, members: Collection[Member]) -> None:
        self._processes.watch(members)
        self._heartbeats.watch(members)

    def heard(self, event: RankBeat) -> list[Evidence]:
        return self._heartbeats.heard(event)

    def gone(self, event: RankGone, rank: RankRef) -> list[Evidence]:
        found = [self._liveness.gone(event)]
        # a killed process closes its socket while it is still on its way out
        return found if event.process_state in DEAD else found + self._processes.look(rank)

    def peer_fault(self, event: PeerFaultSeen, peer: RankRef) -> list[Evidence]:
        return [self._liveness.peer_fault(event, peer), *self._processes.look(peer)]

    def died(self, rank: RankRef) -> list[Evidence]:
        """Look at the rank's process now; empty unless it is dead."""
        return [e for e in self._processes.look(rank) if e.value in DEAD]

    def scan(self) -> list[Evidence]:
        return self._processes.tick()

    def round(self, late_s: float) -> list[Evidence]:
        """One tick of the loop, which woke `late_s` too late."""
        found: list[Evidence] = []
        if late_s > self._late_limit_s:
            found += self._heartbeats.forgive(late_s)
        found += self._heartbeats.tick()
        found += [e for silent in found if silent.what == What.SILENCE for e in self._processes.look(silent.subject)]
        now = self._clock.monotonic()
        if now >= self._next_scan:
            self._next_scan = now + self._scan_s
            found += self.scan()
        return found

    def status(self) -> tuple[SensorStatus, ...]:
        now = self._clock.monotonic()
        sensors = (self._liveness, self._processes, self._heartbeats)
        return tuple(SensorStatus(s.name, now - s.last_contact) for s in sensors)
