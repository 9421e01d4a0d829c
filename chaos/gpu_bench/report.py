"""From raw samples to figures, targets and a Markdown table. Pure: the same file always gives the same report."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from chaos.bench_report import quantile
from chaos.gpu_bench import breakdown
from chaos.gpu_bench.records import Part, Results, Sample, Spread
from chaos.gpu_bench.records import Sequence as SequenceRecord

Values = list[float]


@dataclass(frozen=True)
class Target:
    part: str
    figure: str
    statistic: str
    """"p50", "p95", "max", or "value" for what is no sample."""
    limit: float
    at_least: bool
    """False: at most."""
    unit: str


TARGETS = (
    Target("kill", "stepped_s", "p95", 0.025, False, "s"),
    Target("daemon", "stepped_s", "p95", 0.025, False, "s"),
    Target("orphans", "stepped_beyond_copy_s", "p95", 0.025, False, "s"),
    Target("orphans-wide", "stepped_beyond_copy_s", "p95", 0.025, False, "s"),
    Target("kill", "refill_pause_s", "p95", 0.005, False, "s"),
    Target("daemon", "refill_pause_s", "p95", 0.005, False, "s"),
    Target("orphans", "refill_pause_s", "p95", 0.005, False, "s"),
    Target("kill", "refill_excess_s", "p95", 0.005, False, "s"),
    Target("orphans", "refill_excess_s", "p95", 0.005, False, "s"),
    Target("kill", "refill_gap_s", "p95", 0.020, False, "s"),
    Target("daemon", "refill_gap_s", "p95", 0.020, False, "s"),
    Target("orphans", "refill_gap_s", "p95", 0.020, False, "s"),
    Target("scale", "planned_pause_s", "p95", 0.005, False, "s"),
    Target("scale", "planned_excess_s", "p95", 0.005, False, "s"),
    Target("scale", "planned_gap_s", "p95", 0.020, False, "s"),
    Target("recapture", "recapture_over_commit_pause", "value", 100.0, True, "x"),
    Target("orphans", "copy_over_ceiling_percent", "p50", 70.0, True, "%"),
    Target("orphans-wide", "copy_over_ceiling_percent", "p50", 70.0, True, "%"),
)

WORDS = {
    "seen_s": "fault to evidence",
    "released_s": "fault to every survivor's step returned",
    "parked_s": "fault to all survivors parked",
    "covered_s": "fault to every expert covered",
    "committed_s": "fault to the new map committed",
    "stepped_s": "fault to the first correct step of every survivor",
    "stepped_beyond_copy_s": "of it, without the copy of the orphans",
    "loss_pause_s": "pause of a survivor (last step before the fault to first after)",
    "refill_pause_s": "refill: commit pause of a survivor",
    "refill_excess_s": "refill: commit pause beyond an ordinary round",
    "refill_gap_s": "refill: longest gap of a survivor, background work included",
    "capacity_s": "fault to full size",
    "refill_process_s": "refill: process and imports",
    "refill_device_s": "refill: CUDA context",
    "refill_memory_s": "refill: exchange buffer, memory, registration, model",
    "refill_load_s": "refill: reach the peers and load weights",
    "refill_capture_s": "refill: warm-up and capture",
    "refill_connect_s": "refill: connect the exchange",
    "planned_pause_s": "planned change: commit pause of a survivor",
    "planned_excess_s": "planned change: commit pause beyond an ordinary round",
    "planned_gap_s": "planned change: longest gap of a survivor",
    "grow_s": "scale up, request to commit",
    "shrink_s": "scale down, request to commit",
    "copied_bytes": "orphans loaded from host memory, bytes a rank",
    "copy_s": "orphans: seconds of the copy",
    "copy_bytes_per_s": "orphans: bytes a second",
    "copy_over_ceiling_percent": "orphans: of the ceiling of copies",
    "idle_gap_s": "longest gap of any rank afterwards, while spares come up",
    "step_before_s": "round before the fault",
    "step_after_s": "round after all was healed, same graphs",
    "step_change_percent": "change of the round by fault and healing",
}


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError for no values."""
    if not values:
        raise ValueError("no samples")
    return Spread(len(values), quantile(values, 0.5), quantile(values, 0.95), max(values))


# --- one sample -----------------------------------------------------------------------------------------------------


def _of(sample: Sample, *kinds: str) -> list[SequenceRecord]:
    return [s for s in sample.sequences if s.kind in kinds and s.outcome == "committed"]


def _phase_end(sequences: Iterable[SequenceRecord], name: str) -> Values:
    return [s.phases[name][0] + s.phases[name][1] for s in sequences if name in s.phases][-1:]


def _loss(sample: Sample) -> list[SequenceRecord]:
    return _of(sample, "loss")[-1:]


def _refill(sample: Sample) -> list[SequenceRecord]:
    return _of(sample, "join", "form") if _of(sample, "loss") else []


def _worst(values: Iterable[float]) -> Values:
    """Of the ranks of one sample the worst one counts."""
    found = list(values)
    return [max(found)] if found else []


def _joiner(sample: Sample, take: Callable[[Any], float]) -> Values:
    return _worst(take(j) for s in _refill(sample) for j in s.joiners.values())


def _excess(sequences: Sequence[Any], survivors: Sequence[Any]) -> Values:
    """What a commit adds to the time from one step to the next: the pause less the median round before."""
    rounds = {s.slot: s.step_before_s for s in survivors if s.step_before_s is not None}
    found = ((slot, pause) for s in sequences for slot, pause in s.pause_s.items())
    return _worst(pause - rounds[slot] for slot, pause in found if slot in rounds)


def figures_of(sample: Sample, ceiling: float | None = None) -> dict[str, float]:
    """The figures of one sample, by name; what it has no value for is absent. `ceiling`: bytes a second."""
    loss, refill = _loss(sample), _refill(sample)
    planned = [] if loss else _of(sample, "join", "retire")
    survivors = sample.survivors
    moved = sum(s.moved["host"].bytes for s in loss)
    copy_s = max((s.copy_s for s in loss), default=0.0)
    boot = ("exchange", "weights", "model")
    columns: dict[str, Values] = {
        "seen_s": [] if sample.seen_s is None else [sample.seen_s],
        "released_s": _phase_end(loss, "release"),
        "parked_s": _phase_end(loss, "park"),
        "covered_s": _phase_end(loss, "cover"),
        "committed_s": _phase_end(loss, "commit"),
        "stepped_s": _worst(v for s in loss for v in s.first_step_s.values()),
        "stepped_beyond_copy_s": _worst(v - copy_s for s in loss for v in s.first_step_s.values() if moved),
        "loss_pause_s": _worst(v for s in loss for v in s.pause_s.values()),
        "capacity_s": [sample.capacity_s] if refill else [],
        "refill_pause_s": _worst(v for s in refill for v in s.pause_s.values()),
        "refill_excess_s": _excess(refill, survivors),
        "refill_gap_s": _worst(s.longest_gap_s for s in survivors if refill and s.longest_gap_s is not None),
        "refill_process_s": _joiner(sample, lambda j: j.boot_s.get("process", 0.0)),
        "refill_device_s": _joiner(sample, lambda j: j.boot_s.get("device", 0.0)),
        "refill_memory_s": _joiner(sample, lambda j: sum(j.boot_s.get(name, 0.0) for name in boot)),
        "refill_load_s": _joiner(sample, lambda j: j.reach_s + j.load_s),
        "refill_capture_s": _joiner(sample, lambda j: j.capture_s),
        "refill_connect_s": [s.phases["connect"][1] for s in refill if "connect" in s.phases][-1:],
        "idle_gap_s": [] if sample.idle_gap_s is None else [sample.idle_gap_s],
        "planned_pause_s": _worst(v for s in planned for v in s.pause_s.values()),
        "planned_excess_s": _excess(planned, survivors),
        "planned_gap_s": _worst(s.longest_gap_s for s in survivors if planned and s.longest_gap_s is not None),
        "grow_s": [sample.capacity_s] if sample.what == "grow" else [],
        "shrink_s": [sample.capacity_s] if sample.what == "shrink" else [],
        "copied_bytes": [moved / len(survivors)] if moved and survivors else [],
        "copy_s": [copy_s] if moved else [],
        "copy_bytes_per_s": [moved / len(survivors) / copy_s] if moved and copy_s and survivors else [],
        "step_before_s": _worst(s.step_before_s for s in survivors if refill and s.step_before_s is not None),
        "step_after_s": _worst(s.step_after_s for s in survivors if refill and s.step_after_s is not None),
        "step_change_percent": _worst(
            100 * (s.step_after_s / s.step_before_s - 1)
            for s in survivors
            if refill and s.step_after_s and s.step_before_s
        ),
    }
    if ceiling and columns["copy_bytes_per_s"]:
        columns["copy_over_ceiling_percent"] = [100 * columns["copy_bytes_per_s"][0] / ceiling]
    return {name: values[0] for name, values in columns.items() if values}


# --- a part, and all of them ----------------------------------------------------------------------------------------


def summary(part: Part, ceiling: float | None = None) -> dict[str, Spread]:
    """Every figure over the samples of a part, in the order of WORDS."""
    rows = [figures_of(sample, ceiling) for sample in part.samples]
    columns = {name: [row[name] for row in rows if name in row] for name in WORDS}
    return {name: spread(values) for name, values in columns.items() if values}


def _part(results: Results, name: str) -> Part | None:
    return next((p for p in results.parts if p.name == name), None)


def ceiling_of(results: Results) -> float | None:
    part = _part(results, "copy")
    value = part.figures.get("ceiling_bytes_per_s") if part else None
    return float(value) if value else None


def ratios(results: Results) -> dict[str, float]:
    """What capturing again costs, in commit pauses and in longest gaps of a planned change of a group that captures the same
    sizes (medians)."""
    part, scale = _part(results, "recapture"), _part(results, "scale")
    again = (part.figures.get("narrow") or {}).get("recapture_s") if part else None
    if not again or scale is None:
        return {}
    found, over = {"recapture_s": quantile(again, 0.5)}, summary(scale)
    for figure, name in (
        ("planned_pause_s", "recapture_over_commit_pause"),
        ("planned_gap_s", "recapture_over_longest_gap"),
    ):
        if figure in over and over[figure].p50 > 0:
            found[name] = found["recapture_s"] / over[figure].p50
    return found


@dataclass(frozen=True)
class Verdict:
    target: Target
    value: float | None
    """None: not measured."""

    @property
    def word(self) -> str:
        if self.value is None:
            return "not measured"
        ok = self.value >= self.target.limit if self.target.at_least else self.value <= self.target.limit
        return "met" if ok else "missed"


def verdicts(results: Results) -> list[Verdict]:
    ceiling, single = ceiling_of(results), ratios(results)
    found = []
    for target in TARGETS:
        part, value = _part(results, target.part), None
        if target.statistic == "value":
            value = single.get(target.figure)
        elif part is not None and (row := summary(part, ceiling).get(target.figure)) is not None:
            value = getattr(row, target.statistic)
        found.append(Verdict(target, value))
    return found


@dataclass(frozen=True)
class Soundness:
    """What must hold whatever the times are, over all samples of a part."""

    captures: int
    """Graphs that survivors captured during the operations."""
    address_changes: int
    answers: int
    wrong: int
    spares_used: int
    joiners: int


def soundness(part: Part) -> Soundness:
    survivors = [s for sample in part.samples for s in sample.survivors]
    joiners = [j for sample in part.samples for s in sample.sequences for j in s.joiners.values()]
    return Soundness(
        captures=sum(s.captures[1] - s.captures[0] for s in survivors),
        address_changes=sum(s.address_changes[1] - s.address_changes[0] for s in survivors),
        answers=sum(sample.answers for sample in part.samples),
        wrong=sum(len(sample.wrong) for sample in part.samples),
        spares_used=sum(j.spare for j in joiners),
        joiners=len(joiners),
    )


def problems(results: Results) -> list[str]:
    """What makes the run a failure: parts that ended early, wrong tokens, captures, moved addresses."""
    found = [f"{p.name}: {p.error}" for p in results.parts if p.error]
    for part in results.parts:
        sound = soundness(part)
        if sound.wrong:
            found.append(f"{part.name}: {sound.wrong} of {sound.answers} answers differ or did not complete")
        if sound.captures or sound.address_changes:
            found.append(
                f"{part.name}: survivors captured {sound.captures} graphs and saw {sound.address_changes} addresses change"
            )
    return found


# --- Markdown -------------------------------------------------------------------------------------------------------


def number(value: float, unit: str) -> str:
    """Three digits that a reader can compare: seconds as ms below 1 s, bytes as MB, rates as GB/s."""
    if unit == "s":
        return (
            f"{value:.2f} s"
            if abs(value) >= 1
            else f"{1e3 * value:.2f} ms"
            if abs(value) < 0.1
            else f"{1e3 * value:.0f} ms"
        )
    if unit == "bytes":
        return f"{value / 1e6:.1f} MB"
    if unit == "bytes/s":
        return f"{value / 1e9:.1f} GB/s"
    return f"{value:.1f} {unit}"


def unit_of(figure: str) -> str:
    if figure.endswith("bytes_per_s"):
        return "bytes/s"
    if figure.endswith("percent"):
        return "%"
    return "bytes" if figure.endswith("bytes") else "s"


def markdown(results: Results) -> str:
    lines = _head(results)
    lines += _targets(results)
    lines += _soundness(results)
    ceiling = ceiling_of(results)
    for part in results.parts:
        lines += [f"## {part.title} (`{part.name}`)", ""]
        if part.config:
            lines += [", ".join(f"{k} {v}" for k, v in part.config.items()) + ".", ""]
        if part.error:
            lines += [f"Ended early: {part.error}", ""]
        rows = summary(part, ceiling)
        if rows:
            lines += [f"| {_count(part)} | n | p50 | p95 | max |", "|---|---|---|---|---|"]
            for name, row in rows.items():
                values = " | ".join(number(v, unit_of(name)) for v in (row.p50, row.p95, row.max))
                lines.append(f"| {WORDS[name]} | {row.n} | {values} |")
            lines.append("")
        lines += breakdown.markdown(part)
        lines += _extras(part, results)
    return "\n".join(lines).rstrip() + "\n"


def _count(part: Part) -> str:
    """How many samples there are, and how many there should be where some are missing."""
    wanted = {"scale": 2 * part.wanted, "logits": 1}.get(part.name, part.wanted)
    found = len(part.samples)
    return f"{found} of {wanted} samples" if found < wanted else "1 sample" if found == 1 else f"{found} samples"


def _head(results: Results) -> list[str]:
    machine = results.machine
    versions = ", ".join(f"{k} {v}" for k, v in results.versions.items())
    made = ", ".join(f"{k} {v:.1f} s" for k, v in results.checkpoints_s.items())
    lines = ["# Healing on GPUs, measured" if not results.cpu else "# The harness on a CPU: no figure of a GPU", ""]
    lines += [
        f"{'; '.join(results.gpus) or 'no GPU'}; {machine.cpu}, {machine.cores} cores, {machine.memory_gb:g} GB, kernel "
        f"{machine.kernel}; {versions}. Begun {results.began}, seed {results.seed}, {results.took_s:.0f} s in all. "
        f"Checkpoints made in {made or 'no time'}.",
        "",
    ]
    return lines


def _targets(results: Results) -> list[str]:
    if results.cpu:
        return ["The targets are of GPUs, so nothing here is rated.", ""]
    lines = ["## Targets", "", "| Part | Figure | Target | Measured | |", "|---|---|---|---|---|"]
    for verdict in verdicts(results):
        t = verdict.target
        what = WORDS.get(t.figure, t.figure.replace("_", " "))
        sign = "at least" if t.at_least else "at most"
        value = "-" if verdict.value is None else number(verdict.value, t.unit)
        statistic = "" if t.statistic == "value" else f", {t.statistic}"
        lines.append(f"| {t.part} | {what}{statistic} | {sign} {number(t.limit, t.unit)} | {value} | {verdict.word} |")
    return [*lines, ""]


def _soundness(results: Results) -> list[str]:
    lines = ["## What must hold", ""]
    lines += [
        "| Part | captures on survivors | address changes | tokens equal | spares used |",
        "|---|---|---|---|---|",
    ]
    for part in results.parts:
        if part.samples:
            s = soundness(part)
            equal = "no client" if not s.answers else f"{s.answers - s.wrong} of {s.answers} answers"
            lines.append(
                f"| {part.name} | {s.captures} | {s.address_changes} | {equal} | {s.spares_used} of {s.joiners} |"
            )
    return [*lines, ""]


def _extras(part: Part, results: Results) -> list[str]:
    """Figures that are no samples."""
    figures, lines = part.figures, []
    if "ceiling_bytes_per_s" in figures:
        lines.append(f"{figures['bytes']} bytes at a time: best {number(figures['ceiling_bytes_per_s'], 'bytes/s')}.")
    if part.name == "recapture":
        for name, found in figures.items():
            again, sizes = found["recapture_s"], len(found["sizes"])
            lines.append(
                f"* {name}: {sizes} sizes, first {number(found['first_s'], 's')}, again "
                + ", ".join(number(v, "s") for v in again)
            )
        lines += [
            f"* {name.replace('_', ' ')}: {value:.1f}" for name, value in ratios(results).items() if "over" in name
        ]
    for name in ("round_s", "step_s"):
        if name in figures:
            f = figures[name]
            what = "from step to step" if name == "round_s" else "the step itself"
            lines.append(
                f"* {what}: {number(f['without_agent_s'], 's')} without the agent, {number(f['with_agent_s'], 's')} with it; "
                f"overhead {f['overhead_percent']:+.2f} % (noise {f['noise_percent']:.2f} %)"
            )
    if notices := figures.get("notices_s"):
        lines += ["| witness | n | p50 | p95 | max |", "|---|---|---|---|---|"]
        for name in sorted({w for n in notices for w in n}):
            row = spread([n[name] for n in notices if name in n])
            lines.append(
                f"| {name} | {row.n} | " + " | ".join(number(v, "s") for v in (row.p50, row.p95, row.max)) + " |"
            )
    for name in ("same_ranks_again", "alone_after_the_loss", "after_the_refill"):
        if name in figures:
            f = figures[name]
            lines.append(
                f"* {name.replace('_', ' ')}: logits differ by at most {f['max_abs']:.3g} (relative {f['max_rel']:.3g}; their "
                f"deviation is {figures['logits_std']:.3g}), tokens {'equal' if f['tokens_equal'] else 'DIFFER'}"
            )
    lines += [f"* note: {note}" for note in figures.get("notes", ())]
    return [*lines, ""] if lines else []
