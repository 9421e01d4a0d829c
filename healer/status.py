"""What `/status` answers and `healer status` shows."""

from collections.abc import Collection
from typing import Literal

import msgspec

from elastic.controller.records import GroupStatus
from healer.casebook import OpenIncident
from healer.diagnosis import Cause, Health, Verdict
from healer.lease.election import Role
from healer.policy.memory import Memory
from healer.policy.schema import Policy
from healer.reload import PolicyStatus
from healer.sensors import SensorStatus
from healer.trace import Placed

DaemonState = Literal["standby", "starting", "ok", "degraded", "stopping"]
"""standby: another daemon holds the lease, and this one watches. degraded: an incident is open, a rank, a GPU in use or the host is not known to be healthy, the group is not at its target,
clients are not served, or the journal cannot be written."""


class JournalStatus(msgspec.Struct, frozen=True):
    path: str
    entries: int
    error: str
    """Why it cannot be written now; empty when it can."""
    set_aside: str
    """Where a damaged predecessor lies; empty when there was none."""
    waiting: int
    """Entries in memory that are not written yet."""
    dropped: int
    """Entries that were given up, since too many waited; the log has their decisions."""


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Who may act on the group."""

    store: str
    name: str
    """This daemon's, in the lease."""
    role: Role
    holder: str
    """Whose name stands in the lease; empty: nobody's."""
    term: int
    """Under which this daemon acts, or last acted; 0: it never did."""
    error: str
    """Why the store could not be read or written the last time; empty: it could."""


class HealingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What holds healing back, and what it keeps empty."""

    paused: str
    """By whom; empty: it is not."""
    breaker: str
    """Why the circuit breaker is open; empty: it is not."""
    quarantined: tuple[int, ...]
    """Slots."""
    probation: tuple[int, ...]
    """Slots that must prove themselves before they are trusted."""


def healing_status(policy: Policy, memory: Memory, probation: Collection[int]) -> HealingStatus:
    opened = memory.breaker_open_since is not None
    return HealingStatus(
        paused="spec.pause" if policy.spec.pause else memory.paused_by,
        breaker=(memory.breaker_why or "too many destructive steps") if opened else "",
        quarantined=tuple(sorted(memory.quarantined)),
        probation=tuple(sorted(probation)),
    )


class ScalingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the load rules see and say."""

    sentence: str
    """The newest decision; empty before the first."""
    reason: str
    wanted: int
    """Ranks that the rules want, before windows, rates and bounds."""
    signals: dict[str, float]
    """Over the group, by name; a signal that is missing or idle is absent."""
    missing: tuple[str, ...]
    problems: tuple[str, ...]
    """Endpoints that did not answer, each with why."""


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    state: DaemonState
    why: str
    """What keeps it from "ok"; empty there."""
    version: str
    pid: int
    policy: str
    policy_file: PolicyStatus
    dry_run: bool
    lease: LeaseStatus | None
    """None: there is no lease, and this daemon is alone."""
    acts: bool
    """This daemon may act now."""
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
    healing: HealingStatus
    scaling: ScalingStatus | None
    """None where the policy has neither load rules nor schedules."""
    group: GroupStatus
    live: tuple[int, ...]
    """Live slots, without those whose process is known to be dead and nobody has acted upon yet."""
    verdicts: tuple[Verdict, ...]
    """On the live ranks."""
    gpus: tuple[Verdict, ...]
    hosts: tuple[Verdict, ...]
    placed: tuple[Placed, ...]
    """Which rank is on which GPU, where that is known."""
    sensors: tuple[SensorStatus, ...]
    journal: JournalStatus
    log_dropped: int
    """Log lines that stderr did not take in time, and that are lost."""


def unheld(group: GroupStatus) -> list[int]:
    """Live slots without a process: nobody was allowed to go on without them."""
    return [s.slot for s in group.slots if s.state == "live" and s.member is None]


def dead_slots(verdicts: Collection[Verdict]) -> frozenset[int]:
    """Slots whose rank's process is gone: they are in the view until somebody takes them out."""
    return frozenset(v.rank.slot for v in verdicts if v.health == Health.UNHEALTHY and v.cause == Cause.PROCESS_DEATH)


def alive(group: GroupStatus, verdicts: Collection[Verdict]) -> tuple[int, ...]:
    """The live slots, as far as anybody knows."""
    return tuple(slot for slot in group.live if slot not in dead_slots(verdicts))


def trouble(
    group: GroupStatus,
    live: Collection[int],
    verdicts: Collection[Verdict],
    below: Collection[Verdict],
    incident: str,
    journal: str,
) -> str:
    """What keeps a started daemon from "ok"; empty when nothing does. `below`: verdicts on hosts, and on GPUs in use.
    `journal`: why it cannot be written."""
    problems = [f"incident {incident} is open"] if incident else []
    if tuple(live) != tuple(group.target):
        problems.append(f"{len(live)} of {len(group.target)} ranks are live")
    if group.sequence:
        problems.append(f"the group changes: {group.sequence}")
    if group.uncovered:
        problems.append(f"{group.uncovered} experts have no live copy")
    problems += [f"slot {slot} is in the view, but no process holds it" for slot in unheld(group)]
    if group.gateway:
        problems.append(group.gateway)
    problems += [v.sentence for v in (*verdicts, *below) if v.health != Health.HEALTHY]
    if journal:
        problems.append(f"the journal cannot be written: {journal}")
    return "; ".join(problems)
