"""Invariants 8 and 9: who was removed, and by what right."""

from collections.abc import Iterator

from chaos.invariants.violation import Violation
from chaos.records import DaemonEvent
from chaos.report.source import RunData

SILENT = "no answer within the commit deadline"


def check(data: RunData) -> Iterator[Violation]:
    """By the faults that were injected, and by what the daemon itself had written down before it acted."""
    wanted = [
        (fault.at, {m.slot for m in fault.members}) for fault in data.faults if fault.must_be_replaced and fault.at
    ]
    condemned = _condemned(data)
    for report in data.reports:
        if report.kind != "loss":
            continue
        called: set[int] = set().union(*(slots for at, slots in wanted if at <= report.ended))
        for slot in set(report.slots) - called:
            where = f"slot {slot}, at {report.began:.3f}"
            yield Violation(9, where, f"removed, though no fault called for it: {report.reason}")
        # the executor's own: a rank that answered no order within several commit deadlines
        silent = _given_up(data, report.ended) if SILENT in report.reason else set()
        for slot in set(report.slots) - silent:
            if not any(s == slot and at <= report.ended for s, at in condemned):
                yield Violation(
                    8, f"slot {slot}, at {report.began:.3f}", "removed without a verdict or a death before it"
                )


def _given_up(data: RunData, until: float) -> set[int]:
    """Slots of which the daemon wrote, before the loss ended, that the executor itself gave them up."""
    return {
        slot
        for entry in data.decisions()
        if entry.kind == "decision" and entry.body.get("reason") == "executor" and entry.monotonic <= until
        for slot in entry.body.get("slots", ())
    }


def _condemned(data: RunData) -> list[tuple[int, float]]:
    """Slots with the moment at which the daemon knew: a death that its executor saw, a verdict, or a daemon that began and
    found the rank missing."""
    found = [
        (line.slot, line.at)
        for line in data.sequences
        if isinstance(line, DaemonEvent) and line.what in ("rank-gone", "boot-failed")
    ]
    for entry in data.evidence():
        verdict = entry.body.get("verdict") if entry.kind == "verdict" else None
        if verdict and verdict.get("health") == "unhealthy":
            subject = verdict.get("subject", {})
            if "slot" in subject:
                found.append((int(subject["slot"]), entry.monotonic))
    adoptions = [line.at for line in data.sequences if isinstance(line, DaemonEvent) and line.what == "began"]
    slots = {member.slot for fault in data.faults for member in fault.members}
    return found + [(slot, at) for at in adoptions for slot in slots]
