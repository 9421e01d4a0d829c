"""Reads the run records of one command."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from chaos import records
from chaos.records import Baseline, Campaign, Fault, JournalEntry, PhaseEvent, ReportEvent, Request, Run, SequenceLine
from elastic.controller.records import SequenceReport
from elastic.errors import ElasticError
from elastic.flight import Boot, StepLine, Stepped


@dataclass(frozen=True)
class Life:
    """One incarnation of a rank, as its own steps tell of it. Times in seconds of the host's monotonic clock."""

    slot: int
    incarnation: int
    began: float
    ended: float
    """Its last record: a rank that died wrote nothing later."""
    serving: tuple[tuple[float, float], ...]
    """Spans of committed steps that follow each other within `GAP_S`."""
    captures: tuple[int, int]
    """Step graphs at its first and last committed step; (-1, -1): it never committed one."""
    addresses: int
    """Different sets of addresses of graph-facing tensors over its committed steps: 1, unless one moved."""


GAP_S = 0.1
"""Longer without a committed step: the swim lane shows a hole."""


@dataclass(frozen=True)
class RunData:
    path: Path
    run: Run
    baseline: Baseline | None
    """None: the run ended before one was measured."""
    faults: tuple[Fault, ...]
    requests: tuple[Request, ...]
    sequences: tuple[SequenceLine, ...]

    @property
    def reports(self) -> tuple[SequenceReport, ...]:
        return tuple(line.report for line in self.sequences if isinstance(line, ReportEvent))

    @property
    def phases(self) -> tuple[PhaseEvent, ...]:
        return tuple(line for line in self.sequences if isinstance(line, PhaseEvent))

    @cached_property
    def lives(self) -> tuple[Life, ...]:
        """Read when asked for: steps are most of a record."""
        return tuple(
            life for slot, path in records.step_files(self.path).items() for life in _lives(slot, _steps(path))
        )

    def evidence(self) -> Iterator[JournalEntry]:
        yield from records.lines(self.path / records.EVIDENCE, JournalEntry)

    def decisions(self) -> Iterator[JournalEntry]:
        yield from records.lines(self.path / records.DECISIONS, JournalEntry)


@dataclass(frozen=True)
class Source:
    path: Path
    campaign: Campaign | None
    """None: the directory is that of a single run."""
    runs: tuple[RunData, ...]
    unfinished: tuple[str, ...]
    """Runs without an end: their commands were cut short."""


def read(path: Path) -> Source:
    """A run's directory, or one of several. Raises ElasticError that names file and line."""
    if (path / records.RUN).exists():
        return Source(path, None, (_run(path),), ())
    if not path.is_dir():
        raise ElasticError(f"{path}: no such directory, expected one that `healer-chaos run` wrote")
    campaign = None
    if (path / records.CAMPAIGN).exists():
        campaign = records.read(path / records.CAMPAIGN, Campaign)
    # without campaign.json the command was cut short; what it finished counts all the same
    names = campaign.runs if campaign else sorted(child.name for child in path.iterdir() if child.is_dir())
    finished = [name for name in names if (path / name / records.RUN).exists()]
    if not finished:
        raise ElasticError(f"{path}: holds no finished run, expected {records.RUN} there or one level below")
    known = (name for name in names if name not in finished and (path / name / records.STEPS).exists())
    return Source(path, campaign, tuple(_run(path / name) for name in finished), tuple(known))


def _run(path: Path) -> RunData:
    has_baseline = (path / records.BASELINE).exists()
    return RunData(
        path=path,
        run=records.read(path / records.RUN, Run),
        baseline=records.read(path / records.BASELINE, Baseline) if has_baseline else None,
        faults=tuple(records.lines(path / records.FAULTS, Fault)),
        requests=tuple(records.lines(path / records.REQUESTS, Request)),
        sequences=tuple(records.lines(path / records.SEQUENCES, SequenceLine)),
    )


def _steps(path: Path) -> Iterator[StepLine]:
    yield from records.lines(path, StepLine)


def _lives(slot: int, steps: Iterator[StepLine]) -> Iterator[Life]:
    boot: Boot | None = None
    last = 0.0
    spans: list[tuple[float, float]] = []
    captures = (-1, -1)
    addresses: set[str] = set()

    def life() -> Life:
        assert boot is not None
        return Life(slot, boot.incarnation, boot.at, last, tuple(spans), captures, len(addresses))

    for line in steps:
        if isinstance(line, Boot):
            if boot is not None:
                yield life()
            boot, spans, captures, addresses = line, [], (-1, -1), set()
        last = line.at
        if isinstance(line, Stepped) and line.committed:
            captures = (line.captures if captures[0] < 0 else captures[0], line.captures)
            addresses.add(line.address_hash)
            if spans and line.at - spans[-1][1] <= GAP_S:
                spans[-1] = (spans[-1][0], line.at)
            else:
                spans.append((line.began, line.at))
    if boot is not None:
        yield life()
