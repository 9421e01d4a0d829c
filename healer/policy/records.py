"""What goes into a decision and what comes out of it: plain records."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from healer.diagnosis import Cause, Verdict
from healer.evidence import Evidence, RankRef
from healer.policy.memory import FailedRefill, Memory
from healer.policy.reasons import ACTS, Reason, Step


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    reason: Reason
    slots: tuple[int, ...]
    cause: Cause
    rule: str
    """Name of the rule; empty where none took part."""
    sentence: str
    dry_run: bool = False
    """True: the policy forbids acting; `step` is what would have been done."""
    verdicts: tuple[Verdict, ...] = ()
    """What it rests on."""
    rung: int = 0
    """Index of the action in the rule's ladder; its length: none of them, but what must be done all the same."""
    hook: str = ""
    """The hook to run; with a step other than `hook`, the slots are emptied for it and it runs when they are."""
    destructive: bool = False
    """Counts for the circuit breaker."""

    @property
    def acts(self) -> bool:
        return self.step in ACTS and not self.dry_run

    @property
    def key(self) -> tuple[object, ...]:
        """Two decisions in a row with the same key are one, said twice."""
        return (
            self.step,
            self.reason,
            self.slots,
            self.rule,
            self.hook,
            self.dry_run,
            tuple(v.key for v in self.verdicts),
        )


class State(msgspec.Struct, frozen=True):
    """What the decision must know of the group."""

    live: tuple[RankRef, ...]
    """Live ranks that no decision has condemned yet."""
    target: tuple[int, ...]
    sequence: str
    """What the executor is doing; empty when nothing."""
    failed: Mapping[int, FailedRefill]
    memory: Memory = Memory()
    evidence: Mapping[str, Evidence] = MappingProxyType({})
    """Standing evidence by id, for rules that look at it; what is absent matches no such rule."""
    occupied: frozenset[int] = frozenset()
    """Slots with a process, be it starting, serving or not yet buried."""
    hosts: Mapping[int, str] = MappingProxyType({})
    """By slot, the host of its rank."""
    losses_survivable: int | None = None
    """How many more ranks can be lost with room for every expert; None: not known, and no floor is kept."""
    gpus: int | None = None
    """GPUs that exist; None: not known."""
    wall: float | None = None
    """Seconds since the epoch, for maintenance windows; None: none is open."""
