"""Plots of a report as SVG text, to be put into a page. Needs matplotlib."""

import io
from collections.abc import Callable, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chaos.records import Request
from chaos.report.figures import STATES, Curve, Recovery
from chaos.report.source import RunData
from chaos.report.summary import values

COLOURS = {
    "detect": "#d1495b",
    "begin": "#8d96a3",
    "park": "#edae49",
    "commit": "#00798c",
    "resume": "#66a182",
    "load": "#5b6c9d",
    "connect": "#9d6b9e",
    "vacate": "#b08968",
    "move": "#b08968",
    "handover": "#8d96a3",
}
FAULT, TOKEN, LINE = "#d1495b", "#00798c", "#2e4057"
SHORTEST_S = 1e-5
"""What took less is not drawn."""
SEQUENCES = {"loss": "#d1495b", "join": "#00798c", "retire": "#edae49", "form": "#8d96a3"}


def svg(name: str, draw: Callable[[Axes], None], size: tuple[float, float]) -> str:
    """`draw` fills the axes; `size` in inches. `name` keeps the ids of several plots of one page apart."""
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _share_below(axes: Axes, seconds: Sequence[float], name: str, colour: str) -> None:
    if seconds:
        share = [(i + 1) / len(seconds) for i in range(len(seconds))]
        axes.step(sorted(seconds), share, where="post", color=colour, label=f"{name} ({len(seconds)})")


def _of_shares(axes: Axes, x: str, y: str) -> None:
    axes.set_xscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(0, 1.02)
    axes.legend(loc="lower right", frameon=False)
    axes.grid(alpha=0.25)


def phases(recoveries: Sequence[Recovery]) -> str:
    """Share of the recoveries in which a phase had ended after so long, on a logarithmic axis."""

    def draw(axes: Axes) -> None:
        for name in STATES:
            took = [t for r in recoveries if (t := r.phases_s.get(name, 0.0)) > SHORTEST_S]
            _share_below(axes, took, name, COLOURS[name])
        _of_shares(axes, "seconds that it took", "share of repairs")

    return svg("phases", draw, (8, 3.2))


def distribution(recoveries: Sequence[Recovery], restart_s: float | None) -> str:
    """Share of the recoveries done by a time, on a logarithmic axis, with the restart beside it."""

    def draw(axes: Axes) -> None:
        for name, colour in (("pause", "#66a182"), ("coverage", "#00798c"), ("capacity", "#5b6c9d")):
            _share_below(axes, values(recoveries, name), name, colour)
        if restart_s:
            axes.axvline(restart_s, color=FAULT, linestyle="--", label="restart of the group")
        _of_shares(axes, "seconds since the fault", "share of faults")

    return svg("distribution", draw, (8, 3.2))


def curve(found: Curve) -> str:
    def draw(axes: Axes) -> None:
        x = [found.from_s + (i + 0.5) * found.bin_s for i in range(len(found.mean))]
        axes.fill_between(x, found.low, found.high, color=TOKEN, alpha=0.18, linewidth=0)
        axes.plot(x, found.mean, color=TOKEN, linewidth=1.4)
        axes.axvline(0, color=FAULT, linewidth=1)
        axes.axhline(found.before, color=LINE, linewidth=0.7, linestyle=":")
        axes.set_ylim(bottom=0)
        axes.set_xlim(x[0], x[-1])
        axes.set_xlabel("seconds since the fault")
        axes.set_ylabel("tokens/s")

    return svg(f"curve-{found.kind}", draw, (5.2, 2.2))


def swim_lanes(data: RunData, begin: float, end: float) -> str:
    """Ranks by slot, the executor's sequences and faults on one axis of time, in seconds of the run."""
    zero = data.run.began
    slots = sorted({life.slot for life in data.lives}, reverse=True)
    lanes = {slot: number + 1 for number, slot in enumerate(slots)}

    def draw(axes: Axes) -> None:
        for life in data.lives:
            lane = lanes[life.slot]
            axes.plot([life.began - zero, life.ended - zero], [lane, lane], color="#c9ced6", linewidth=9)
            spans = [(a - zero, max(b - a, 0.002)) for a, b in life.serving if b > begin and a < end]
            axes.broken_barh(spans, (lane - 0.22, 0.44), color=TOKEN)
            if begin < life.began < end:
                axes.text(life.began - zero, lane + 0.27, f".{life.incarnation}", fontsize=7, color=LINE)
        for report in data.reports:
            axes.broken_barh(
                [(report.began - zero, report.ended - report.began)], (-0.3, 0.6), color=SEQUENCES[report.kind]
            )
            if begin < report.began < end:
                axes.text(report.began - zero, 0.36, report.kind, fontsize=7, color=LINE)
        axes.set_xlim(begin - zero, end - zero)
        _faults(axes, data, zero, len(slots) + 0.75)
        axes.set_yticks([0, *lanes.values()], ["sequence", *(f"slot {slot}" for slot in lanes)])
        axes.set_ylim(-0.6, len(slots) + 1.1)
        axes.set_xlabel("seconds of the run")

    return svg(f"lanes-{data.run.id}", draw, (9, 1.2 + 0.5 * len(slots)))


def gantt(data: RunData, requests: Sequence[Request], begin: float, end: float) -> str:
    """Each request a line from its sending to its end, a mark for each token."""
    zero = data.run.began

    def draw(axes: Axes) -> None:
        for row, request in enumerate(requests):
            right = request.outcome == "right"
            axes.plot(
                [request.sent_at - zero, request.ended_at - zero],
                [row, row],
                color="#c9ced6" if right else FAULT,
                linewidth=1.2,
                zorder=1,
            )
            axes.plot([t - zero for t in request.times], [row] * len(request.times), ".", color=TOKEN, markersize=2.6)
        axes.set_xlim(begin - zero, end - zero)
        _faults(axes, data, zero, len(requests))
        axes.set_yticks(range(len(requests)), [str(request.n) for request in requests], fontsize=7)
        axes.set_ylim(-1, len(requests) + 1.2)
        axes.set_ylabel("request")
        axes.set_xlabel("seconds of the run")

    return svg(f"gantt-{data.run.id}", draw, (9, 1.2 + 0.17 * len(requests)))


def _faults(axes: Axes, data: RunData, zero: float, height: float) -> None:
    begin, end = axes.get_xlim()
    shown = [fault for fault in data.faults if fault.at and begin <= fault.at - zero <= end]
    for number, fault in enumerate(shown):
        axes.axvline(fault.at - zero, color=FAULT, linewidth=0.9)
        where = ",".join(str(member.slot) for member in fault.members)
        # neighbours in time keep their words apart
        at = height - 0.05 * height * (number % 3)
        axes.text(fault.at - zero, at, f" {fault.kind} {where}", fontsize=7, color=FAULT, clip_on=True)
