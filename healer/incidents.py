"""Incidents: from the detection of a fault to the moment when the group again is what it should be. Folded from entries."""

from collections.abc import Iterable
from typing import Any

import msgspec

from healer.journal import Entry, Kind

OPENED, REFINED, CLOSED = "incident-opened", "incident-refined", "incident-closed"


class IncidentSummary(msgspec.Struct, kw_only=True):
    id: str
    opened_wall: float
    closed_wall: float | None = None
    """None while it is open."""
    causes: tuple[str, ...] = ()
    """The root first, once it is known."""
    slots: tuple[int, ...] = ()
    outcome: str = "open"
    """"healed", "reduced" (smaller than before), or "open"."""
    pause_s: float | None = None
    """Longest gap between two committed steps on a survivor; None while the group was idle or the loss is not over."""
    coverage_s: float | None = None
    """From detection to the commit that covers every expert again."""
    capacity_s: float | None = None
    """From detection to full size."""
    moved_bytes: dict[str, int] = {}
    """By source: peer, host, disk."""
    sentence: str = ""


def summarise(entries: Iterable[Entry]) -> list[IncidentSummary]:
    """One summary an incident, oldest first. `entries` by sequence."""
    found: dict[str, IncidentSummary] = {}
    for entry in entries:
        if not entry.incident:
            continue
        incident = found.get(entry.incident)
        if incident is None:
            incident = found[entry.incident] = IncidentSummary(id=entry.incident, opened_wall=entry.wall)
        body = entry.body
        if entry.kind == Kind.VERDICT and body["verdict"]["health"] == "unhealthy":
            subject = body["verdict"]["subject"]
            if subject["kind"] == "rank":
                # the same rank judged again, with more evidence: the later word is the root
                again = subject["slot"] in incident.slots and incident.outcome == "open"
                incident.causes = (_rooted if again else _union)(incident.causes, body["verdict"]["cause"])
                incident.slots = tuple(sorted({*incident.slots, subject["slot"]}))
        elif entry.kind == Kind.DECISION and (body["step"] != "none" or body["reason"] == "executor"):
            incident.sentence = body["sentence"]
            if body["reason"] == "executor":
                incident.causes = _union(incident.causes, body["cause"])
                incident.slots = tuple(sorted({*incident.slots, *body["slots"]}))
        elif entry.kind == Kind.OUTCOME and "report" in body:
            _add_report(incident, body["report"])
        elif entry.kind == Kind.LIFECYCLE and body["event"] == OPENED:
            incident.causes = _union(incident.causes, body["cause"])
            incident.slots = tuple(sorted({*incident.slots, *body["slots"]}))
        elif entry.kind == Kind.LIFECYCLE and body["event"] == REFINED:
            incident.causes = _rooted(incident.causes, body["cause"])
        elif entry.kind == Kind.LIFECYCLE and body["event"] == CLOSED:
            incident.closed_wall = entry.wall
            incident.outcome, incident.capacity_s = body["outcome"], body["open_s"]
    return list(found.values())


def _union(known: tuple[str, ...], more: str) -> tuple[str, ...]:
    return known if more in known else (*known, more)


def _rooted(known: tuple[str, ...], root: str) -> tuple[str, ...]:
    return (root, *(cause for cause in known if cause != root))


def _add_report(incident: IncidentSummary, report: dict[str, Any]) -> None:
    if report["kind"] == "loss" and report["outcome"] == "committed":
        incident.coverage_s = max(incident.coverage_s or 0.0, report["ended"] - report["began"])
    if report["pause_s"]:
        incident.pause_s = max(incident.pause_s or 0.0, *report["pause_s"].values())
    for loaded in report["loaded"].values():
        for source in ("peer", "host", "disk"):
            moved = loaded[source]["bytes"]
            incident.moved_bytes[source] = incident.moved_bytes.get(source, 0) + moved
