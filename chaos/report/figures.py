"""Figures of run records: pure functions of what was read, times in seconds."""

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from chaos.bench_report import quantile
from chaos.records import Fault, Request, SequenceState
from chaos.report.source import RunData
from elastic.controller.phases import Step
from elastic.controller.records import SequenceReport

STATES = ("detect", *(step.value for step in Step))
"""Parts of a recovery, in order; a loss goes through detect, begin, park, commit and resume."""

DOWN_S = 0.25
"""Without any token for longer, while somebody waits for one, the deployment counts as down; twice the longest gap of the
fault-free run where that is more."""


class Spread(msgspec.Struct, frozen=True):
    """Of one figure over its samples, in seconds. Intervals are 95% percentile bootstrap intervals, 2,000 resamples."""

    n: int
    p50: float
    p50_low: float
    p50_high: float
    p95: float
    p95_low: float
    p95_high: float
    max: float


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One fault that took ranks, and how it was healed. Times from the fault."""

    run: str
    fault: str
    kind: str
    state: str
    """What the executor was going through: ``steady``, or ``join: load``."""
    at: float
    phases_s: dict[str, float]
    """Of the loss that removed its ranks, by `STATES`; a loss that was begun anew counts with its last form."""
    pause_s: float | None
    """Longest gap between two committed steps of a survivor; None: all were idle."""
    coverage_s: float
    """Until every survivor had committed a step with all experts covered: the time to repair of this report."""
    capacity_s: float | None
    """Until the group had its full size again; None: the run did not wait for it."""
    silence_s: float | None
    """Longest wait of a client for a token that overlaps the repair; None: nobody waited."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Of the fault matrix."""

    kind: str
    state: str
    injected: int
    refused: int
    broken: int
    """Of faults in runs that did not pass."""


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    watched_s: float
    """With at least one request open."""
    down_s: float
    share: float
    """1 - down / watched; 1 where nothing was watched."""
    longest_gap_s: float
    """Of any client."""
    goodput: float
    """Tokens received over tokens asked for."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second around the faults of one kind, one value per bin."""

    kind: str
    faults: int
    bin_s: float
    from_s: float
    """Of the first bin, from the fault; negative."""
    mean: tuple[float, ...]
    low: tuple[float, ...]
    """10th percentile over the faults."""
    high: tuple[float, ...]
    """90th percentile."""
    before: float
    """Mean before the fault."""
    back_s: float | None
    """From the fault until the mean of half a second is 95% of `before` again; None: not within the curve."""


def state_name(state: SequenceState) -> str:
    if not state.sequence:
        return "steady"
    return f"{state.sequence}: {state.step}" if state.step else state.sequence


def spread(values: Sequence[float], seed: int = 1) -> Spread:
    """Of at least one value."""
    drawn = np.random.default_rng(seed).choice(np.asarray(values), size=(2000, len(values)))
    drawn.sort(axis=1)

    def interval(q: float) -> tuple[float, float]:
        column = drawn[:, max(0, int(np.ceil(q * len(values))) - 1)]
        return float(np.quantile(column, 0.025)), float(np.quantile(column, 0.975))

    (p50_low, p50_high), (p95_low, p95_high) = interval(0.5), interval(0.95)
    p50, p95 = quantile(values, 0.5), quantile(values, 0.95)
    return Spread(len(values), p50, p50_low, p50_high, p95, p95_low, p95_high, max(values))


def recoveries(data: RunData) -> list[Recovery]:
    """Of the faults that took ranks, in order."""
    losses = [r for r in data.reports if r.kind == "loss" and r.outcome == "committed"]
    gaps = client_gaps(data.requests)
    found = []
    for fault in data.faults:
        if not fault.must_be_replaced or not fault.done_at:
            continue
        slots = {member.slot for member in fault.members}
        report = next((r for r in losses if slots & set(r.slots) and r.ended > fault.at), None)
        if report is not None:
            found.append(_recovery(data, fault, report, gaps))
    return found


def _recovery(data: RunData, fault: Fault, report: SequenceReport, gaps: Sequence[tuple[float, float]]) -> Recovery:
    phases: dict[str, float] = defaultdict(float)
    # a second fault may be seen before the first one's time is over: then nothing of it was waiting to be detected
    phases["detect"] = max(0.0, report.began - fault.at)
    for phase in report.phases:
        if phase.name in STATES[1:]:
            phases[phase.name] += phase.seconds
    waits = [end - begin for begin, end in gaps if end > fault.at and begin < report.ended]
    return Recovery(
        run=data.run.id,
        fault=fault.id,
        kind=fault.kind,
        state=state_name(fault.state),
        at=fault.at,
        phases_s=dict(phases),
        pause_s=max(report.pause_s.values(), default=None),
        coverage_s=report.ended - fault.at,
        capacity_s=fault.whole_at - fault.at if fault.whole_at else None,
        silence_s=max(waits, default=None),
    )


def client_gaps(requests: Iterable[Request]) -> list[tuple[float, float]]:
    """Every wait of a client for a token: from sending to the first, and between two."""
    found: list[tuple[float, float]] = []
    for request in requests:
        if request.tokens:
            found += itertools.pairwise((request.sent_at, *request.times))
    return found


def matrix(runs: Iterable[RunData]) -> list[Cell]:
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for data in runs:
        for fault in data.faults:
            cell = counts[fault.kind, state_name(fault.state)]
            cell["refused" if fault.refused or not fault.at else "injected"] += 1
            cell["broken"] += data.run.verdict in ("failed", "error")
    return [
        Cell(kind=kind, state=state, injected=c["injected"], refused=c["refused"], broken=c["broken"])
        for (kind, state), c in sorted(counts.items())
    ]


def availability(data: RunData) -> Availability:
    limit = max(DOWN_S, 2 * data.baseline.longest_gap_s if data.baseline else 0.0)
    times = sorted(itertools.chain.from_iterable(request.times for request in data.requests))
    watched = down = 0.0
    for begin, end in _union((r.sent_at, r.ended_at) for r in data.requests if r.sent_at):
        watched += end - begin
        inside = times[bisect.bisect_left(times, begin) : bisect.bisect_right(times, end)]
        down += sum(b - a for a, b in itertools.pairwise((begin, *inside, end)) if b - a > limit)
    ledger = data.run.ledger
    return Availability(
        watched_s=watched,
        down_s=down,
        share=1 - down / watched if watched else 1.0,
        longest_gap_s=ledger.longest_gap_s,
        goodput=ledger.tokens / asked if (asked := ledger.sent * data.run.load.max_tokens) else 1.0,
    )


def together(parts: Sequence[Availability], goodput: float) -> Availability:
    watched, down = sum(p.watched_s for p in parts), sum(p.down_s for p in parts)
    return Availability(
        watched_s=watched,
        down_s=down,
        share=1 - down / watched if watched else 1.0,
        longest_gap_s=max((p.longest_gap_s for p in parts), default=0.0),
        goodput=goodput,
    )


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def curves(runs: Iterable[RunData], bin_s: float = 0.1, before_s: float = 2.0, after_s: float = 6.0) -> list[Curve]:
    """By kind of fault; faults with no token in the time before are left out."""
    rows: dict[str, list[np.ndarray]] = defaultdict(list)
    edges = np.arange(round((before_s + after_s) / bin_s) + 1) * bin_s - before_s
    for data in runs:
        times = np.sort(np.fromiter(itertools.chain.from_iterable(r.times for r in data.requests), float))
        for fault in data.faults:
            if not fault.at:
                continue
            counts = np.diff(np.searchsorted(times, fault.at + edges)) / bin_s
            if counts[: round(before_s / bin_s)].any():
                rows[fault.kind].append(counts)
    return [_curve(kind, np.vstack(found), bin_s, before_s) for kind, found in sorted(rows.items())]


def _curve(kind: str, rows: np.ndarray, bin_s: float, before_s: float) -> Curve:
    mean = rows.mean(axis=0)
    first = round(before_s / bin_s)
    before = float(mean[:first].mean())
    width = round(0.5 / bin_s)
    smooth = np.convolve(mean[first:], np.ones(width) / width, mode="valid")
    back = np.flatnonzero(smooth >= 0.95 * before)
    return Curve(
        kind=kind,
        faults=len(rows),
        bin_s=bin_s,
        from_s=-before_s,
        mean=tuple(mean.tolist()),
        low=tuple(np.quantile(rows, 0.1, axis=0).tolist()),
        high=tuple(np.quantile(rows, 0.9, axis=0).tolist()),
        before=before,
        back_s=float((back[0] + width) * bin_s) if back.size else None,
    )


def unneeded_removals(data: RunData) -> list[str]:
    """Ranks that a loss took although no fault called for it, in words."""
    wanted = [(f.at, {m.slot for m in f.members}) for f in data.faults if f.must_be_replaced and f.at]
    found = []
    for report in data.reports:
        if report.kind != "loss":
            continue
        called = set().union(*(slots for at, slots in wanted if at <= report.ended))
        if wrong := set(report.slots) - called:
            found.append(f"slot {', '.join(map(str, sorted(wrong)))}: {report.reason}")
    return found
