"""Invariant 10 by the daemon's journal, held against what the executor and the ranks said."""

from collections.abc import Iterator
from itertools import pairwise

from chaos.invariants.violation import Violation
from chaos.records import JournalEntry, ReportEvent
from chaos.report.source import RunData

AT_ONCE_S = 1.0
"""The daemon stands at the end of the sequence until it is killed; what it had time to write it must have written."""


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
    """Each sequence that ended is in the journal, by kind and the moment of its cause; but for one at whose end the daemon was
    killed, before it could write."""
    written = {
        (report["kind"], round(float(report["began"]), 3))
        for entry in entries
        if entry.kind == "outcome" and isinstance(report := entry.body.get("report"), dict)
    }
    last = {line.daemon_pid: line.report for line in data.sequences if isinstance(line, ReportEvent)}
    cut_off = [
        last[fault.daemon_pid]
        for fault in data.faults
        if fault.kind == "daemon-kill" and fault.state.step == "ended" and fault.daemon_pid in last
        if fault.at - last[fault.daemon_pid].ended < AT_ONCE_S
    ]
    for report in data.reports:
        if (report.kind, round(report.began, 3)) not in written and report not in cut_off:
            where = f"{report.kind}, at {report.began:.3f}"
            yield Violation(10, where, f"ended as {report.outcome} and is not in the journal")
