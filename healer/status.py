"""What `/status` answers and `healer status` shows."""

from collections.abc import Collection
from typing import Literal

import msgspec

from elastic.controller.records import GroupStatus
from healer.casebook import OpenIncident
from healer.diagnosis import Health, Verdict

DaemonState = Literal["starting", "ok", "degraded", "stopping"]
"""degraded: an incident is open, a rank is not known to be healthy, the group is not at its target, or the journal cannot
be written."""


class SensorStatus(msgspec.Struct, frozen=True):
    name: str
    age_s: float
    """Since its last reading that worked."""


class JournalStatus(msgspec.Struct, frozen=True):
    path: str
    entries: int
    error: str
    """Why it cannot be written now; empty when it can."""
    set_aside: str
    """Where a damaged predecessor lies; empty when there was none."""


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    state: DaemonState
    why: str
    """What keeps it from "ok"; empty there."""
    version: str
    pid: int
    policy: str
    dry_run: bool
    uptime_s: float
    loop_age_s: float
    """Since the supervisor's loop last went round."""
    started: str
    """What was found and done at the start; empty until then."""
    serving: str
    """URL of the gateway; empty while unknown."""
    incident: OpenIncident | None
    decision: str
    """The newest decision's sentence."""
    group: GroupStatus
    verdicts: tuple[Verdict, ...]
    sensors: tuple[SensorStatus, ...]
    journal: JournalStatus


def unheld(group: GroupStatus) -> list[int]:
    """Live slots without a process: nobody was allowed to go on without them."""
    return [s.slot for s in group.slots if s.state == "live" and s.member is None]


def trouble(group: GroupStatus, verdicts: Collection[Verdict], incident: str, journal_error: str) -> str:
    """What keeps a started daemon from "ok"; empty when nothing does."""
    problems = [f"incident {incident} is open"] if incident else []
    if tuple(group.live) != tuple(group.target):
        problems.append(f"{len(group.live)} of {len(group.target)} ranks are live")
    if group.uncovered:
        problems.append(f"{group.uncovered} experts have no live copy")
    problems += [f"slot {slot} is in the view, but no process holds it" for slot in unheld(group)]
    if group.gateway:
        problems.append(group.gateway)
    problems += [v.sentence for v in verdicts if v.health != Health.HEALTHY]
    if journal_error:
        problems.append(f"the journal cannot be written: {journal_error}")
    return "; ".join(problems)
