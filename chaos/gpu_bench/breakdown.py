"""Where the time of a pause went, and what other threads of the rank did during its longest gap. Pure, as `report`."""

from collections.abc import Callable, Sequence

from chaos.bench_report import quantile
from chaos.gpu_bench.records import Gap, Part, Sample

PARTS: tuple[tuple[str, Callable[[Gap], float]], ...] = (
    ("behind the last step: tokens chosen, committed, handed out", lambda gap: gap.settle_s),
    ("between the rounds", lambda gap: gap.stand_s),
    ("rows of the first step put together", lambda gap: gap.build_s),
    ("its launch", lambda gap: gap.launch_s),
    ("its run, peers included", lambda gap: gap.wait_s),
    ("in all", lambda gap: gap.took_s),
)


def pauses(samples: Sequence[Sample]) -> dict[str, list[Gap]]:
    """By kind of change: the gap of each survivor in which it came to the new view."""
    found: dict[str, list[Gap]] = {}
    for sample in samples:
        for sequence in sample.sequences:
            if sequence.outcome == "committed":
                found.setdefault(sequence.kind, []).extend(sequence.gaps.values())
    return found


def works(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Seconds of each work that ran during the longest gap of a survivor, by name."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for survivor in sample.survivors:
            for name, _, took_s in survivor.longest.works if survivor.longest else ():
                found.setdefault(name, []).append(took_s)
    return found


def markdown(part: Part) -> list[str]:
    lines: list[str] = []
    for kind, gaps in pauses(part.samples).items():
        if gaps:
            lines += [f"| where a pause went, {kind} ({len(gaps)}) | p50 | p95 |", "|---|---|---|"]
            lines += [f"| {words} | {_spread([take(gap) for gap in gaps])} |" for words, take in PARTS]
            lines.append("")
    if at_work := works(part.samples):
        gaps_seen = sum(s.longest is not None for sample in part.samples for s in sample.survivors)
        lines += [f"| during the longest gaps ({gaps_seen}) | seen | p50 | p95 |", "|---|---|---|---|"]
        lines += [f"| {name} | {len(took)} | {_spread(took)} |" for name, took in sorted(at_work.items())]
        lines.append("")
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{1e3 * quantile(values, 0.5):.2f} ms | {1e3 * quantile(values, 0.95):.2f} ms"
