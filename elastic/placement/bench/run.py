"""Carry out the cases and measure: one record per case, start map and planner."""

import os
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from elastic.placement.bench.baseline import Answer, Baseline, Question
from elastic.placement.bench.cases import Case
from elastic.placement.maps import HOLE
from elastic.placement.problem import Floats, Ints, Problem, System, problem
from elastic.placement.report import evaluate, rank_loads
from elastic.placement.schedule import schedule
from elastic.placement.solution import Solution
from elastic.placement.solver import cover, solve
from elastic.placement.validate import check_rows

CURVE_POINTS = 40


class Plan(msgspec.Struct, frozen=True):
    """What one planner made of one case."""

    balancedness: list[float]
    """Of each layer, under the load after the event."""
    moved: float
    """Experts that a rank has to load, per layer."""
    orphans: float
    """After the loss of one rank, per layer, mean over ranks."""
    host_orphans: float
    """The same for a host of 8 ranks; -1 with one host."""
    seconds: list[float]
    """Wall time of every repetition of the whole plan."""
    cover_seconds: list[float] = []
    """The same for coverage alone."""
    covered: float = 0.0
    """Of the moves, those of coverage."""
    covered_balancedness: float = 0.0
    curve: list[tuple[float, float]] = []
    """(moves, mean balancedness) along the steps, both per layer."""


class Measured(msgspec.Struct, frozen=True):
    """One case: what DeepSeek's planner and this one did, from the same start map and from this project's own."""

    name: str
    loads: str
    event: str
    ranks: int
    slots: int
    floor: float
    """Slots per layer that are new, which any planner fills."""
    load_average: float
    base: Plan | None
    ours: Plan | None
    """From the start map of DeepSeek's planner; None without it, or where nothing was there before."""
    own_start: Plan
    """From the start map of this planner; for a new group the map itself."""


def run(cases: Sequence[Case], baseline: Baseline | None, *, repeats: int, say: Callable[[str], None]) -> tuple[list[Measured], str]:
    """All cases; also vLLM's version, empty without a baseline."""
    starts: list[Ints | None] = [None] * len(cases)
    answers: list[Answer | None] = [None] * len(cases)
    version = ""
    if baseline is not None:
        say("asking vLLM for the start maps")
        asked = [Question(case.before, case.ranks * case.slots, case.ranks) for case in cases]
        given, version = baseline.ask(asked, repeats=1)
        starts = [answer.placed.astype(np.int32) for answer in given]
        say("asking vLLM for its replans")
        asked = [_replan(case, answer.placed) for case, answer in zip(cases, given, strict=True)]
        answers = list(baseline.ask(asked, repeats=max(3, repeats // 4))[0])
    measured = []
    for i, case in enumerate(cases):
        measured.append(_measure(case, starts[i], answers[i], repeats))
        say(f"{i + 1}/{len(cases)} {case.loads} {case.name}")
    return measured, version


def _replan(case: Case, start: Ints) -> Question:
    if case.event == "new":
        return Question(case.after, case.ranks * case.slots, case.ranks)
    kept = np.concatenate([start[:, r * case.slots : (r + 1) * case.slots] for r in case.survivors], axis=1)
    new = np.full((len(start), case.joined * case.slots), HOLE)
    return Question(case.after, len(case.live) * case.slots, len(case.live), np.concatenate((kept, new), axis=1))


def _measure(case: Case, start: Ints | None, answer: Answer | None, repeats: int) -> Measured:
    system = System.uniform(case.ranks + case.joined, case.slots)
    own = None
    if case.event != "new":
        own = solve(problem(System.uniform(case.ranks, case.slots), case.before, live=range(case.ranks))).target
    ours = _plan(case, system, start, repeats) if start is not None and case.event != "new" else None
    return Measured(
        name=case.name,
        loads=case.loads,
        event=case.event,
        ranks=case.ranks,
        slots=case.slots,
        floor=float(case.joined * case.slots if case.event != "new" else case.ranks * case.slots),
        load_average=os.getloadavg()[0],
        base=None if answer is None or start is None else _of_baseline(case, system, start, answer),
        ours=ours,
        own_start=_plan(case, system, own, repeats),
    )


def _problem(case: Case, system: System, start: Ints | None) -> Problem:
    if start is None:
        return problem(system, case.after, live=case.live)
    new = np.full((len(start), case.joined * case.slots), HOLE, dtype=np.int32)
    rows = np.concatenate((start, new), axis=1)
    return problem(system, case.after, live=case.live, current=rows, present=case.survivors)


def _plan(case: Case, system: System, start: Ints | None, repeats: int) -> Plan:
    def planned(how: Callable[[Problem], Solution]) -> tuple[Solution, list[float]]:
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            # all that an executor needs: checked input, steps with sources, batches
            solution = how(_problem(case, system, start))
            schedule(solution)
            seconds.append(time.perf_counter() - began)
        return solution, seconds

    covered, cover_seconds = planned(cover)
    solution, seconds = planned(solve)
    target = check_rows(solution.target, system.slots, case.after.shape[1], live=case.live)
    found = evaluate(system, case.after, target, case.live)
    first = evaluate(system, case.after, solution.map_at(solution.coverage), case.live)
    layers = len(case.after)
    return Plan(
        balancedness=found.balancedness.tolist(),
        moved=solution.moved / layers,
        orphans=found.rank.expected,
        host_orphans=-1.0 if found.host is None else found.host.expected,
        seconds=seconds,
        cover_seconds=cover_seconds,
        covered=covered.moved / layers,
        covered_balancedness=first.mean,
        curve=_curve(solution) if case.event != "new" else [],
    )


def _curve(solution: Solution) -> list[tuple[float, float]]:
    busiest = solution.busiest_before.copy()
    layers = len(busiest)
    points, moved = [], 0
    every = max(1, len(solution) // CURVE_POINTS)
    for i, step in enumerate(solution.steps):
        moved += 1 if step[4] == HOLE else 2
        busiest[step[1]] = solution.busiest_after[i]
        if i + 1 >= solution.coverage and ((i + 1 - solution.coverage) % every == 0 or i + 1 == len(solution)):
            points.append((moved / layers, float((1 / busiest).mean())))
    return points


def _of_baseline(case: Case, system: System, start: Ints, answer: Answer) -> Plan:
    rows = np.full((len(start), int(system.first[-1])), HOLE, dtype=np.int32)
    for i, rank in enumerate(case.live):
        rows[:, system.first[rank] : system.first[rank + 1]] = answer.placed[:, i * case.slots : (i + 1) * case.slots]
    loads = rank_loads(system, case.after, rows)[:, list(case.live)]
    found = evaluate(system, case.after, rows, case.live)
    old = np.full_like(rows, HOLE)
    if case.event != "new":
        old[:, : start.shape[1]] = start
    moved = 0
    for rank in case.live:
        span = slice(int(system.first[rank]), int(system.first[rank + 1]))
        for before, after in zip(old[:, span], rows[:, span], strict=True):
            moved += len(set(after.tolist()) - set(before.tolist()))
    balanced: Floats = loads.mean(axis=1) / loads.max(axis=1)
    return Plan(
        balancedness=balanced.tolist(),
        moved=moved / len(rows),
        orphans=found.rank.expected,
        host_orphans=-1.0 if found.host is None else found.host.expected,
        seconds=answer.seconds.tolist(),
    )
