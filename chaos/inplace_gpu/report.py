"""The results as tables for readers."""

import statistics
from collections.abc import Iterable, Sequence

from chaos.inplace_gpu.records import Case, Part, Results


def markdown(results: Results) -> str:
    changed = "".join(f" {name}={value}." for name, value in results.env.items())
    where = "on GPUs" if results.gpus else "on vLLM's servers on a CPU: the harness only"
    lines = [
        f"# Healing inside a running vLLM group {where}",
        "",
        f"{results.began}, {'; '.join(results.gpus) or results.machine.cpu}, "
        + ", ".join(f"{name} {version}" for name, version in sorted(results.versions.items()))
        + f". {results.ranks} ranks, {results.spares} spares, {results.streams} clients of each rank and of the router, {results.tokens} tokens an answer, "
        f"one request after another each.{changed} Times since the SIGKILL to engine and workers of the slot.",
        "",
        "| Part | Took | What it missed |",
        "|---|---|---|",
        *(f"| {part.title} | {part.took_s:.1f} s | {part.error} |" for part in results.parts),
        "",
    ]
    for part in results.parts:
        lines += _details(part)
    return "\n".join(lines)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; of at least one value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 100) * len(ordered) // 100) - 1))]


def _details(part: Part) -> list[str]:
    lines = [f"## {part.name}", ""]
    lines += [f"* {name}: {_shown(value)}" for name, value in part.figures.items()]
    if part.cases:
        lines += [*_cases(part.cases), ""]
    if part.windows:
        lines += [
            "",
            "| Group | Tokens a second | Median wait of a client | 99th percentile |",
            "|---|---|---|---|",
            *(
                f"| {'plugin' if w.plugin else 'stock'} | {w.tokens_per_s:.1f} | {w.median_wait_ms:.2f} ms | {w.p99_wait_ms:.2f} ms |"
                for w in part.windows
            ),
            "",
        ]
    lines += [
        f"* {name} with the plugin, of stock's: {c.ratio:.4f} (95 %: {c.low:.4f} to {c.high:.4f})"
        for name, c in part.compared.items()
    ]
    if part.load is not None:
        lines.append(
            f"* clients: {part.load.right} right, {part.load.wrong} wrong, {part.load.errors} errors, "
            f"longest wait {part.load.longest_wait_s:.2f} s"
        )
    lines += [
        f"* {one.kind} {one.outcome}, {one.began_s:.2f} s to {one.ended_s:.2f} s: "
        + ", ".join(f"{p.name} {p.took_s:.2f} s" for p in one.phases)
        for one in part.sequences
    ]
    return [*lines, ""]


def _cases(cases: Sequence[Case]) -> list[str]:
    lines = [
        "",
        "| Slot | Load | Others live | First tokens of the others | Their silence | Another answer of each | Slot serves | Silence at the "
        "refill | Errors at survivors, router, dead rank | Experts reloaded | Captures | Steps by graph mode | Own MB | Missed |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        heal = [one.heal for one in case.survivors if one.heal is not None]
        refill = [one.refill for one in case.survivors if one.refill is not None]
        errors = sum(one.errors for one in case.survivors)
        modes: dict[str, int] = {}
        for one in case.survivors:
            for mode, count in one.modes.items():
                modes[mode] = modes.get(mode, 0) + count
        cells = (
            str(case.slot) if case.second is None else f"{case.slot}, then {case.second}",
            _when(case),
            f"{case.healed_s:.2f} s",
            _list(silence.ended_s for silence in heal),
            _list(silence.took_s for silence in heal),
            f"{case.answered_s:.2f} s",
            f"{case.filled_s:.1f} s{', from a spare' if case.from_spare else ''}",
            _list(silence.took_s for silence in refill),
            f"{errors}, {case.router.errors if case.router else '-'}, {case.victim_errors}",
            _reloaded(case),
            str(sum(one.captures for one in case.survivors)),
            ", ".join(f"{mode} {count}" for mode, count in sorted(modes.items())) or "-",
            " ".join(f"{one.memory_mb:.0f}" for one in case.survivors) + _gpu(case),
            "; ".join(case.problems),
        )
        lines.append("| " + " | ".join(cells) + " |")
    first = [one.heal.ended_s for case in cases for one in case.survivors if one.heal is not None]
    if first:
        lines += [
            "",
            f"First token of a survivor after the signal, {len(first)} samples: median {statistics.median(first):.3f} s, 95th "
            f"percentile {percentile(first, 0.95):.3f} s, longest {max(first):.3f} s.",
        ]
    return lines


def _when(case: Case) -> str:
    if case.second is not None:
        return f"load, {case.second_after_s:g} s into the refill"
    return "round of the balancer" if case.in_round else "load" if case.under_load else "idle"


def _reloaded(case: Case) -> str:
    experts = max((one.reloaded for one in case.survivors), default=0)
    return f"{experts}, {sum(one.reloaded_mb for one in case.survivors):.0f} MB" if experts else "0"


def _gpu(case: Case) -> str:
    return f"; GPUs {' '.join(map(str, case.gpu_memory_mb))}" if case.gpu_memory_mb else ""


def _list(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values) or "-"


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
