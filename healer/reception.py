"""What the target reports, one event at a time: turned into evidence, into progress of its own work, or into an end."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from elastic.controller.records import (
    BootFailed,
    Event,
    Fenced,
    PeerFaultSeen,
    PhaseBegan,
    RankBeat,
    RankGone,
    SequenceEnded,
)
from healer.actions import Actions
from healer.diagnosis import Cause
from healer.evidence import Evidence, RankRef
from healer.journal import Journal
from healer.progress import Progress, given_up
from healer.roster import Roster
from healer.senses import Senses
from healer.sensors import ref


class Bench(Protocol):
    """The part of the supervisor that goes on from there. All in its loop."""

    @property
    def ending(self) -> bool: ...

    def alone(self) -> AbstractContextManager[None]:
        """Around work that is begun by a timer: events that come meanwhile wait."""
        ...

    def consider(self, found: list[Evidence]) -> None:
        """Judge new evidence, decide, act."""
        ...

    def refresh(self) -> None:
        """Look at the group again."""
        ...

    def open_incident(self, cause: Cause, slots: tuple[int, ...], detected: float) -> None: ...

    def disarm(self, why: str) -> None:
        """Another controller has the group."""
        ...


class Reception:
    """Owned by the supervisor, called in its loop."""

    def __init__(
        self,
        bench: Bench,
        senses: Senses,
        roster: Roster,
        actions: Actions,
        progress: Progress,
        journal: Journal,
        scan_s: Callable[[], float],
    ) -> None:
        """`scan_s`: between two looks at all processes; a doubtful one is looked at more often until then."""
        self._bench, self._senses, self._roster = bench, senses, roster
        self._actions, self._progress, self._scan_s = actions, progress, scan_s
        self._journal = journal

    def handle(self, event: Event) -> None:
        match event:
            case RankBeat():
                found = self._senses.heard(event)
                if found:
                    self._bench.consider(found)
            case RankGone():
                self._gone(event)
            case PeerFaultSeen():
                peer = self._roster.in_slot(event.peer)
                if peer is not None:
                    self._bench.consider(self._senses.peer_fault(event, peer))
            case BootFailed():
                self._boot_failed(event)
            case PhaseBegan():
                self._progress.phase_began(event)
                self._phase(event)
            case SequenceEnded():
                self._progress.sequence_ended(event)
                self._bench.refresh()
                self._bench.consider([])
            case Fenced():
                self._bench.disarm(event.why)

    def _gone(self, event: RankGone) -> None:
        rank = ref(event.member)
        if rank not in self._roster.live:
            self._bench.refresh()
        if rank not in self._roster.live:
            return  # retired, already condemned, or never part of the view: the target's own business
        self._bench.consider(self._senses.gone(event, rank))
        if rank in self._roster.live:
            self._look_again(rank, 0.001)

    def _look_again(self, rank: RankRef, after_s: float) -> None:
        """A closed socket and a process that lives: look at it ever more slowly, up to the sensor's own rate."""

        def look() -> None:
            if rank not in self._roster.live or self._bench.ending:
                return
            dead = self._senses.died(rank)
            if dead:
                with self._bench.alone():
                    self._bench.consider(dead)
            else:
                self._look_again(rank, after_s * 2)

        if after_s < self._scan_s():
            asyncio.get_running_loop().call_later(after_s, look)

    def _boot_failed(self, event: BootFailed) -> None:
        self._progress.boot_failed(event)
        if event.gave_up:
            self._roster.boot_failed(event)
            self._bench.refresh()
            self._bench.consider([])

    def _phase(self, event: PhaseBegan) -> None:
        unknown = tuple(s for s in event.slots if not self._roster.is_lost(s))
        if event.kind != "loss" or not unknown:
            return
        self._bench.refresh()
        self._roster.given_up(unknown)
        self._bench.open_incident(Cause.EXECUTOR, unknown, event.at)
        self._actions.record(given_up(unknown))
        self._bench.refresh()
        self._journal.flush()
