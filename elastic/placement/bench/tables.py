"""Records into figures: one row per kind of case over all seeds, and the targets with what was reached."""

from collections.abc import Iterable, Sequence
from statistics import mean, median

import msgspec
import numpy as np

from elastic.placement.bench.cases import EXPERTS
from elastic.placement.bench.run import Measured, Plan


class Row(msgspec.Struct, frozen=True):
    """One planner on all seeds of a kind of case. Times in ms: CPU time of the one thread, and wall time, which the machine's other work lengthens."""

    loads: str
    case: str
    event: str
    planner: str
    ranks: int
    slots: int
    moved: float
    covered: float
    covered_balancedness: float
    balancedness: float
    worst_balancedness: float
    against_base: float
    """The least quotient of the balancedness of a layer by DeepSeek's for the same layer; 0 without it."""
    moved_against_base: float
    """The largest quotient of moves over the seeds; 0 without it."""
    orphans: float
    host_orphans: float
    p50_ms: float
    p99_ms: float
    cpu_least_ms: float
    """The least CPU time of the repetitions, mean over the seeds: what other work on the machine changes least."""
    cpu_p50_ms: float
    cpu_p99_ms: float
    cover_p99_ms: float
    cover_cpu_p99_ms: float


class Target(msgspec.Struct, frozen=True):
    """One line of what the planner is held to."""

    what: str
    wanted: str
    reached: str
    met: bool


def rows(measured: Sequence[Measured]) -> list[Row]:
    """A row per kind of case and planner, in the order of the cases."""
    kinds: dict[tuple[str, str, int, int], list[Measured]] = {}
    for m in measured:
        kinds.setdefault((m.loads, m.event, m.ranks, m.slots), []).append(m)
    made: list[Row] = []
    for of_kind in kinds.values():
        made += _of_kind(of_kind)
    return made


def _of_kind(of_kind: Sequence[Measured]) -> Iterable[Row]:
    bases = [m.base for m in of_kind if m.base is not None]
    if bases:
        yield _row(of_kind[0], "DeepSeek (vLLM)", bases, [])
    ours = [m.ours for m in of_kind if m.ours is not None]
    if ours:
        yield _row(of_kind[0], "this", ours, bases)
    name = "this" if of_kind[0].event == "new" else "this, own start"
    yield _row(of_kind[0], name, [m.own_start for m in of_kind], bases)


def _row(case: Measured, planner: str, plans: Sequence[Plan], bases: Sequence[Plan]) -> Row:
    balanced = [b for plan in plans for b in plan.balancedness]
    wall, cpu = _milliseconds([s for plan in plans for s in plan.seconds])
    cover_wall, cover_cpu = _milliseconds([s for plan in plans for s in plan.cover_seconds] or [(0.0, 0.0)])
    pairs = list(zip(plans, bases, strict=True)) if bases else []
    quotients = [b / a for p, base in pairs for b, a in zip(p.balancedness, base.balancedness, strict=True)]
    return Row(
        loads=case.loads,
        case=case.name,
        event=case.event,
        planner=planner,
        ranks=case.ranks,
        slots=case.slots,
        moved=mean(p.moved for p in plans),
        covered=mean(p.covered for p in plans),
        covered_balancedness=mean(p.covered_balancedness for p in plans),
        balancedness=mean(balanced),
        worst_balancedness=min(balanced),
        against_base=min(quotients, default=0.0),
        moved_against_base=max((p.moved / base.moved for p, base in pairs if base.moved), default=0.0),
        orphans=mean(p.orphans for p in plans),
        host_orphans=mean(p.host_orphans for p in plans),
        p50_ms=median(wall),
        p99_ms=float(np.percentile(wall, 99)),
        cpu_least_ms=mean(min(s for _, s in plan.seconds) for plan in plans) * 1e3,
        cpu_p50_ms=median(cpu),
        cpu_p99_ms=float(np.percentile(cpu, 99)),
        cover_p99_ms=float(np.percentile(cover_wall, 99)),
        cover_cpu_p99_ms=float(np.percentile(cover_cpu, 99)),
    )


def _milliseconds(seconds: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [wall * 1e3 for wall, _ in seconds], [cpu * 1e3 for _, cpu in seconds]


def targets(made: Sequence[Row]) -> list[Target]:
    """The lines that the benchmark decides; those against DeepSeek's planner only where it ran."""
    by = {(r.loads, r.case, r.planner): r for r in made}
    ours = [r for r in made if r.planner == "this"]
    found: list[Target] = []
    for r in [r for r in ours if r.event == "loss"] or [r for r in made if r.event == "loss"]:
        title = f"{r.loads} {r.case}"
        if r.against_base:
            found.append(
                _target(
                    f"1 balance after a loss, {title}",
                    "worst layer >= 0.99 of DeepSeek's",
                    r.against_base,
                    0.99,
                    least=True,
                )
            )
            found.append(_target(f"1 moves after a loss, {title}", "<= 0.2 of DeepSeek's", r.moved_against_base, 0.2))
        if r.ranks <= 32 or r.ranks == 320:
            limit = 300.0 if r.ranks == 320 else 50.0
            found.append(
                _target(f"2 planning p99 (CPU ms), {title}", f"<= {limit:g}", r.cpu_p99_ms, limit, wall=r.p99_ms)
            )
        if r.ranks <= 32:
            found.append(
                _target(f"2 coverage p99 (CPU ms), {title}", "< 5", r.cover_cpu_p99_ms, 5.0, wall=r.cover_p99_ms)
            )
    for r in ours:
        base = by.get((r.loads, r.case, "DeepSeek (vLLM)"))
        if base is not None:
            found.append(
                _target(
                    f"2 planning beside vLLM (least CPU ms), {r.loads} {r.case}",
                    f"<= vLLM's {base.cpu_least_ms:.1f}",
                    r.cpu_least_ms,
                    base.cpu_least_ms,
                    wall=r.p50_ms,
                )
            )
    for r in [r for r in made if r.event == "growth" and r.planner != "DeepSeek (vLLM)"]:
        floor = 8 * r.slots
        found.append(
            _target(f"3 moves of growth, {r.loads}, {r.planner}", f"<= {1.15 * floor:.1f}", r.moved, 1.15 * floor)
        )
    for r in [r for r in made if r.event == "new" and r.planner == "this" and r.ranks <= 32 and r.loads != "recorded"]:
        bound = max(0, 2 * EXPERTS - r.ranks * r.slots) / r.ranks
        if bound or r.loads == "log-normal":
            limit = bound * (1.05 if r.loads == "log-normal" else 1.1) if bound else 0.05
            found.append(
                _target(f"4 orphans, {r.loads} {r.case}", f"<= {limit:.3f} (bound {bound:.2f})", r.orphans, limit)
            )
        base = by.get((r.loads, r.case, "DeepSeek (vLLM)"))
        if base is not None:
            wanted = f">= DeepSeek's {base.balancedness:.4f}"
            found.append(
                _target(f"4 balance, {r.loads} {r.case}", wanted, r.balancedness, base.balancedness, least=True)
            )
    return found


def _target(what: str, wanted: str, reached: float, limit: float, *, least: bool = False, wall: float = 0.0) -> Target:
    met = reached >= limit if least else reached <= limit
    return Target(what, wanted, f"{reached:.4g}" + (f" (wall {wall:.4g})" if wall else ""), met)


def markdown(made: Sequence[Row], found: Sequence[Target], facts: dict[str, str]) -> str:
    """The report as one page."""
    lines = ["# Placement benchmark", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    missed = [t for t in found if not t.met]
    lines += ["", "## Targets", "", f"{len(found) - len(missed)} of {len(found)} met."]
    lines += ["", "| Target | Wanted | Reached | |", "|---|---|---|---|"]
    lines += [f"| {t.what} | {t.wanted} | {t.reached} | {'met' if t.met else '**not met**'} |" for t in found]
    for event, title in (
        ("loss", "One rank lost"),
        ("growth", "Growth"),
        ("drift", "Load drift"),
        ("new", "A new group"),
    ):
        of_event = [r for r in made if r.event == event]
        if of_event:
            lines += ["", f"## {title}", "", *_table(of_event)]
    return "\n".join(lines) + "\n"


def _table(of_event: Sequence[Row]) -> list[str]:
    lines = [
        "| Load | Case | Planner | Moved per layer | of these coverage | Balancedness after coverage | Balancedness mean | worst layer "
        "| worst against DeepSeek's | Orphans, a rank lost | a host lost | Plan least ms, CPU | p50 ms, CPU (wall) | p99 ms | Coverage p99 ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in of_event:
        mine = r.planner != "DeepSeek (vLLM)"
        loss = mine and r.event == "loss"
        cells = [
            r.loads,
            r.case,
            r.planner,
            f"{r.moved:.1f}",
            f"{r.covered:.1f}" if loss else "",
            f"{r.covered_balancedness:.3f}" if loss else "",
            f"{r.balancedness:.4f}",
            f"{r.worst_balancedness:.4f}",
            f"{r.against_base:.4f}" if r.against_base else "",
            f"{r.orphans:.3f}",
            f"{r.host_orphans:.2f}" if r.host_orphans >= 0 else "",
            f"{r.cpu_least_ms:.1f}",
            f"{r.cpu_p50_ms:.1f} ({r.p50_ms:.1f})",
            f"{r.cpu_p99_ms:.1f} ({r.p99_ms:.1f})",
            f"{r.cover_cpu_p99_ms:.2f} ({r.cover_p99_ms:.2f})" if loss else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
