"""A recorded trace judged again: the same judge, with the trace's clock."""

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import msgspec

from healer.diagnosis import Cause, Hardware, Health, Refined, Verdict
from healer.diagnosis.hardware import Advise, unadvised
from healer.evidence import RankRef
from healer.judge import Judge
from healer.trace import Trace, ViewLine, at_of

SETTLED_S = 3600.0
"""How long after its last line a trace is still judged: until what time alone changes has changed."""


class IncidentStep(StrEnum):
    OPENED = "opened"
    REFINED = "refined"
    CLOSED = "closed"


class TracedIncident(msgspec.Struct, kw_only=True):
    """From the first unhealthy rank to the moment when as many ranks are live again as before, and none is unhealthy."""

    id: str
    opened_at: float
    closed_at: float | None = None
    cause: Cause
    """The root, as far as the trace tells."""
    causes: tuple[Cause, ...]
    """All, in the order in which they were found; the root first."""
    slots: tuple[int, ...]
    size: int
    """Live ranks when it was opened."""
    sentence: str


class Moment(msgspec.Struct, frozen=True):
    """One point in time at which something changed."""

    at: float
    verdicts: tuple[Verdict, ...]
    refined: tuple[Refined, ...]
    incidents: tuple[tuple[IncidentStep, str], ...]
    """What happened to which incident."""


AdviseFor = Callable[[ViewLine], Advise]
"""What XIDs mean on the hardware of a view."""


class Replay:
    """Iterate to judge the trace; `incidents` and `verdicts` then hold the result so far."""

    def __init__(self, trace: Trace, advise_for: AdviseFor = lambda view: unadvised) -> None:
        self.incidents: list[TracedIncident] = []
        self.verdicts: tuple[Verdict, ...] = ()
        """The last word on every subject."""
        self._trace, self._advise_for = trace, advise_for
        self._judge = Judge(trace.header.limits)
        self._live: tuple[RankRef, ...] = ()
        self._open: TracedIncident | None = None

    def __iter__(self) -> Iterator[Moment]:
        """Raises TraceError."""
        self._see(self._trace.header.view)
        now = self._trace.header.view.at
        for line in self._trace:
            at = max(now, at_of(line))
            yield from self._pass(now, at)
            now = at
            if isinstance(line, ViewLine):
                self._see(line)
            else:
                self._judge.take([line.evidence])
            yield from self._moment(now)
        yield from self._pass(now, now + SETTLED_S)

    def _pass(self, since: float, until: float) -> Iterator[Moment]:
        """What time alone changes, between two lines."""
        due = self._judge.next_change(since)
        while due < until:
            # just after the moment: limits are met when they are reached, evidence stands until it has expired
            yield from self._moment(due + 1e-6)
            due = self._judge.next_change(due + 1e-6)

    def _see(self, view: ViewLine) -> None:
        self._live = view.live
        self._judge.watch(view.live, view.at, self._open.id if self._open else "")
        placed = {one.rank: one.gpu for one in view.placed}
        self._judge.equip(Hardware(gpus=view.gpus, placed=placed, host=view.host, advise=self._advise_for(view)))

    def _moment(self, now: float) -> Iterator[Moment]:
        found = self._judge.judge(now)
        self.verdicts = found.diagnosis.all
        steps = [*self._follow(found.diagnosis.ranks, now), *self._refine(found.refined)]
        if found.changed or found.refined or steps:
            yield Moment(now, found.changed, found.refined, tuple(steps))

    def _follow(self, ranks: tuple[Verdict, ...], now: float) -> Iterator[tuple[IncidentStep, str]]:
        sick = [v for v in ranks if v.health == Health.UNHEALTHY]
        if sick and self._open is None:
            first = min(sick, key=lambda v: v.since)
            self._open = TracedIncident(
                id=f"inc-{len(self.incidents) + 1}",
                opened_at=first.since,
                cause=first.cause,
                causes=(first.cause,),
                slots=(),
                size=len(self._live),
                sentence=first.sentence,
            )
            self.incidents.append(self._open)
            yield IncidentStep.OPENED, self._open.id
        if self._open is None:
            return
        for verdict in sick:
            self._widen(self._open, verdict)
        if not sick and len(self._live) >= self._open.size:
            self._open.closed_at = now
            yield IncidentStep.CLOSED, self._open.id
            self._open = None

    def _widen(self, incident: TracedIncident, verdict: Verdict) -> None:
        known = verdict.rank.slot in incident.slots
        incident.slots = tuple(sorted({*incident.slots, verdict.rank.slot}))
        if verdict.cause in incident.causes:
            return
        if known:
            # the same rank, judged again with more evidence
            incident.cause, incident.sentence = verdict.cause, verdict.sentence
            incident.causes = (verdict.cause, *incident.causes)
        else:
            incident.causes = (*incident.causes, verdict.cause)

    def _refine(self, refined: tuple[Refined, ...]) -> Iterator[tuple[IncidentStep, str]]:
        for one in refined:
            for incident in self.incidents:
                if incident.id == one.departed.incident:
                    incident.cause, incident.sentence = one.cause, one.sentence
                    incident.causes = (one.cause, *(c for c in incident.causes if c != one.cause))
                    yield IncidentStep.REFINED, incident.id


def replayed(trace: Trace) -> dict[str, Any]:
    """A trace judged again with the XID catalogue, as JSON would have it. Raises TraceError."""
    from healer.machine import catalogue

    advise_for = catalogue()
    replay = Replay(trace, lambda view: advise_for(view.driver, view.generation))
    moments = list(replay)
    found: dict[str, Any] = msgspec.to_builtins(
        {
            "trace": str(trace.path),
            "note": trace.header.note,
            "cut": trace.cut,
            "began": trace.header.view.at,
            "moments": moments,
            "incidents": replay.incidents,
            "verdicts": replay.verdicts,
        }
    )
    return found
