"""The report as one HTML page that needs nothing else: styles and plots are in it. Needs jinja2 and matplotlib."""

import datetime
from collections.abc import Sequence
from pathlib import Path

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from chaos.records import Request
from chaos.report import plots
from chaos.report.figures import DOWN_S
from chaos.report.source import RunData, Source
from chaos.report.summary import Report

SAID = {
    "detect": "fault until it was seen",
    "begin": "decided, written down, ordered",
    "park": "survivors released, standing at one boundary, orphans covered",
    "commit": "new map taken over in place",
    "resume": "until every survivor had a step",
    "pause": "pause of a survivor",
    "coverage": "fault until all serve again",
    "capacity": "fault until full size",
    "silence": "longest wait of a client",
}
SHOWN_REQUESTS = 32
AROUND_S = (1.5, 4.5)
"""Before and after the fault that swim lanes and requests are shown for."""


def write(source: Source, report: Report, out: Path) -> None:
    """`out` and, beside it, the same figures as ``.json``. Raises OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(source, report))
    out.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def page(source: Source, report: Report) -> str:
    environment = Environment(
        loader=PackageLoader("chaos.report", "."),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"s": seconds, "day": day, "percent": percent}
    closer = _closer_look(source.runs)
    return environment.get_template("page.html").render(
        r=report,
        down_s=DOWN_S,
        said=SAID,
        phases=Markup(plots.phases(report.recoveries)) if report.recoveries else "",
        distribution=Markup(plots.distribution(report.recoveries, report.restart.p50 if report.restart else None))
        if report.recoveries
        else "",
        curves=[(curve, Markup(plots.curve(curve))) for curve in report.curves],
        closer=[(data.run, Markup(lanes), Markup(gantt)) for data, lanes, gantt in closer],
        states=sorted({cell.state for cell in report.matrix}, key=lambda state: (state != "steady", state)),
        kinds=sorted({cell.kind for cell in report.matrix}),
        cells={(cell.kind, cell.state): cell for cell in report.matrix},
        details=source.runs if len(source.runs) <= 100 else [d for d in source.runs if d.run.verdict != "passed"],
    )


def _closer_look(runs: Sequence[RunData]) -> list[tuple[RunData, str, str]]:
    """The fault with the longest wait of a client, and those of runs that failed: at most three runs."""
    chosen = sorted(
        (data for data in runs if any(fault.at for fault in data.faults) and data.requests),
        key=lambda data: (data.run.verdict == "passed", -data.run.ledger.longest_gap_s),
    )
    found = []
    for data in chosen[:3]:
        moments = [fault.at for fault in data.faults if fault.at]
        worst = max(moments, key=lambda at: _longest_wait(data.requests, at))
        begin, end = worst - AROUND_S[0], worst + AROUND_S[1]
        open_then = [r for r in data.requests if r.sent_at and r.sent_at < end and r.ended_at > begin]
        # those that the fault may have hurt come first
        open_then.sort(key=lambda r: (not r.sent_at <= worst <= r.ended_at, r.outcome == "right", r.n))
        shown = sorted(open_then[:SHOWN_REQUESTS], key=lambda r: r.sent_at)
        found.append((data, plots.swim_lanes(data, begin, end), plots.gantt(data, shown, begin, end)))
    return found


def _longest_wait(requests: Sequence[Request], at: float) -> float:
    waits = [0.0]
    for request in requests:
        if request.sent_at <= at <= request.ended_at:
            before = max((t for t in request.times if t <= at), default=request.sent_at)
            after = min((t for t in request.times if t > at), default=request.ended_at)
            waits.append(after - before)
    return max(waits)


def seconds(value: float | None) -> str:
    """In the unit that one would say it in."""
    if value is None:
        return "-"
    if value < 0.0995:
        return f"{value * 1000:.1f} ms"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 120 else f"{value / 60:.1f} min"


def percent(value: float) -> str:
    """Never rounded up to a whole."""
    text = f"{100 * value:.3f}"
    return "99.999 %" if value < 1 and text == "100.000" else f"{text.rstrip('0').rstrip('.')} %"


def day(value: float) -> str:
    return datetime.datetime.fromtimestamp(value, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
