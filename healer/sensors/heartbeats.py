"""The heartbeat sensor: silence, lack of progress, and who waits for whom.

It reports changes only. The daemon's own lateness is not the ranks' silence: `forgive` restarts every timer and says that
telemetry was lost, so that what the sensor did not hear while nobody listened accuses nobody.
"""

from collections.abc import Callable, Collection

from elastic.controller.records import RankBeat
from elastic.view import Member
from healer.clock import Clock
from healer.evidence import Evidence, RankRef, Severity, What
from healer.sensors import Scribe, SensorState, SensorStatus, Tally, ref


class _Track:
    """One member as last heard."""

    def __init__(self, now: float) -> None:
        self.heard = False
        self.last_at = now
        self.round = -1
        self.round_since = now
        self.waits: dict[int, float] = {}  # peer slot -> since when, within this round
        self.accused: set[RankRef] = set()  # peers reported as waited on
        self.silence_said = 0  # thresholds passed and reported
        self.stuck_said = False


class HeartbeatSensor:
    """`stall_after_s`, `silent_after_s`: the two ages at which silence is reported."""

    name = "heartbeats"

    def __init__(self, clock: Clock, *, stall_after_s: float, silent_after_s: float) -> None:
        self._clock, self._tally = clock, Tally(clock)
        self._state = SensorState.OFF
        self.thresholds = (stall_after_s, silent_after_s)
        self._scribe = Scribe(self.name, clock)
        self._tracks: dict[RankRef, _Track] = {}
        self._by_slot: dict[int, RankRef] = {}

    def start(self, wake: Callable[[], None]) -> None:
        """Beats come in by `heard`, in the loop: there is nobody to wake."""
        self._state = SensorState.STARTING

    async def stop(self) -> None:
        self._state = SensorState.OFF

    def status(self) -> SensorStatus:
        quiet = [str(rank) for rank, track in self._tracks.items() if track.silence_said]
        return self._tally.status(self.name, self._state, f"no beats from {', '.join(quiet)}" if quiet else "")

    def watch(self, members: Collection[Member]) -> None:
        now = self._clock.monotonic()
        self._tracks = {ref(m): self._tracks.get(ref(m)) or _Track(now) for m in members}
        before, self._by_slot = self._by_slot, {r.slot: r for r in self._tracks}
        replaced = {slot for slot, rank in before.items() if self._by_slot.get(slot) != rank}
        for track in self._tracks.values():
            track.accused &= set(self._tracks)
            track.waits = {slot: since for slot, since in track.waits.items() if slot not in replaced}

    def heard(self, event: RankBeat) -> list[Evidence]:
        """A beat arrived. Called for every beat: cheap, and empty unless something changed."""
        rank = ref(event.member)
        track = self._tracks.get(rank)
        if track is None:
            return []
        track.last_at = event.at
        self._tally.read(at=event.at)
        self._state = SensorState.OK
        beat, found = event.beat, []
        if not track.heard or track.silence_said:
            track.heard, track.silence_said = True, 0
            found.append(self._scribe.note(rank, What.BEAT_HEARD, beat.round, Severity.INFO, at=event.at))
        if beat.round != track.round:
            track.round, track.round_since, track.waits = beat.round, event.at, {}
            if track.stuck_said:
                track.stuck_said = False
                found.append(self._scribe.note(rank, What.PROGRESS, beat.round, Severity.INFO, at=event.at))
        track.waits = {slot: track.waits.get(slot, event.at) for slot in beat.waiting_on}
        for peer in sorted(track.accused):
            if peer.slot not in track.waits or track.waits[peer.slot] == event.at:
                track.accused.discard(peer)
                found.append(
                    self._scribe.note(peer, What.WAIT_ENDED, beat.round, Severity.INFO, reporter=rank, at=event.at)
                )
        return found

    def tick(self) -> list[Evidence]:
        now = self._clock.monotonic()
        found: list[Evidence] = []
        for rank, track in self._tracks.items():
            found += self._silence(rank, track, now)
        for rank, track in self._tracks.items():
            found += self._waits(rank, track, now)
        for rank, track in self._tracks.items():
            found += self._stuck(rank, track, now)
        return found

    def forgive(self, late_s: float) -> list[Evidence]:
        """The daemon itself was late by `late_s`: nothing that it did not hear meanwhile counts."""
        now = self._clock.monotonic()
        found = []
        for rank, track in self._tracks.items():
            round_ = track.round
            fresh = self._tracks[rank] = _Track(now)
            fresh.round = round_
            found.append(self._scribe.note(rank, What.TELEMETRY_LOST, late_s, Severity.WARNING))
        return found

    def _silence(self, rank: RankRef, track: _Track, now: float) -> list[Evidence]:
        age = now - track.last_at
        passed = sum(age >= threshold for threshold in self.thresholds)
        if passed <= track.silence_said:
            return []
        track.silence_said = passed
        return [self._scribe.note(rank, What.SILENCE, age, Severity.WARNING, at=now)]

    def _waits(self, rank: RankRef, track: _Track, now: float) -> list[Evidence]:
        """A silent reporter's last words are not news: only ranks that are heard accuse."""
        found = []
        if not track.silence_said:
            for slot, since in track.waits.items():
                peer = self._by_slot.get(slot)
                if peer is None or peer in track.accused or now - since < self.thresholds[0]:
                    continue
                track.accused.add(peer)
                found.append(
                    self._scribe.note(peer, What.WAITED_ON, now - since, Severity.WARNING, reporter=rank, at=now)
                )
        return found

    def _stuck(self, rank: RankRef, track: _Track, now: float) -> list[Evidence]:
        age = now - track.round_since
        if track.stuck_said or track.silence_said or age < self.thresholds[1]:
            return []
        if not any(rank in other.accused for peer, other in self._tracks.items() if peer != rank):
            return []  # nobody misses its progress: an idle group, or a rank parked with all others
        track.stuck_said = True
        return [self._scribe.note(rank, What.NO_PROGRESS, age, Severity.WARNING, at=now)]
