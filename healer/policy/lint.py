"""What a valid policy may not mean: warnings of `healer policy check`. Nothing here stops a daemon.

Rules that match nothing are looked for in `match_doubts`, load rules in `load_doubts`, times in `time_doubts`.
"""

from collections.abc import Iterator
from itertools import chain

from healer.diagnosis import Cause, Confidence, Health
from healer.policy.conflict import Doubt
from healer.policy.load_doubts import load_doubts
from healer.policy.match_doubts import CAUSES_OF, confidences_of, match_doubts, rests_on
from healer.policy.schema import KeyPath, Match, Policy, Rule, Span, Target, Threshold, show_duration
from healer.policy.schema.healing import CAUSES
from healer.policy.slots import show_spans, slots_alike
from healer.policy.time_doubts import time_doubts

CONDEMNED = tuple(cause for cause in CAUSES if cause in CAUSES_OF[Health.UNHEALTHY] - {Cause.EXECUTOR})
"""Causes of an unhealthy rank that a rule should answer."""

LEAST_EP_TIMEOUT_S = 2.0
"""Honest pauses were seen to last 0.65 to 1.7 s (synchronous re-balancing in vLLM, pull request 43219)."""


def warnings(policy: Policy, wall: float) -> Iterator[Doubt]:
    """All of them, in no particular order. `wall`: now, seconds since the epoch, for what comes again and again."""
    return chain(
        _rules(policy),
        match_doubts(policy),
        _unused(policy),
        _sizes(policy),
        _timing(policy),
        _load(policy),
        load_doubts(policy),
        time_doubts(policy, wall),
    )


def _rules(policy: Policy) -> Iterator[Doubt]:
    rules = policy.spec.healing.rules
    place: KeyPath = ("spec", "healing", "rules")
    if not rules:
        yield Doubt(place, "is empty: no fault is healed, each waits for a human")
        return
    for index, rule in enumerate(rules):
        above = next((earlier for earlier in rules[:index] if covers(earlier, rule)), None)
        if above is not None:
            yield Doubt((*place, index), f"is never reached: {above.name!r} above it matches all that it matches")
    yield from _open(policy)


def _open(policy: Policy) -> Iterator[Doubt]:
    """Causes that no rule answers: anywhere, or at some slots, or with some confidence."""
    rules, places = policy.spec.healing.rules, slots_alike(policy)
    causes: dict[str, list[str]] = {}
    for cause in CONDEMNED:
        cases = [(slots, one) for slots in places for one in confidences_of(Cause(cause))]
        bare = [
            (slots, one)
            for slots, one in cases
            if not any(_answers(policy, rule.match, cause, slots, one) for rule in rules)
        ]
        if bare:
            at = list(dict.fromkeys(slots for slots, _ in bare))
            on = list(dict.fromkeys(one for _, one in bare))
            where = "" if len(at) == len(places) else f" at {show_spans(at)}"
            how = "" if len(on) == len(confidences_of(Cause(cause))) else f" with confidence {', '.join(on)}"
            causes.setdefault(where + how, []).append(cause)
    for which, found in causes.items():
        text = f"have none for {', '.join(found)}{which}: such a rank waits for a human"
        yield Doubt(("spec", "healing", "rules"), text)


def _answers(policy: Policy, match: Match, cause: str, slots: Span, confidence: Confidence) -> bool:
    """May the rule answer such a case? Conditions, hosts, XIDs and evidence are taken to be met."""
    return (
        "unhealthy" in match.verdict
        and (match.cause is None or cause in match.cause)
        and confidence in rests_on(match, Cause(cause))
        and (match.slot is None or any(span.holds(slots.first) for span in match.slot))
        and (match.labels or {}).items() <= policy.spec.target.labels_of(slots.first).items()
    )


def covers(earlier: Rule, later: Rule) -> bool:
    """Whether all that `later` matches is matched by `earlier`, as far as can be told without working out conditions."""
    a, b = earlier.match, later.match
    lists = (
        (a.verdict, b.verdict),
        (a.cause, b.cause),
        (a.confidence, b.confidence),
        (a.evidence, b.evidence),
        (a.severity, b.severity),
        (a.host, b.host),
    )
    return (
        all(wide is None or (narrow is not None and set(narrow) <= set(wide)) for wide, narrow in lists)
        and all(_within(wide, narrow) for wide, narrow in ((a.xid, b.xid), (a.slot, b.slot)))
        and (not a.labels or (b.labels is not None and a.labels.items() <= b.labels.items()))
        and (a.when is None or a.when == b.when)
    )


def _within(wide: tuple[Span, ...] | None, narrow: tuple[Span, ...] | None) -> bool:
    if wide is None:
        return True
    return narrow is not None and all(any(w.first <= n.first and n.last <= w.last for w in wide) for n in narrow)


def _unused(policy: Policy) -> Iterator[Doubt]:
    spec = policy.spec
    called = {rung.hook for rule in spec.healing.rules for rung in rule.ladder}
    for name in spec.hooks:
        if name not in called:
            yield Doubt(("spec", "hooks", name), "is called by no rule")
    needed = {rule.signal for rule in spec.load.rules if not isinstance(rule, Threshold)}
    conditions = " ".join(rule.when for rule in spec.load.rules if isinstance(rule, Threshold))
    for name in spec.load.signals:
        if name not in needed and name not in conditions:
            yield Doubt(("spec", "load", "signals", name), "is used by no rule")


def _sizes(policy: Policy) -> Iterator[Doubt]:
    target, bounds = policy.spec.target, policy.spec.bounds
    place: KeyPath = ("spec", "bounds")
    if target.ranks == bounds.min_ranks:
        for index, rule in enumerate(policy.spec.healing.rules):
            for step, name in enumerate(rule.actions):
                if name in ("scale-down", "drain"):
                    text = (
                        f"{name} is not allowed at the size at start, since bounds.minRanks is {bounds.min_ranks} too"
                    )
                    yield Doubt(("spec", "healing", "rules", index, "actions", step), text)
    if bounds.divisibility > 1 and bounds.min_ranks % bounds.divisibility:
        yield Doubt(
            (*place, "divisibility"), f"does not divide minRanks {bounds.min_ranks}: the least size is above it"
        )
    if policy.spec.dry_run and policy.spec.pause:
        yield Doubt(
            ("spec", "pause"), "stands beside dryRun: a paused daemon decides nothing, so there is nothing to see"
        )
    if target.spares > target.max_ranks:
        yield Doubt(
            ("spec", "target", "spares"), f"{target.spares} are more than maxRanks {target.max_ranks} could need"
        )
    if not isinstance(target, Target):
        if target.spares and target.mode != "launch":
            yield Doubt(("spec", "target", "spares"), "are for mode: launch, whose ranks healer starts itself")
        return
    if target.ranks * target.slots_per_rank - target.slots_per_rank < target.redundant_experts:
        text = f"{target.redundant_experts} are more than all ranks but one have slots for"
        yield Doubt(("spec", "target", "redundantExperts"), text)


def _timing(policy: Policy) -> Iterator[Doubt]:
    target = policy.spec.target
    timeout = target.ep_timeout_s if isinstance(target, Target) else LEAST_EP_TIMEOUT_S
    if timeout < LEAST_EP_TIMEOUT_S:
        text = (
            f"{show_duration(timeout)} may mask ranks that pause honestly, expected {show_duration(LEAST_EP_TIMEOUT_S)}"
        )
        yield Doubt(("spec", "target", "epTimeout"), f"{text} or more")
    if policy.spec.healing.verdict_max_age_s < policy.spec.detection.silent_after_s:
        text = "is below detection.silentAfter: a verdict on silence may be too old before it is acted upon"
        yield Doubt(("spec", "healing", "verdictMaxAge"), text)


def _load(policy: Policy) -> Iterator[Doubt]:
    load, bounds = policy.spec.load, policy.spec.bounds
    place: KeyPath = ("spec", "load")
    if load.rules and bounds.min_ranks == policy.max_ranks:
        yield Doubt((*place, "rules"), f"change nothing: bounds allow {bounds.min_ranks} ranks only")
    down = load.behavior.scale_down
    if load.rules and not down.stabilization_window_s and not load.cooldown_s:
        text = "is 0s beside load.cooldown 0s: the size may swing with the load"
        yield Doubt((*place, "behavior", "scaleDown", "stabilizationWindow"), text)
