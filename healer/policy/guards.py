"""Guards: what keeps a decision from being carried out now, whatever the rule says. Pure functions of policy, memory and time.

None of them stands in the way of recovery: the survivors of a death are released, and its slot is refilled.
"""

from collections.abc import Collection
from functools import lru_cache

import msgspec

from healer.diagnosis import Cause, Confidence, Verdict
from healer.dossier import STANDS_S
from healer.evidence import Evidence, What
from healer.policy.memory import Memory
from healer.policy.reasons import Reason
from healer.policy.records import State
from healer.policy.schedules import Lasting, spell
from healer.policy.schema import Policy

FAILURES_WINDOW_S = 3600.0
"""Over which the failures of a slot are counted for conditions where no fault budget is set."""

GONE = frozenset("ZXx")
"""States of a process that will never return."""

UNRESPONSIVE = frozenset(
    {
        Cause.PROCESS_DEATH,
        Cause.STOPPED,
        Cause.HANG,
        Cause.STUCK,
        Cause.AGENT_LOST,
        Cause.SILENT,
        Cause.EXECUTOR,
        Cause.GPU_LOST,
    }
)
"""The group waits for such a rank: it cannot hand anything over, and every second counts."""


WAITED_FOR = UNRESPONSIVE | {Cause.MUTUAL_WAIT}
"""The group stands for it, so a retry drops the step in flight."""

EVENTS = frozenset(STANDS_S) | {What.PEER_FAULT}
"""Evidence of a moment, which only time makes meaningless. Everything else stands until its source takes it back: silence or
a lost GPU is as true after an hour as it was at first."""


class Hold(msgspec.Struct, frozen=True):
    reason: Reason
    text: str


def is_dead(verdict: Verdict, evidence: Collection[Evidence]) -> bool:
    """Its process is gone, whatever the cause is."""
    return verdict.cause == Cause.PROCESS_DEATH or any(
        e.what in (What.LIFELINE_CUT, What.PIDFD_FIRED)
        or (e.what in (What.PROCESS_STATE, What.SOCKET_CLOSED) and e.value in GONE)
        for e in evidence
        if e.reporter is None and e.subject == verdict.subject
    )


def observing(policy: Policy, state: State) -> Hold | None:
    """Nothing at all is done by itself."""
    if policy.spec.pause:
        return Hold(Reason.PAUSED, "spec.pause is set")
    if state.memory.paused_by:
        return Hold(Reason.PAUSED, f"paused by {state.memory.paused_by}")
    window = open_window(policy, state.wall, "observe")
    return Hold(Reason.MAINTENANCE, f"maintenance {window}") if window else None


def scaling(policy: Policy, verdicts: Collection[Verdict], state: State, now: float) -> Hold | None:
    """Why no load rule may change the size now; None: it may. Healing comes first."""
    hold = observing(policy, state)
    if hold is not None:
        return hold
    window = open_window(policy, state.wall, "heal-only")
    if window:
        return Hold(Reason.MAINTENANCE, f"maintenance {window}")
    if state.sequence:
        return Hold(Reason.QUEUED, f"a reconfiguration is in flight ({state.sequence})")
    if state.memory.telemetry_lost:
        return Hold(Reason.TELEMETRY_LOST, "the telemetry is lost")
    if now < settled_at(policy, state.memory):
        return Hold(Reason.TELEMETRY_SETTLING, "the telemetry came back a moment ago")
    sick = sorted(v.rank.slot for v in verdicts if v.health == "unhealthy")
    healing = sorted({*sick, *state.failed, *state.memory.ladders} - {r.slot for r in state.live if r.slot not in sick})
    if healing:
        return Hold(Reason.HEALING_FIRST, f"slots {', '.join(map(str, healing))} are being healed")
    missing = sorted(set(state.target) - {rank.slot for rank in state.live})
    if missing:
        return Hold(Reason.HEALING_FIRST, f"slots {', '.join(map(str, missing))} are not live yet")
    return None


def stale(policy: Policy, verdict: Verdict, evidence: Collection[Evidence], memory: Memory, now: float) -> Hold | None:
    """The verdict rests on events alone, none of them recent, and healing had not taken it up."""
    if verdict.rank in memory.admitted or not evidence or any(e.what not in EVENTS for e in evidence):
        return None
    age_s, most = now - max(e.at for e in evidence), policy.spec.healing.verdict_max_age_s
    if age_s <= most:
        return None
    return Hold(Reason.STALE, f"its newest evidence is {age_s:.0f} s old, healing.verdictMaxAge is {most:g} s")


def settling(policy: Policy, verdict: Verdict, memory: Memory, now: float) -> Hold | None:
    """Telemetry is lost or just came back: only what the kernel or the driver says for sure counts."""
    if verdict.confidence == Confidence.CONCLUSIVE:
        return None
    if memory.telemetry_lost:
        return Hold(Reason.TELEMETRY_SETTLING, "the telemetry is lost")
    until = settled_at(policy, memory)
    if now >= until:
        return None
    return Hold(Reason.TELEMETRY_SETTLING, f"the telemetry came back a moment ago, waiting {until - now:.1f} s")


def settled_at(policy: Policy, memory: Memory) -> float:
    """When telemetry that came back counts in full."""
    if memory.telemetry_back_at is None:
        return 0.0
    return memory.telemetry_back_at + policy.spec.detection.settle_after_s


def failures(policy: Policy, memory: Memory, slot: int, now: float) -> int:
    """Faults of the slot within the window of its budget."""
    budget = policy.spec.bounds.fault_budget
    window_s = budget.window_s if budget else FAILURES_WINDOW_S
    return sum(now - at <= window_s for at in memory.faults.get(slot, ()))


def breaker_room(policy: Policy, memory: Memory, now: float) -> int | None:
    """Destructive steps left before the breaker opens; 0 while it is open; None: there is no breaker."""
    breaker = policy.spec.bounds.breaker
    if breaker is None:
        return None
    if memory.breaker_open_since is not None:
        return 0
    return max(0, breaker.max_destructive - sum(now - at <= breaker.window_s for at in memory.destructive))


def open_window(policy: Policy, wall: float | None, mode: str) -> str:
    """The name of an open maintenance window of that mode; empty where none is."""
    if wall is None:
        return ""
    windows = (w for w in policy.spec.bounds.maintenance if w.mode == mode)
    return next((w.name for w in windows if _open(w.cron, w.timezone, w.for_s, int(wall))), "")


@lru_cache(maxsize=256)
def _open(cron: str, timezone: str, for_s: float, wall_s: int) -> bool:
    return spell(Lasting(cron, timezone, for_s), wall_s) is not None
