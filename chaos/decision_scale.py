"""How long a decision takes, for `chaos.policy_scale`: from evidence that is conclusive to what is to be done about it.

A daemon's own steps, without its journal: the evidence is filed, every rank is judged, notes are taken, and 500 rules are
asked, half of them with a condition. Memory that is loaded before is set aside from the collector, as the daemon does.
"""

import gc
import time

import msgspec

from healer.diagnosis import Cause, Limits
from healer.evidence import Evidence, RankRef, Severity, What
from healer.judge import Judge
from healer.policy.decide import State, decide
from healer.policy.memory import Memory, remember
from healer.policy.observe import observe
from healer.policy.reasons import Step
from healer.policy.rules import book_of
from healer.policy.schema import Policy

CAUSES = (Cause.PROCESS_DEATH, Cause.ECC, Cause.NVLINK, Cause.REMAP, Cause.FABRIC)
ONE_ROUNDS, ALL_ROUNDS = 200, 20
LIMITS = Limits(stall_after_s=1.0, silent_after_s=10.0, fault_window_s=30.0)


class Reaction(msgspec.Struct, frozen=True):
    """Processor time of one decision, ms."""

    one_ms: float
    """One rank of all dies: the median."""
    one_worst_ms: float
    all_ms: float
    """All ranks die at once: the median."""
    all_worst_ms: float


def rules(count: int, ranks: int) -> list[dict[str, object]]:
    """Healing rules of which the last one answers."""
    found: list[dict[str, object]] = []
    for i in range(count - 1):
        match: dict[str, object] = {"cause": [CAUSES[i % len(CAUSES)].value], "slot": [i % ranks]}
        if i % 2 == 0:
            match["severity"] = ["info"]
        else:
            match["when"] = f"failures > {100 + i} && severity == 'critical'"
        found.append({"name": f"h{i}", "match": match, "actions": ["human"]})
    return [*found, {"name": "last", "actions": ["replace", "human"]}]


class _Group:
    """Ranks that die and come back, and what a daemon keeps of them."""

    def __init__(self, policy: Policy, ranks: int) -> None:
        self.policy, self.judge, self.now = policy, Judge(LIMITS), 1000.0
        self.live = [RankRef(slot, 0) for slot in range(ranks)]
        self._seq = 0
        self.judge.watch(self.live, self.now)
        self.judge.take([self._seen(rank, What.BEAT_HEARD, 1) for rank in self.live])

    def die(self, slots: range) -> float:
        """Milliseconds until it was decided to replace them; then others are there in their place."""
        self.now += 1.0
        cut = [self._seen(self.live[slot], What.LIFELINE_CUT, "Z") for slot in slots]
        began = time.process_time()
        self.judge.take(cut)
        verdicts = self.judge.judge(self.now).diagnosis.ranks
        state = State(
            live=tuple(self.live),
            target=tuple(range(len(self.live))),
            sequence="",
            failed={},
            evidence=self.judge.standing(self.now),
        )
        memory = Memory()
        for note in observe(self.policy, verdicts, state, self.now):
            memory = remember(memory, note)
        decisions = decide(self.policy, verdicts, msgspec.structs.replace(state, memory=memory), self.now)
        took_ms = (time.process_time() - began) * 1000
        assert sum(len(one.slots) for one in decisions if one.step is Step.REPLACE) == len(slots)
        for slot in slots:
            self.live[slot] = RankRef(slot, self.live[slot].incarnation + 1)
        self.judge.watch(self.live, self.now)
        self.judge.take([self._seen(self.live[slot], What.BEAT_HEARD, 1) for slot in slots])
        return took_ms

    def _seen(self, rank: RankRef, what: What, value: str | int) -> Evidence:
        self._seq += 1
        return Evidence(
            source="scale", seq=self._seq, subject=rank, what=what, value=value, severity=Severity.CRITICAL,
            at=self.now, wall=0.0,
        )  # fmt: skip


def react(policy: Policy, ranks: int) -> Reaction:
    """In this process."""
    book_of(policy)
    group = _Group(policy, ranks)
    gc.freeze()
    one = sorted(group.die(range(i % ranks, i % ranks + 1)) for i in range(ONE_ROUNDS))
    every = sorted(group.die(range(ranks)) for _ in range(ALL_ROUNDS))
    return Reaction(one[len(one) // 2], one[-1], every[len(every) // 2], every[-1])
