"""Decisions: a policy, the verdicts and the state of the group in; what to do, or why nothing, out. Pure.

The order of things: the first rule that matches answers a verdict (`rules`), its ladder says which action is next
(`ladder`), bounds forbid sizes (`bounds`), guards hold back what must wait (`guards`); a pause or a dry run comes last.
What one decision must know of earlier ones is in `state.memory`, the fold of notes (`memory`, `observe`).
"""

from collections.abc import Collection

from healer.diagnosis import Cause, Health, Verdict
from healer.policy import sick
from healer.policy.memory import FailedRefill
from healer.policy.reasons import ACTS, Reason, Step
from healer.policy.records import Decision, State
from healer.policy.refill import refill
from healer.policy.round import Round, decision, hold_back
from healer.policy.rules import book_of
from healer.policy.schema import Policy

__all__ = ["ACTS", "Decision", "FailedRefill", "Reason", "State", "Step", "decide"]


def decide(policy: Policy, verdicts: Collection[Verdict], state: State, now: float) -> tuple[Decision, ...]:
    """At least one decision, always with its reason. Ranks that fail together are decided upon together; ranks that the
    group waits for come first. `now` in seconds of the clock of the evidence. Raises nothing for a policy that was loaded."""
    round_ = Round(book_of(policy), verdicts, state, now)
    found = sick.heal(round_) + refill(round_)
    return tuple(hold_back(policy, found, state)) or (_nothing(round_),)


def _nothing(round_: Round) -> Decision:
    verdicts, state = round_.verdicts, round_.state
    lost = tuple(v for v in verdicts if v.cause == Cause.TELEMETRY_LOST)
    suspected = tuple(v for v in verdicts if v.cause in (Cause.SUSPECTED, Cause.MUTUAL_WAIT))
    healthy, wanted = sum(v.health == Health.HEALTHY for v in verdicts), len(state.target)
    because: tuple[Verdict, ...] = ()
    if not verdicts:
        reason, text = Reason.STARTING, "no rank is live yet"
    elif lost:
        reason, because = Reason.TELEMETRY_LOST, lost
        text = "the daemon itself was late, so silence means nothing"
    elif suspected:
        reason, because = Reason.SUSPICION, suspected
        text = "; ".join(v.sentence for v in suspected)
    elif healthy > wanted:
        reason, text = Reason.IN_PROGRESS, f"{healthy} ranks are live and healthy, of which {healthy - wanted} leave"
    elif state.sequence or healthy < len(verdicts) or len(verdicts) != wanted:
        reason, text = Reason.IN_PROGRESS, f"{healthy} of {wanted} ranks are live and healthy"
    else:
        reason, text = Reason.ALL_HEALTHY, f"all {healthy} ranks are healthy"
    slots = tuple(v.rank.slot for v in because)
    return decision(Step.NONE, reason, slots, f"did nothing: {text}", verdicts=because)
