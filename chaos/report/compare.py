"""Two reports side by side: what got worse."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from chaos.report.page import percent, seconds
from chaos.report.summary import FORMAT, Report
from elastic.errors import ElasticError

Judgement = Literal["worse", "better", "same", "changed"]


class Row(msgspec.Struct, frozen=True):
    name: str
    before: str
    after: str
    judgement: Judgement


def load(path: Path) -> Report:
    """Of a ``report.json``, or of the directory that holds one. Raises ElasticError."""
    path = path / "report.json" if path.is_dir() else path
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.MsgspecError) as error:
        raise ElasticError(f"{path}: {error}, expected what `healer-chaos report` wrote as JSON") from None
    if report.format != FORMAT:
        raise ElasticError(f"{path}: format {report.format}, this version reads {FORMAT}: make the report again")
    return report


def compare(before: Report, after: Report) -> list[Row]:
    """A time is worse or better where the bootstrap intervals of the medians, or of the p95, do not meet; a count at once."""
    return [*_counts(before, after), *_runs(before, after), *_times(before, after)]


def _counts(before: Report, after: Report) -> Iterator[Row]:
    def broken(report: Report) -> int:
        return report.requests - report.outcomes.get("right", 0)

    for name, old, new in (
        ("requests not right", broken(before), broken(after)),
        ("healthy ranks removed", len(before.unneeded_removals), len(after.unneeded_removals)),
        ("graphs captured anew", before.survivors.recaptured, after.survivors.recaptured),
        ("tensors moved", before.survivors.moved, after.survivors.moved),
    ):
        yield Row(name, str(old), str(new), "same" if old == new else "worse" if new > old else "better")
    old_share, new_share = before.availability.share, after.availability.share
    changed = abs(new_share - old_share) > 0.001
    judgement: Judgement = "same" if not changed else "worse" if new_share < old_share else "better"
    yield Row("availability", percent(old_share), percent(new_share), judgement)


def _runs(before: Report, after: Report) -> Iterator[Row]:
    old = {run.name: run.verdict for run in before.runs}
    new = {run.name: run.verdict for run in after.runs}
    for name in sorted(old.keys() | new.keys()):
        was, is_ = old.get(name, "not run"), new.get(name, "not run")
        if was != is_:
            worse = is_ in ("failed", "error")
            better = is_ == "passed" and was in ("failed", "error")
            yield Row(name, was, is_, "worse" if worse else "better" if better else "changed")


def _times(before: Report, after: Report) -> Iterator[Row]:
    for name, old in before.times.items():
        new = after.times.get(name)
        if new is None:
            continue
        for quantile in ("p50", "p95"):
            low_old, high_old = getattr(old, f"{quantile}_low"), getattr(old, f"{quantile}_high")
            low_new, high_new = getattr(new, f"{quantile}_low"), getattr(new, f"{quantile}_high")
            judgement: Judgement = "worse" if low_new > high_old else "better" if high_new < low_old else "same"
            yield Row(f"{name} {quantile}", seconds(getattr(old, quantile)), seconds(getattr(new, quantile)), judgement)


def show(rows: list[Row], out: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("FIGURE", "BEFORE", "AFTER", ""):
        table.add_column(heading, justify="right" if heading in ("BEFORE", "AFTER") else "left")
    colours = {"worse": "red", "better": "green", "same": "dim", "changed": "yellow"}
    for row in rows:
        table.add_row(row.name, row.before, row.after, f"[{colours[row.judgement]}]{row.judgement}[/]")
    out.print(table)
