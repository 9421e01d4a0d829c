"""The records of a closed loop, and what is written of them: a table, Markdown, a plot."""

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from chaos.machine import Machine


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """One request."""

    at_s: float
    part: str
    """The stretch of the run that it began in."""
    ttft_s: float
    """From the call to the first token."""


class Moment(msgspec.Struct, frozen=True, array_like=True):
    at_s: float
    clients: int
    target: int
    live: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p95_by_part_s: dict[str, float]
    rank_seconds: float
    """Live ranks, summed over the run."""
    smallest: int
    largest: int
    last: int
    """Target sizes."""
    changes: int
    reversals: int
    """Changes of size in the other direction than the one before, over the whole run."""
    reversals_by_peak: dict[str, int]
    """See `chaos.closed_loop.reversals_by_peak`."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    summary: Summary
    asked: tuple[Asked, ...]
    moments: tuple[Moment, ...]
    problems: tuple[str, ...]


class Loop(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    versions: dict[str, str]
    began: str
    load_after: tuple[float, float, float]
    pace: float
    config: dict[str, int]
    rules: dict[str, Any]
    problems: tuple[str, ...]
    runs: tuple[Run, ...]


_HEAD = ("Run", "Requests", "TTFT p50", "TTFT p95", "Rank-seconds", "Sizes", "Changes", "Reversals by peak")


def _rows(loop: Loop) -> list[tuple[str, ...]]:
    return [
        (
            run.name,
            str(s.requests),
            f"{s.ttft_p50_s * 1000:.0f} ms",
            f"{s.ttft_p95_s * 1000:.0f} ms",
            f"{s.rank_seconds:.0f}",
            f"{s.smallest} to {s.largest}",
            str(s.changes),
            ", ".join(f"{peak} {times}" for peak, times in s.reversals_by_peak.items()),
        )
        for run in loop.runs
        for s in [run.summary]
    ]


def show(loop: Loop, out: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in _HEAD:
        table.add_column(name.upper(), justify="left" if name == "Run" else "right")
    for row in _rows(loop):
        table.add_row(*row)
    out.print(table)
    for problem in loop.problems:
        out.print(f"problem: {problem}", markup=False)


def write_markdown(loop: Loop, out: Path) -> None:
    lines = [
        "# Load rules in a closed loop",
        "",
        "<!-- written by `make bench-autoscale`; do not edit -->",
        "",
        f"Clients drive a group on one host through a ramp, a spike, a day and a stop ({out.stem}.svg). Each rank holds "
        f"{loop.config['max_seqs']} sequences; a request asks for {loop.config['tokens']} tokens. A client asks again as "
        "soon as it is answered.",
        "",
        "| " + " | ".join(_HEAD) + " |",
        "|---|" + "---:|" * (len(_HEAD) - 1),
        *("| " + " | ".join(row) + " |" for row in _rows(loop)),
        "",
        "A reversal is a turn of the size from growing to shrinking: each peak of the load that the size follows has one. A turn "
        "that comes late falls into the next peak's time; more turns than peaks so far are flapping, and a problem.",
        "",
        "95th percentile of the time to the first token, by part of the run:",
        "",
        "| Part | " + " | ".join(run.name for run in loop.runs) + " |",
        "|---|" + "---:|" * len(loop.runs),
    ]
    for part in loop.runs[0].summary.ttft_p95_by_part_s:
        cells = (run.summary.ttft_p95_by_part_s.get(part) for run in loop.runs)
        lines.append(f"| {part} | " + " | ".join("-" if c is None else f"{c * 1000:.0f} ms" for c in cells) + " |")
    machine, load = loop.machine, ", ".join(f"{v:.1f}" for v in loop.load_after)
    lines += [
        "",
        f"{machine.cores} cores ({machine.cpu}), kernel {machine.kernel}, Python {loop.versions['python']}, torch "
        f"{loop.versions.get('torch', '-')}; begun {loop.began}, load of the machine before {machine.load[0]:.1f}, "
        f"after {load}. More ranks than cores share the cores: what more ranks give here is room for more sequences, "
        "not more arithmetic.",
        "",
        "Problems: "
        + ("; ".join(loop.problems) or "none; every answer had the tokens of the first to the same prompt."),
    ]
    out.write_text("\n".join(lines) + "\n")


def plot(loop: Loop, out: Path) -> None:
    """Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    sizes, first = figure.subplots(2, 1, sharex=True)
    for run in loop.runs:
        sizes.step([m.at_s for m in run.moments], [m.live for m in run.moments], where="post", label=run.name)
        first.plot(
            [a.at_s for a in run.asked],
            [a.ttft_s * 1000 for a in run.asked],
            ".",
            markersize=2,
            label=run.name,
            rasterized=True,
        )
    clients = sizes.twinx()
    clients.plot(
        [m.at_s for m in loop.runs[0].moments], [m.clients for m in loop.runs[0].moments], color="grey", linewidth=0.8
    )
    clients.set_ylabel("clients (grey)")
    sizes.set_ylabel("live ranks")
    sizes.set_ylim(bottom=0)
    sizes.legend(fontsize="small", loc="upper left")
    first.set_yscale("log")
    first.set_ylabel("time to the first token, ms")
    first.set_xlabel("seconds")
    figure.savefig(out, format="svg", metadata={"Date": None})
