"""Two pictures: what the moves buy, and planning time against size. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from elastic.placement.bench.run import Measured
from elastic.placement.bench.tables import Row

mpl.use("svg")
# the same data give the same file
mpl.rcParams["svg.hashsalt"] = "placement"

import matplotlib.pyplot as plt  # noqa: E402


def plot_moves(measured: Sequence[Measured], path: Path) -> None:
    """Balancedness along the steps after a loss, log-normal loads; DeepSeek's replan is one point."""
    figure, axes = plt.subplots(figsize=(8, 5))
    seen: set[tuple[int, int]] = set()
    for m in measured:
        plan = m.ours or m.own_start
        if m.event != "loss" or m.loads != "log-normal" or (m.ranks, m.slots) in seen or not plan.curve:
            continue
        seen.add((m.ranks, m.slots))
        line = axes.plot(*zip(*plan.curve, strict=True), marker=".", label=f"{m.ranks}→{m.ranks - 1} ranks x {m.slots}")
        if m.base is not None:
            mean = sum(m.base.balancedness) / len(m.base.balancedness)
            axes.plot([m.base.moved], [mean], marker="x", markersize=9, color=line[0].get_color())
    axes.set(xscale="log", xlabel="experts moved per layer", ylabel="balancedness, mean over layers")
    axes.set_title("After the loss of one rank: each line starts at full coverage; x is DeepSeek's replan")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")


def plot_times(made: Sequence[Row], path: Path) -> None:
    """Median planning time after a loss against the number of slots, log-normal loads."""
    figure, axes = plt.subplots(figsize=(8, 5))
    for planner in dict.fromkeys(r.planner for r in made):
        of = sorted(
            (r.ranks * r.slots, r.ranks, r.p50_ms)
            for r in made
            if (r.event, r.loads, r.planner) == ("loss", "log-normal", planner)
        )
        if of:
            axes.plot(range(len(of)), [p50 for _, _, p50 in of], marker="o", label=planner)
            axes.set_xticks(range(len(of)), [f"{ranks} ranks\n{slots} slots" for slots, ranks, _ in of])
    axes.set(ylabel="planning time, p50, ms", yscale="log", title="58 layers x 256 experts, one rank lost, one thread")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
