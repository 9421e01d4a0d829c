"""The straggler sensor: a rank for which the others wait round after round.

Each heartbeat names the peers that its sender waits for at the moment of sending. Heartbeats come at a fixed rate, whatever
the round does, so over a window the share of a reporter's beats that name a peer estimates the share of time for which the
reporter waits for that peer. A rank's share is the mean over its reporters; its ratio is that share over the median share
of all ranks. Sampling needs no new message, and errs by about 1/sqrt(beats): the window must hold many.
"""

from collections import deque
from collections.abc import Callable, Collection
from statistics import median

import msgspec

from elastic.controller.records import RankBeat
from elastic.view import Member
from healer.clock import Clock
from healer.evidence import Evidence, RankRef, Severity, What
from healer.sensors import Scribe, SensorState, SensorStatus, Tally, no_wake, ref


class StragglerConfig(msgspec.Struct, frozen=True, kw_only=True):
    ratio: float = 3.0
    """Share of waiting over that of the median rank from which a rank is reported."""
    least_share: float = 0.1
    """Of the others' time: less than that costs nobody anything."""
    window_s: float = 20.0
    windows: int = 2
    """In a row: one slow window is no straggler."""
    least_beats: int = 40
    """Of each reporter in a window; fewer say nothing."""


class _Window:
    def __init__(self) -> None:
        self.beats: dict[RankRef, int] = {}
        self.waits: dict[RankRef, dict[RankRef, int]] = {}  # reporter -> peer -> beats that name it


class StragglerSensor:
    """`healer.sensors.Sensor` over the executor's heartbeats."""

    name = "stragglers"

    def __init__(self, clock: Clock, config: StragglerConfig | None = None) -> None:
        self._clock, self.config = clock, config or StragglerConfig()
        self._scribe, self._tally = Scribe(self.name, clock), Tally(clock)
        self._state, self._wake = SensorState.STARTING, no_wake
        self._by_slot: dict[int, RankRef] = {}
        self._begin()
        self._over: dict[RankRef, deque[bool]] = {}
        self._said: set[RankRef] = set()

    def start(self, wake: Callable[[], None]) -> None:
        self._state = SensorState.OK

    async def stop(self) -> None:
        self._state = SensorState.OFF

    def watch(self, members: Collection[Member]) -> None:
        before, self._by_slot = self._by_slot, {m.slot: ref(m) for m in members}
        alive = set(self._by_slot.values())
        self._over = {rank: row for rank, row in self._over.items() if rank in alive}
        self._said &= alive
        if before != self._by_slot:
            # a change of the group makes everybody wait: it says nothing about anybody
            self._begin()

    def heard(self, event: RankBeat) -> None:
        """A beat arrived. Idle ranks wait for nobody, so their beats do not count."""
        reporter = ref(event.member)
        if event.beat.idle or self._by_slot.get(reporter.slot) != reporter:
            return
        self._tally.read(at=event.at)
        self._window.beats[reporter] = self._window.beats.get(reporter, 0) + 1
        row = self._window.waits.setdefault(reporter, {})
        for slot in event.beat.waiting_on:
            peer = self._by_slot.get(slot)
            if peer is not None:
                row[peer] = row.get(peer, 0) + 1

    def tick(self) -> list[Evidence]:
        now = self._clock.monotonic()
        if now - self._began < self.config.window_s:
            return []
        window = self._window
        self._begin()
        return self._judge(shares(window.beats, window.waits, self.config.least_beats))

    def status(self) -> SensorStatus:
        return self._tally.status(self.name, self._state)

    def _begin(self) -> None:
        self._began, self._window = self._clock.monotonic(), _Window()

    def _judge(self, share: dict[RankRef, float]) -> list[Evidence]:
        found: list[Evidence] = []
        for rank, (own, ratio) in ratios(share).items():
            over = own >= self.config.least_share and ratio >= self.config.ratio
            row = self._over.setdefault(rank, deque(maxlen=self.config.windows))
            row.append(over)
            if len(row) == row.maxlen and all(row):
                # said again in each window, since it ages
                self._said.add(rank)
                text = f"the others wait for it {own:.0%} of the time"
                found.append(self._scribe.note(rank, What.STRAGGLES, ratio, Severity.WARNING, detail=text))
            elif rank in self._said and not any(row):
                self._said.discard(rank)
                found.append(self._scribe.note(rank, What.KEEPS_UP, ratio, Severity.INFO))
        return found


def shares(
    beats: dict[RankRef, int], waits: dict[RankRef, dict[RankRef, int]], least_beats: int
) -> dict[RankRef, float]:
    """By rank, the share of time for which the others wait for it, from 0 to 1. Empty where too few were heard."""
    reporters = [rank for rank, count in beats.items() if count >= least_beats]
    if len(reporters) < 3:
        return {}
    found = {}
    for rank in reporters:
        others = [r for r in reporters if r != rank]
        found[rank] = sum(waits.get(r, {}).get(rank, 0) / beats[r] for r in others) / len(others)
    return found


FLOOR = 0.01
"""A median below this is noise: nobody waits for anybody."""


def ratios(share: dict[RankRef, float]) -> dict[RankRef, tuple[float, float]]:
    """By rank its share, and the share over the median of all."""
    if not share:
        return {}
    middle = max(FLOOR, median(share.values()))
    return {rank: (own, own / middle) for rank, own in sorted(share.items())}
