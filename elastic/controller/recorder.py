"""Holds a running sequence to its table of moves, and collects what it did, and when, into its report."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from elastic.controller.phases import IllegalMove, Step, check
from elastic.controller.records import (
    Event,
    Joiner,
    Outcome,
    Phase,
    PhaseBegan,
    SequenceEnded,
    SequenceKind,
    SequenceReport,
)
from elastic.protocol import Loaded


class Recorder:
    """One per sequence; `end` gives the report to the owner of the executor, exactly once. Raises IllegalMove where the
    sequence leaves its table."""

    def __init__(
        self,
        kind: SequenceKind,
        slots: Collection[int],
        reason: str,
        epoch: int,
        began: float,
        on_event: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind, self.slots, self.reason, self.epoch = kind, tuple(sorted(slots)), reason, epoch
        self.state = Step.BEGIN
        self.pause_s: dict[int, float] = {}
        self.joiners: dict[int, Joiner] = {}
        self._began, self._on_event, self._clock = began, on_event, clock
        self._phases: list[Phase] = []
        self._loaded: dict[int, Loaded] = {}
        self._ended = False

    @contextmanager
    def phase(self, step: Step) -> Iterator[None]:
        """Go on to `step`, and measure it."""
        if self._ended:
            raise IllegalMove(f"{self.kind}: {step} after its end")
        check(self.kind, self.state, step)
        self.state, start = step, self._clock()
        self._on_event(PhaseBegan(self.kind, step, self.epoch, self.slots, start))
        try:
            yield
        finally:
            self.add_phase(step, start, self._clock())

    def add_phase(self, name: str, start: float, end: float) -> None:
        """A phase that was measured elsewhere."""
        self._phases.append(Phase(name, start, end))

    def loaded(self, slot: int, loaded: Loaded) -> None:
        if loaded.peer.tensors or loaded.host.tensors or loaded.disk.tensors:
            self._loaded[slot] = self._loaded.get(slot, Loaded()) + loaded

    def end(self, outcome: Outcome, reason: str, live: Collection[int]) -> None:
        if self._ended:
            return
        check(self.kind, self.state, outcome)
        self._ended = True
        report = SequenceReport(
            kind=self.kind,
            outcome=outcome,
            reason=f"{self.reason}: {reason}" if reason else self.reason,
            slots=self.slots,
            live=tuple(sorted(live)),
            epoch=self.epoch,
            began=self._began,
            ended=self._clock(),
            phases=tuple(self._phases),
            pause_s=self.pause_s,
            loaded=self._loaded,
            joiners=self.joiners,
        )
        self._on_event(SequenceEnded(report))
