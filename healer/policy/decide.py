"""Decisions: a policy, the verdicts and the state of the group in; what to do, or why nothing, out. Pure."""

from collections.abc import Collection, Mapping
from enum import StrEnum

import msgspec

from healer.diagnosis import Cause, Health, Verdict
from healer.evidence import RankRef
from healer.policy.schema import Policy, Rule


class Step(StrEnum):
    """What a decision asks of the target."""

    NONE = "none"
    REPLACE = "replace"
    """Release a live rank and refill its slot."""
    SCALE_DOWN = "scale-down"
    """Release a live rank; its slot leaves the target."""
    REFILL = "refill"
    """Ask again for a replacement that failed to start."""
    GIVE_UP = "give-up"
    """Take an empty slot out of the target."""
    SCALE = "scale"
    """Set the target, as an operator asked."""
    HUMAN = "human"
    """Leave it to a human: nothing is done."""


class Reason(StrEnum):
    """Why; each value is documented by its comment, and is a label of `healer_decisions_total`."""

    STARTING = "starting"  # no live rank is known yet
    ALL_HEALTHY = "all-healthy"  # every live rank is heard, and the group has its intended size
    IN_PROGRESS = "in-progress"  # nothing is wrong beyond what the executor is already working on
    SUSPICION = "suspicion"  # evidence exists, too weak to act upon
    TELEMETRY_LOST = "telemetry-lost"  # the daemon itself was late: silence means nothing
    RULE_MATCHED = "rule-matched"  # an unhealthy rank, and the first action of its rule that is allowed
    BELOW_MIN_RANKS = "below-min-ranks"  # the rule's scale-down would go below bounds.minRanks
    NO_RULE = "no-rule"  # no rule matches the cause
    RULE_SAYS_HUMAN = "rule-says-human"
    BACKOFF = "backoff"  # a replacement failed; the next attempt is not due
    REPLACEMENT_FAILED = "replacement-failed"  # a replacement failed and is asked for again
    ATTEMPTS_EXHAUSTED = "attempts-exhausted"  # maxAttempts replacements failed
    BOOT_FAILED = "boot-failed"  # a rank that an operator asked for does not start
    OPERATOR = "operator"  # asked through the API
    EXECUTOR = "executor"  # the executor itself gave a rank up and is replacing it
    REFUSED = "refused"  # an operator's request that cannot be met


ACTS = frozenset({Step.REPLACE, Step.SCALE_DOWN, Step.REFILL, Step.GIVE_UP, Step.SCALE})


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

    @property
    def acts(self) -> bool:
        return self.step in ACTS and not self.dry_run

    @property
    def key(self) -> tuple[object, ...]:
        """Two decisions in a row with the same key are one, said twice."""
        return self.step, self.reason, self.slots, self.rule, self.dry_run, tuple(v.key for v in self.verdicts)


class FailedRefill(msgspec.Struct, frozen=True):
    """A slot whose replacement did not start."""

    rule: str
    """The rule by which the replacement was asked for; empty: an operator asked for the slot."""
    attempts: int
    """Replacements asked for, all failed."""
    failed_at: float
    asked: bool
    """True: a further attempt is under way."""
    why: str


class State(msgspec.Struct, frozen=True):
    """What the decision must know of the group."""

    live: tuple[RankRef, ...]
    """Live ranks that no decision has condemned yet."""
    target: tuple[int, ...]
    sequence: str
    """What the executor is doing; empty when nothing."""
    failed: Mapping[int, FailedRefill]


def decide(policy: Policy, verdicts: Collection[Verdict], state: State, now: float) -> tuple[Decision, ...]:
    """At least one decision, always with its reason. Ranks that fail together are decided upon together."""
    sick = [v for v in verdicts if v.health == Health.UNHEALTHY]
    decisions = _heal(policy, sick, state) + _refill(policy, state, now)
    if policy.spec.dry_run:
        decisions = [_dry(d) if d.step in ACTS else d for d in decisions]
    return tuple(decisions) or (_nothing(verdicts, state),)


def backoff_s(rule: Rule, attempts: int) -> float:
    return rule.backoff_s * float(2 ** (attempts - 1))


def _heal(policy: Policy, sick: list[Verdict], state: State) -> list[Decision]:
    remaining = len(state.live) - len(sick)
    groups: dict[tuple[str, Cause], list[Verdict]] = {}
    for verdict in sick:
        rule = policy.spec.healing.rule_for(verdict.cause)
        groups.setdefault((rule.name if rule else "", verdict.cause), []).append(verdict)
    decisions = []
    for (_, cause), members in groups.items():
        rule = policy.spec.healing.rule_for(cause)
        step, reason = _first(policy, rule, remaining)
        who = "; ".join(v.sentence for v in members)
        slots = tuple(v.rank.slot for v in members)
        decisions.append(
            Decision(
                step=step,
                reason=reason,
                slots=slots,
                cause=cause,
                rule=rule.name if rule else "",
                sentence=f"{_heading(step, slots, rule)}: {who}{_note(policy, reason, remaining)}",
                verdicts=tuple(members),
            )
        )
    return decisions


def _first(policy: Policy, rule: Rule | None, remaining: int) -> tuple[Step, Reason]:
    if rule is None:
        return Step.HUMAN, Reason.NO_RULE
    reason = Reason.RULE_MATCHED
    for action in rule.actions:
        if action == "replace":
            return Step.REPLACE, reason
        if action == "human":
            return Step.HUMAN, Reason.RULE_SAYS_HUMAN if reason == Reason.RULE_MATCHED else reason
        if remaining >= policy.spec.bounds.min_ranks:
            return Step.SCALE_DOWN, reason
        reason = Reason.BELOW_MIN_RANKS
    # the survivors must be released whatever the bounds say; replacing keeps the intended size
    return Step.REPLACE, reason


def _heading(step: Step, slots: tuple[int, ...], rule: Rule | None) -> str:
    which = _slots(slots)
    if step == Step.HUMAN:
        return f"did nothing, {which} needs a human" + (f" (rule {rule.name})" if rule else " (no rule matches)")
    verb = "replaces" if step == Step.REPLACE else "scales down by"
    return f"{verb} {which} (rule {rule.name if rule else ''})"


def _note(policy: Policy, reason: Reason, remaining: int) -> str:
    if reason != Reason.BELOW_MIN_RANKS:
        return ""
    return f"; not scaled down, since {remaining} ranks are below bounds.minRanks {policy.spec.bounds.min_ranks}"


def _refill(policy: Policy, state: State, now: float) -> list[Decision]:
    decisions = []
    size = len(state.target)
    for slot, failed in sorted(state.failed.items()):
        if failed.asked or slot not in state.target:
            continue
        rule = next((r for r in policy.spec.healing.rules if r.name == failed.rule), None)
        step, reason, text = _next(policy, rule, failed, size, now)
        size -= step == Step.GIVE_UP
        decisions.append(
            Decision(
                step=step,
                reason=reason,
                slots=(slot,),
                cause=Cause.NONE,
                rule=failed.rule,
                sentence=f"{text}: {failed.why}",
            )
        )
    return decisions


def _next(policy: Policy, rule: Rule | None, failed: FailedRefill, size: int, now: float) -> tuple[Step, Reason, str]:
    if rule is None:
        return Step.HUMAN, Reason.BOOT_FAILED, "did nothing, a rank does not start and needs a human"
    tried = f"{failed.attempts} of {rule.max_attempts} replacements failed"
    if failed.attempts < rule.max_attempts:
        due = failed.failed_at + backoff_s(rule, failed.attempts)
        if now < due:
            return Step.NONE, Reason.BACKOFF, f"did nothing, {tried}, waiting {backoff_s(rule, failed.attempts):g} s"
        return Step.REFILL, Reason.REPLACEMENT_FAILED, f"asks for a replacement again, {tried}"
    later = rule.actions[rule.actions.index("replace") + 1 :] if "replace" in rule.actions else rule.actions
    if "scale-down" in later:
        if size - 1 >= policy.spec.bounds.min_ranks:
            return Step.GIVE_UP, Reason.ATTEMPTS_EXHAUSTED, f"gives the slot up, {tried}"
        return Step.HUMAN, Reason.BELOW_MIN_RANKS, f"did nothing, {tried}, and a smaller group is below bounds.minRanks"
    return Step.HUMAN, Reason.ATTEMPTS_EXHAUSTED, f"did nothing, {tried}; needs a human"


def _dry(decision: Decision) -> Decision:
    return msgspec.structs.replace(
        decision, dry_run=True, sentence=f"did nothing, dry run; without it: {decision.sentence}"
    )


def _nothing(verdicts: Collection[Verdict], state: State) -> Decision:
    lost = tuple(v for v in verdicts if v.cause == Cause.TELEMETRY_LOST)
    suspected = tuple(v for v in verdicts if v.cause == Cause.SUSPECTED)
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
    elif state.sequence or healthy < len(verdicts) or len(verdicts) != wanted:
        reason, text = Reason.IN_PROGRESS, f"{healthy} of {wanted} ranks are live and healthy"
    else:
        reason, text = Reason.ALL_HEALTHY, f"all {healthy} ranks are healthy"
    return Decision(
        step=Step.NONE,
        reason=reason,
        slots=tuple(v.rank.slot for v in because),
        cause=Cause.NONE,
        rule="",
        sentence=f"did nothing: {text}",
        verdicts=because,
    )


def _slots(slots: tuple[int, ...]) -> str:
    return f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"
