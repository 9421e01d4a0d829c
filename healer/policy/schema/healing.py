"""`spec.healing`: which evidence leads to which action."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from healer.diagnosis import Cause, Confidence, Health
from healer.evidence import Severity, What
from healer.policy.schema.base import Count, Duration, Listed, Model, Name, Numbers, OneOf

ActionName = Literal["retry", "replace", "scale-down", "drain", "hook", "human"]
OnFailure = Literal["next", "human"]

CAUSES = tuple(cause.value for cause in Cause if cause != Cause.NONE)
CONFIDENCES = tuple(one.value for one in Confidence if one != Confidence.NONE)

Causes = Annotated[tuple[Annotated[str, OneOf(CAUSES)], ...], Listed, Field(min_length=1)]
Verdicts = Annotated[tuple[Annotated[str, OneOf(tuple(h.value for h in Health))], ...], Listed, Field(min_length=1)]
Kinds = Annotated[tuple[Annotated[str, OneOf(tuple(w.value for w in What))], ...], Listed, Field(min_length=1)]
Severities = Annotated[tuple[Annotated[str, OneOf(tuple(s.value for s in Severity))], ...], Listed, Field(min_length=1)]
Confidences = Annotated[tuple[Annotated[str, OneOf(CONFIDENCES)], ...], Listed, Field(min_length=1)]
Ranges = Annotated[tuple[Numbers, ...], Listed, Field(min_length=1)]
Texts = Annotated[tuple[Name, ...], Listed, Field(min_length=1)]


class Match(Model):
    """Every key that is given must fit; a list fits where one of its entries does. Empty: all that is unhealthy fits."""

    verdict: Verdicts = (Health.UNHEALTHY.value,)
    """What the diagnosis says. A `healthy` rank is answered only where it has a warning, such as `thermal`. Only `hook` and
    `human` may answer a healthy or an unknown rank, and `retry` one whose only `cause` is mutual-wait: two ranks that beat
    wait for each other."""
    cause: Causes | None = None
    """What the diagnosis gives as the cause."""
    confidence: Confidences | None = None
    """What the verdict rests on: `conclusive` evidence, a `quorum` of sources, or a `deadline`."""
    evidence: Kinds | None = None
    """Kinds of evidence; one of them must support the verdict."""
    severity: Severities | None = None
    """Of the supporting evidence, the worst counts."""
    xid: Ranges | None = None
    """Codes and ranges, such as `[79, 144-150]`; one of the supporting XIDs must be among them."""
    host: Texts | None = None
    """Host names; `*` stands for any characters."""
    slot: Ranges | None = None
    """Slot numbers and ranges, such as `[0, 4-7]`."""
    labels: dict[str, str] | None = None
    """Labels of the slot (target.slotLabels), all of which must be equal."""
    when: Annotated[str, Field(min_length=1, max_length=2000)] | None = None
    """A condition in CEL, over the variables listed below. An error while it is worked out counts as no match."""

    def fits(self, cause: Cause) -> bool:
        return self.cause is None or cause.value in self.cause


class Require(Model):
    """Evidence that must stand before the rule acts; until then the rule waits, and no later rule is tried."""

    evidence: Annotated[int, Field(ge=1, le=1000)] = 1
    """Pieces of supporting evidence."""
    sources: Annotated[int, Field(ge=1, le=1000)] = 1
    """Independent sources of it: sensors, and ranks that report a peer. At most as many as there are."""
    within_s: Duration | None = None
    """All of it must be as recent as this; absent: any evidence that still stands counts."""


def _as_mapping(value: Any) -> Any:
    return {"action": value} if isinstance(value, str) else value


class Rung(Model):
    """One step of a ladder. In a file also just the name of the action, or `{hook: NAME}`."""

    action: ActionName = "hook"
    """`retry` gives the rank time (backoff) to come back by itself; where the group waits for it, the step in flight is
    dropped at once and run again by the same ranks, and a rank that does not answer within deadlines.commit is lost;
    `replace` ends it and refills its slot; `scale-down` ends it and gives its slot up; `drain` hands its requests over and
    then ends it; `hook` calls one of spec.hooks; `human` does nothing and asks for one."""
    hook: Name | None = None
    """The hook to call, a key of spec.hooks."""
    max_attempts: Count | None = None
    """Failures before the next rung. Absent: the rule's maxAttempts."""
    backoff_s: Duration | None = None
    """Before the second attempt; doubled for each further one. Absent: the rule's backoff."""
    deadline_s: Duration | None = None
    """An attempt that takes longer has failed. Absent: that of the action itself (deadlines.prepare, or the hook's)."""
    on_failure: OnFailure = "next"
    """After the last attempt: the next rung, or a human at once."""


class Rule(Model):
    """The first rule that matches wins."""

    name: Name
    """Named in decisions, metrics and the journal; unique."""
    match: Match = Field(default_factory=Match)
    """What the rule is for."""
    require: Require = Field(default_factory=Require)
    """What must stand before it acts."""
    ladder: Annotated[
        tuple[Annotated[Rung, BeforeValidator(_as_mapping, json_schema_input_type=ActionName | Rung)], ...],
        Listed,
        Field(min_length=1),
    ] = Field(alias="actions")
    """The ladder: the next is taken when one is not allowed or has failed."""
    max_attempts: Annotated[int, Field(ge=1, le=1000)] = 3
    """Attempts of an action before the next one; a slot that is live again starts anew."""
    backoff_s: Duration = 5.0
    """Before the second attempt; doubled for each further one."""

    @property
    def actions(self) -> tuple[ActionName, ...]:
        """The names of the ladder's actions, in order."""
        return tuple(rung.action for rung in self.ladder)

    def attempts_of(self, rung: Rung) -> int:
        return self.max_attempts if rung.max_attempts is None else rung.max_attempts

    def backoff_of(self, rung: Rung) -> float:
        """Seconds before the second attempt."""
        return self.backoff_s if rung.backoff_s is None else rung.backoff_s


class Deadlines(Model):
    """Of the executor's phases."""

    prepare_s: Duration = 60.0
    """Boot, load, connect and capture of a replacement; then it is rolled back and has failed. Survivors serve meanwhile."""
    commit_s: Duration = 5.0
    """Each answer within a commit; a rank that neither answers nor beats is lost. Below target.epTimeout."""


class Probation(Model):
    """What a slot with a history must do before it is trusted again: one that was quarantined, whose GPU was lost and came
    back, or whose ranks failed again and again."""

    check: bool = True
    """A rank that starts there first proves its device: memory, arithmetic, copies. Where that fails, the start has failed."""
    repeated: Annotated[int, Field(ge=1, le=1000)] = 2
    """Failures of a slot, within the window of bounds.faultBudget (1h without one), from which on it has a history."""
    hold_down_s: Duration = 60.0
    """After a quarantine has ended by itself, one fault within this quarantines the slot again, where bounds.faultBudget is
    set."""


def _default_rules() -> tuple[Rule, ...]:
    return (
        Rule.model_validate(
            {
                "name": "mutual-wait",
                "match": {"verdict": ["unknown"], "cause": ["mutual-wait"]},
                "actions": ["retry", "human"],
                "maxAttempts": 3,
                "backoff": "2s",
            }
        ),
        Rule.model_validate({"name": "any-fault", "actions": ["replace", "scale-down", "human"]}),
    )


class Healing(Model):
    """What is done about faults."""

    rules: Annotated[tuple[Rule, ...], Listed, Field(max_length=1000)] = Field(default_factory=_default_rules)
    """The first that matches wins. Absent: one rule for any fault, [replace, scale-down, human], and before it one that runs
    the step of a mutual wait again, up to three times. Empty: nothing is healed."""
    deadlines: Deadlines = Field(default_factory=Deadlines)
    probation: Probation = Field(default_factory=Probation)
    verdict_max_age_s: Duration = 30.0
    """A verdict whose newest supporting evidence is older than this acts no more, process death excepted."""

    def rule_for(self, cause: Cause) -> Rule | None:
        return next((rule for rule in self.rules if rule.match.fits(cause)), None)
