"""Size, load and events of a replay over time, as SVG. Needs matplotlib, which is imported here only."""

from collections.abc import Sequence
from pathlib import Path

from elastic.errors import ElasticError
from healer.policy.replay import Replayed


def plot(replays: Sequence[Replayed], out: Path) -> None:
    """Write one picture of one or several policies on the same recording. Raises ElasticError."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ElasticError("matplotlib is not installed, expected it for a plot: pip install matplotlib") from None
    load = replays[0].load
    figure = Figure(figsize=(10, 3 + 1.6 * len(load)), layout="constrained")
    axes = figure.subplots(1 + len(load), 1, sharex=True, squeeze=False)[:, 0]
    for replay in replays:
        times, sizes = [at for at, _ in replay.sizes], [size for _, size in replay.sizes]
        axes[0].step([*times, replay.span_s], [*sizes, sizes[-1] if sizes else 0], where="post", label=replay.policy)
    events = [row for row in replays[0].rows if row.part == "healing" and row.acts]
    for index, row in enumerate(events):
        label = "healing" if index == 0 else None
        axes[0].axvline(row.at_s, color="tab:red", linewidth=0.8, linestyle=":", label=label)
    axes[0].set_ylabel("ranks")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(loc="upper left", fontsize="small")
    for axis, (name, points) in zip(axes[1:], load.items(), strict=True):
        axis.plot([at for at, _ in points], [value for _, value in points], linewidth=0.8)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("seconds since the begin of the recording")
    try:
        # the same replay gives the same file
        figure.savefig(out, format="svg", metadata={"Date": None})
    except OSError as error:
        raise ElasticError(f"{out}: cannot be written: {error.strerror}") from None
