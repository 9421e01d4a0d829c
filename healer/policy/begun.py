"""What is remembered when a decision is acted upon. Pure."""

from collections.abc import Callable

from healer.evidence import RankRef
from healer.policy.memory import Began, Note, Phase, Removed, Returned
from healer.policy.reasons import Reason, Step
from healer.policy.records import Decision

_LEAVES = (Step.SCALE_DOWN, Step.DRAIN, Step.GIVE_UP)


def notes_of(decision: Decision, last_in_slot: Callable[[int], RankRef], now: float) -> tuple[Note, ...]:
    """`last_in_slot`: whose rank a slot was, where the decision names none."""
    found: list[Note] = []
    if decision.reason == Reason.QUARANTINE_OVER:
        found += [Returned(slot, now) for slot in decision.slots]
    if not decision.rule:
        return tuple(found)
    phase = Phase.RUNNING
    if decision.hook and decision.step != Step.HOOK:
        phase = Phase.EMPTYING
    elif decision.reason == Reason.REPAIRED:
        phase = Phase.REFILLING
    ranks = {verdict.rank.slot: verdict.rank for verdict in decision.verdicts}
    found.append(
        Began(
            ranks=tuple(ranks.get(slot) or last_in_slot(slot) for slot in decision.slots),
            rule=decision.rule,
            cause=decision.cause,
            rung=decision.rung,
            step=decision.step,
            phase=phase,
            destructive=decision.destructive,
            at=now,
        )
    )
    if decision.step in _LEAVES and decision.reason == Reason.QUARANTINED:
        found += [Removed(slot, now) for slot in decision.slots]
    return tuple(found)
