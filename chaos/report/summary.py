"""The whole report as data: what `report.json` holds and the page shows."""

from collections.abc import Sequence

import msgspec

from chaos.machine import Machine
from chaos.records import RequestOutcome, Run, Verdict
from chaos.report import figures
from chaos.report.figures import Availability, Cell, Curve, Recovery, Spread
from chaos.report.source import RunData, Source

FORMAT = 1

TIMES = ("detect", "begin", "park", "commit", "resume", "pause", "coverage", "capacity", "silence")
"""Figures of a recovery, by the names they have in a report."""


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    fear: str
    verdict: Verdict
    why: str
    seed: int
    faults: int
    requests: int
    broken: int
    """Requests that did not end right."""
    seconds: float
    expectations: int
    command: tuple[str, ...]
    minimal_command: tuple[str, ...]


class Quiet(msgspec.Struct, frozen=True, kw_only=True):
    """Runs in which no fault called for a removal."""

    runs: int
    seconds: float
    removals: tuple[str, ...]
    """Destructive actions in them, in words; each is a false positive."""


class Survivors(msgspec.Struct, frozen=True, kw_only=True):
    """Lives of ranks in which a step was committed, by their own records."""

    lives: int
    recaptured: int
    """Whose count of captured graphs was not the same at the first and last committed step."""
    moved: int
    """In which an address of a graph-facing tensor changed."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    source: str
    command: tuple[str, ...]
    seed: int
    began_wall: float
    machine: Machine
    load_after: tuple[float, float, float]
    versions: dict[str, str]
    verdict: Verdict
    verdicts: dict[Verdict, int]
    runs: tuple[RunLine, ...]
    unfinished: tuple[str, ...]
    requests: int
    outcomes: dict[RequestOutcome, int]
    late: int
    replayed: int
    tokens: int
    faults: int
    recoveries: tuple[Recovery, ...]
    times: dict[str, Spread]
    """Over all recoveries, by `TIMES`; only those with samples."""
    times_by_kind: dict[str, dict[str, Spread]]
    restart: Spread | None
    """From SIGKILL of all ranks to the first token of a new group, on the same machine; None: not measured."""
    availability: Availability
    curves: tuple[Curve, ...]
    matrix: tuple[Cell, ...]
    quiet: Quiet
    unneeded_removals: tuple[str, ...]
    survivors: Survivors


def summarise(source: Source) -> Report:
    runs = source.runs
    recoveries = [recovery for data in runs for recovery in figures.recoveries(data)]
    verdicts: dict[Verdict, int] = {}
    outcomes: dict[RequestOutcome, int] = {}
    for data in runs:
        verdicts[data.run.verdict] = verdicts.get(data.run.verdict, 0) + 1
        for outcome, count in data.run.ledger.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    kinds = sorted({recovery.kind for recovery in recoveries})
    last, first, campaign = runs[-1].run, runs[0].run, source.campaign
    return Report(
        source=source.path.name,
        command=campaign.command if campaign else first.command,
        seed=campaign.seed if campaign else first.seed,
        began_wall=campaign.began_wall if campaign else first.began_wall,
        machine=campaign.machine if campaign else first.machine,
        load_after=last.load_after,
        versions=campaign.versions if campaign else first.versions,
        verdict=_worst(verdicts, source.unfinished),
        verdicts=verdicts,
        runs=tuple(_line(data.run) for data in runs),
        unfinished=source.unfinished,
        requests=sum(data.run.ledger.sent for data in runs),
        outcomes=outcomes,
        late=sum(data.run.ledger.late for data in runs),
        replayed=sum(data.run.ledger.replayed for data in runs),
        tokens=sum(data.run.ledger.tokens for data in runs),
        faults=sum(1 for data in runs for fault in data.faults if fault.at and not fault.refused),
        recoveries=tuple(recoveries),
        times=_times(recoveries),
        times_by_kind={kind: _times([r for r in recoveries if r.kind == kind]) for kind in kinds},
        restart=_restart(runs),
        availability=_availability(runs),
        curves=tuple(figures.curves(runs)),
        matrix=tuple(figures.matrix(runs)),
        quiet=_quiet(runs),
        unneeded_removals=tuple(
            f"{data.run.scenario.name}: {text}" for data in runs for text in figures.unneeded_removals(data)
        ),
        survivors=_survivors(runs),
    )


def values(recoveries: Sequence[Recovery], name: str) -> list[float]:
    """Samples of one of `TIMES`."""
    if name in figures.STATES:
        return [r.phases_s.get(name, 0.0) for r in recoveries]
    found = (getattr(r, f"{name}_s") for r in recoveries)
    return [value for value in found if value is not None]


def _times(recoveries: Sequence[Recovery]) -> dict[str, Spread]:
    samples = {name: values(recoveries, name) for name in TIMES}
    return {name: figures.spread(found) for name, found in samples.items() if found}


def _worst(verdicts: dict[Verdict, int], unfinished: Sequence[str]) -> Verdict:
    if unfinished or "error" in verdicts:
        return "failed" if "failed" in verdicts else "error"
    for verdict in ("failed", "passed"):
        if verdict in verdicts:
            return verdict
    return "skipped"


def _line(run: Run) -> RunLine:
    return RunLine(
        id=run.id,
        name=run.scenario.name,
        fear=run.scenario.fear,
        verdict=run.verdict,
        why=run.why,
        seed=run.seed,
        faults=run.faults,
        requests=run.ledger.sent,
        broken=run.ledger.sent - run.ledger.outcomes.get("right", 0),
        seconds=run.ended - run.began,
        expectations=len(run.expectations),
        command=run.command,
        minimal_command=run.minimal_command,
    )


def _restart(runs: Sequence[RunData]) -> Spread | None:
    # runs on one group carry the same baseline: each sample counts once
    samples = {sample for data in runs if data.baseline for sample in _restarts(data)}
    return figures.spread(sorted(samples)) if samples else None


def _restarts(data: RunData) -> tuple[float, ...]:
    assert data.baseline is not None
    if data.baseline.restart_samples_s:
        return data.baseline.restart_samples_s
    return (data.baseline.restart_s,) if data.baseline.restart_s else ()


def _availability(runs: Sequence[RunData]) -> Availability:
    expected = sum(data.run.ledger.sent * data.run.load.max_tokens for data in runs)
    got = sum(data.run.ledger.tokens for data in runs)
    return figures.together([figures.availability(data) for data in runs], got / expected if expected else 1.0)


def _quiet(runs: Sequence[RunData]) -> Quiet:
    calm = [data for data in runs if not any(fault.must_be_replaced for fault in data.faults)]
    return Quiet(
        runs=len(calm),
        seconds=sum(data.run.ended - data.run.began for data in calm),
        removals=tuple(f"{d.run.scenario.name}: {text}" for d in calm for text in figures.unneeded_removals(d)),
    )


def _survivors(runs: Sequence[RunData]) -> Survivors:
    lives = [life for data in runs for life in data.lives if life.serving]
    return Survivors(
        lives=len(lives),
        recaptured=sum(1 for life in lives if life.captures[0] != life.captures[1]),
        moved=sum(1 for life in lives if life.addresses > 1),
    )
