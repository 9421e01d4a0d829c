"""What was recorded, moment by moment, for a policy to be tried on: a trace, or a daemon's journal.

A trace is judged again, so verdicts are as this version gives them. A journal holds the verdicts themselves, as the daemon
of that time gave them, and who was live only after each sequence.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from elastic.controller.records import SequenceReport
from healer.diagnosis import Hardware, Verdict
from healer.evidence import Evidence, RankRef
from healer.journal import Kind, open_readonly
from healer.judge import Judge
from healer.machine import AdviseFor, catalogue
from healer.trace import AnyLine, EvidenceLine, LoadLine, Trace, ViewLine

SQLITE = b"SQLite format 3\x00"
SETTLE_S = 60.0
"""For so long after its last line a trace is still judged."""
LOAD_EVENT = "load"
"""The lifecycle event of a journal that holds a load line."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One moment."""

    at: float
    """Monotonic seconds of the recording host."""
    live: tuple[RankRef, ...]
    verdicts: tuple[Verdict, ...]
    evidence: dict[str, Evidence] = {}
    """Standing, by id; empty for a journal."""
    load: LoadLine | None = None
    note: str = ""
    """What of the recording did not count."""


def frames(path: Path) -> Iterator[Frame]:
    """Read a trace or a journal. Times do not go back: where the host was booted in between, the wall clock says how long
    that took. Raises TraceError or ElasticError that names the place."""
    if path.is_file():
        with contextlib.suppress(OSError), path.open("rb") as file:
            if file.read(len(SQLITE)) == SQLITE:
                return _of_journal(path)
    return _of_trace(Trace(path))


def _of_trace(trace: Trace) -> Iterator[Frame]:
    judge, view, now = Judge(trace.header.limits), trace.header.view, trace.header.view.at
    advise_for = catalogue()
    _see(judge, view, advise_for)
    yield _judged(judge, view, now)
    for line in trace.lines():
        at = max(now, _at(line))
        yield from _between(judge, view, now, at)
        now = at
        if isinstance(line, ViewLine):
            view = line
            _see(judge, view, advise_for)
        elif isinstance(line, EvidenceLine):
            judge.take([line.evidence])
        yield _judged(judge, view, now, line if isinstance(line, LoadLine) else None)
    yield from _between(judge, view, now, now + SETTLE_S)
    if trace.cut:
        yield msgspec.structs.replace(_judged(judge, view, now + SETTLE_S), note=trace.cut)


def _between(judge: Judge, view: ViewLine, since: float, until: float) -> Iterator[Frame]:
    """What time alone changes."""
    while (due := judge.next_change(since)) < until:
        since = due + 1e-6
        yield _judged(judge, view, since)


def _see(judge: Judge, view: ViewLine, advise_for: AdviseFor) -> None:
    judge.watch(view.live, view.at)
    placed = {one.rank: one.gpu for one in view.placed}
    advise = advise_for(view.driver, view.generation)
    judge.equip(Hardware(gpus=view.gpus, placed=placed, host=view.host, advise=advise))


def _judged(judge: Judge, view: ViewLine, now: float, load: LoadLine | None = None) -> Frame:
    found = judge.judge(now)
    return Frame(at=now, live=view.live, verdicts=found.diagnosis.ranks, evidence=judge.standing(now), load=load)


def _at(line: AnyLine) -> float:
    return line.evidence.at if isinstance(line, EvidenceLine) else line.at


def _of_journal(path: Path) -> Iterator[Frame]:
    query = "SELECT monotonic, wall, kind, body FROM entries WHERE kind IN (?, ?, ?) ORDER BY seq"
    verdicts: dict[int, Verdict] = {}
    live: tuple[int, ...] = ()
    with contextlib.closing(open_readonly(path)) as connection:
        clock = _OneClock()
        for monotonic, wall, kind, text in connection.execute(query, (Kind.VERDICT, Kind.OUTCOME, Kind.LIFECYCLE)):
            body, load, at = msgspec.json.decode(text), None, clock.at(monotonic, wall)
            try:
                if kind == Kind.VERDICT:
                    verdict = msgspec.convert(body["verdict"], Verdict)
                    if not isinstance(verdict.subject, RankRef):
                        continue
                    verdicts[verdict.rank.slot] = verdict
                elif kind == Kind.OUTCOME and "report" in body:
                    live = msgspec.convert(body["report"], SequenceReport, str_keys=True).live
                    verdicts = {slot: verdict for slot, verdict in verdicts.items() if slot in live}
                elif body.get("event") == LOAD_EVENT:
                    load = msgspec.convert(body["sample"], LoadLine)
                else:
                    continue
            except (msgspec.ValidationError, KeyError):
                continue  # of a version that wrote it otherwise
            slots = live or tuple(sorted(verdicts))
            ranks = tuple(verdicts[s].rank if s in verdicts else RankRef(s, 0) for s in slots)
            yield Frame(at=at, live=ranks, verdicts=tuple(verdicts.values()), load=load)


class _OneClock:
    """The monotonic clocks of several boots as one."""

    def __init__(self) -> None:
        self._offset_s = self._monotonic = self._wall = 0.0

    def at(self, monotonic: float, wall: float) -> float:
        if monotonic < self._monotonic:
            self._offset_s += self._monotonic - monotonic + max(0.0, wall - self._wall)
        self._monotonic, self._wall = monotonic, wall
        return monotonic + self._offset_s
