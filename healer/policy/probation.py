"""Slots with a history: those that must prove themselves before they are trusted again. Pure."""

from collections.abc import Collection, Mapping

from healer.diagnosis import Health, Verdict
from healer.evidence import GpuRef
from healer.policy import guards
from healer.policy.memory import Memory
from healer.policy.schema import Policy


def suspects(
    policy: Policy, memory: Memory, gpus: Mapping[int, GpuRef], verdicts: Collection[Verdict], now: float
) -> frozenset[int]:
    """Slots where a rank that starts must prove its device: quarantined ones and those that come out of it, those whose ranks
    failed again and again, and those whose GPU is not known to be well. `gpus`: by slot, that of its last known rank;
    `verdicts`: on GPUs."""
    probation = policy.spec.healing.probation
    if not probation.check:
        return frozenset()
    doubtful = {v.subject for v in verdicts if v.health != Health.HEALTHY}
    failing = {s for s in memory.faults if guards.failures(policy, memory, s, now) >= probation.repeated}
    held = {slot for slot in memory.released if on_hold(policy, memory, slot, now)}
    return frozenset(
        {*memory.quarantined, *memory.returning, *held, *failing, *(s for s, gpu in gpus.items() if gpu in doubtful)}
    )


def on_hold(policy: Policy, memory: Memory, slot: int, now: float) -> bool:
    """The quarantine of the slot has ended by itself a short while ago: its next fault is one too many."""
    since = memory.released.get(slot)
    return since is not None and now - since <= policy.spec.healing.probation.hold_down_s
