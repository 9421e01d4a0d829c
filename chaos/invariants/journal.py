"""Invariant 10 by the daemon's journal, held against what the executor and the ranks said."""

from collections.abc import Iterator
from itertools import pairwise

from chaos.invariants.violation import Violation
from chaos.records import JournalEntry
from chaos.report.source import RunData


def check(data: RunData) -> Iterator[Violation]:
    entries = sorted((*data.evidence(), *data.decisions()), key=lambda entry: entry.seq)
    if not entries:
        return
    for one, other in pairwise(entries):
        if other.seq != one.seq + 1:
            yield Violation(
                10,
                "journal",
                f"entries {one.seq + 1} to {other.seq - 1} are missing between {one.kind} and {other.kind}",
            )
        if other.seq == one.seq:
            yield Violation(10, "journal", f"entry {one.seq} is there twice")
    yield from _outcomes(data, entries)


def _outcomes(data: RunData, entries: list[JournalEntry]) -> Iterator[Violation]:
    """Each sequence that ended is in the journal, by kind and the moment of its cause."""
    written = {
        (report["kind"], round(float(report["began"]), 3))
        for entry in entries
        if entry.kind == "outcome" and isinstance(report := entry.body.get("report"), dict)
    }
    for report in data.reports:
        if (report.kind, round(report.began, 3)) not in written:
            where = f"{report.kind}, at {report.began:.3f}"
            yield Violation(10, where, f"ended as {report.outcome} and is not in the journal")
