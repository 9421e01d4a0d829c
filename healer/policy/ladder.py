"""The ladder of a rule: which of its actions is next for a slot, after what has been tried. Pure.

An action has `maxAttempts` attempts, each with a deadline; after a failed one the next is due when the backoff has passed,
which doubles each time. After the last one `onFailure` says what follows: the next action, or a human. A hook repairs: when
it has emptied the slot and succeeded, the slot is filled again.
"""

import msgspec

from healer.evidence import RankRef
from healer.policy.memory import Ladder, Phase
from healer.policy.reasons import Reason
from healer.policy.schema import Policy, Rule, Rung

MAX_BACKOFF_S = 3600.0
"""Doubling stops here: later than that, nobody remembers what was tried."""

HOOK_GRACE_S = 5.0
"""A hook ends by its own deadline; a little later, its end was lost with the daemon that ran it."""


class Turn(msgspec.Struct, frozen=True):
    """What the ladder says now."""

    rung: int
    """Index of the action to take; the length of the ladder: a human."""
    reason: Reason
    """RULE_MATCHED, RETRY_DUE, NEXT_ACTION or REPAIRED: act. BACKOFF or RUNNING: wait. ATTEMPTS_EXHAUSTED: a human."""
    text: str = ""

    @property
    def waits(self) -> bool:
        return self.reason in (Reason.BACKOFF, Reason.RUNNING)


def backoff_s(rule: Rule, attempts: int, rung: Rung | None = None) -> float:
    """Seconds between the failure of attempt number `attempts` and the next one."""
    base = rule.backoff_s if rung is None else rule.backoff_of(rung)
    return max(base, min(MAX_BACKOFF_S, base * 2.0 ** min(attempts - 1, 64)))


def deadline_s(policy: Policy, rung: Rung) -> float:
    """For one attempt."""
    if rung.deadline_s is not None:
        return rung.deadline_s
    if rung.action == "hook" and rung.hook in policy.spec.hooks:
        return policy.spec.hooks[rung.hook].deadline_s + HOOK_GRACE_S
    return policy.spec.healing.deadlines.prepare_s


def turn(policy: Policy, rule: Rule, ladder: Ladder | None, rank: RankRef, now: float) -> Turn:
    """For a rank that is live and unhealthy."""
    if ladder is None or ladder.rank != rank or ladder.rule != rule.name or ladder.rung >= len(rule.ladder):
        return Turn(0, Reason.RULE_MATCHED)
    rung = rule.ladder[ladder.rung]
    pause_s = backoff_s(rule, ladder.attempts, rung)
    shown = f"{rung.action} {ladder.attempts} of {rule.attempts_of(rung)}"
    if ladder.phase == Phase.FAILED:
        return _after(rule, ladder, rung, ladder.at, f"{shown} failed: {ladder.why}", now)
    if rung.action == "retry" or ladder.phase == Phase.SUCCEEDED:
        # whether it had an effect shows only in the verdict
        if now < ladder.at + pause_s:
            return Turn(ladder.rung, Reason.BACKOFF, f"{shown}: waiting {pause_s:g} s for its effect")
        return _after(rule, ladder, rung, ladder.at, f"{shown} had no effect", now)
    limit_s = deadline_s(policy, rung)
    if now < ladder.at + limit_s:
        return Turn(ladder.rung, Reason.RUNNING, f"{shown} is under way")
    return _after(rule, ladder, rung, ladder.at + limit_s, f"{shown} took longer than {limit_s:g} s", now)


def turn_of_empty(policy: Policy, rule: Rule, ladder: Ladder, now: float) -> Turn:
    """For a slot that was emptied for a hook."""
    rung = rule.ladder[ladder.rung]
    shown = f"{rung.action} {rung.hook or ''} {ladder.attempts} of {rule.attempts_of(rung)}"
    match ladder.phase:
        case Phase.EMPTYING:
            return Turn(ladder.rung, Reason.RULE_MATCHED, "the slot is empty")
        case Phase.SUCCEEDED:
            return Turn(ladder.rung, Reason.REPAIRED, f"{shown} succeeded")
        case Phase.FAILED:
            return _after(rule, ladder, rung, ladder.at, f"{shown} failed: {ladder.why}", now)
    limit_s = deadline_s(policy, rung)
    if now < ladder.at + limit_s:
        return Turn(ladder.rung, Reason.RUNNING, f"{shown} is under way")
    return _after(rule, ladder, rung, ladder.at + limit_s, f"{shown} took longer than {limit_s:g} s", now)


def _after(rule: Rule, ladder: Ladder, rung: Rung, failed_at: float, what: str, now: float) -> Turn:
    if ladder.attempts < rule.attempts_of(rung):
        # what was given time to show an effect has waited already
        pause_s = backoff_s(rule, ladder.attempts, rung) if ladder.phase == Phase.FAILED else 0.0
        if now < failed_at + pause_s:
            return Turn(ladder.rung, Reason.BACKOFF, f"{what}; waiting {pause_s:g} s")
        return Turn(ladder.rung, Reason.RETRY_DUE, what)
    if rung.on_failure == "human":
        return Turn(len(rule.ladder), Reason.ATTEMPTS_EXHAUSTED, what)
    return Turn(ladder.rung + 1, Reason.NEXT_ACTION, what)
