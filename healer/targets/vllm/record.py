"""One sequence as it is told to the owner: its phases as they begin, and the report at its end."""

import time
from collections.abc import Collection

from elastic.controller.records import Outcome, Phase, PhaseBegan, SequenceEnded, SequenceKind, SequenceReport
from healer.targets.vllm.group import Group
from healer.targets.vllm.records import Role


class Record:
    """Of one sequence: its phases as events, and the report at its end."""

    def __init__(self, group: Group, kind: SequenceKind, slots: Collection[int], reason: str, began: float) -> None:
        self._group, self.kind, self._slots, self.reason = group, kind, tuple(sorted(slots)), reason
        self._began, self._phases = began, list[Phase]()
        self._now: tuple[str, float] | None = None

    def phase(self, name: str) -> None:
        self._end_phase()
        now = time.monotonic()
        self._now = (name, now)
        self._group.sequence = f"{self.kind}: {name}"
        self._group.emit(PhaseBegan(self.kind, name, self._group.epoch, self._slots, now))

    def end(self, outcome: Outcome, why: str = "") -> None:
        self._end_phase()
        group = self._group
        group.sequence = ""
        report = SequenceReport(
            kind=self.kind,
            outcome=outcome,
            reason=f"{self.reason}: {why}" if why else self.reason,
            slots=self._slots,
            live=tuple(sorted(h.slot for h in group.held(Role.LIVE))),
            epoch=group.epoch,
            began=self._began,
            ended=time.monotonic(),
            phases=tuple(self._phases),
            pause_s={},
            loaded={},
        )
        group.emit(SequenceEnded(report))

    def _end_phase(self) -> None:
        if self._now is not None:
            self._phases.append(Phase(self._now[0], self._now[1], time.monotonic()))
            self._now = None
