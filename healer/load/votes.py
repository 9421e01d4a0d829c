"""What each load rule says about the size. Pure.

A rule whose signal is missing keeps the size: nothing shrinks while it cannot be judged, and it lets nothing grow, except
that with `fallback: hold` a growth that it wanted a moment ago may still be finished.
"""

import math
from collections.abc import Iterator, Mapping

import msgspec

from healer.load.decision import Stance, Vote
from healer.load.forecast import Forecast
from healer.load.plan import HOLD_FACTOR, Rules
from healer.load.readings import MISSING, Known, Level
from healer.policy.expressions import ExpressionError
from healer.policy.schema import Predictive, Signal, TargetTracking, Threshold

SLACK = 1e-9
"""Of a quotient that is a whole number but for rounding."""


class Wanted(msgspec.Struct, frozen=True):
    """What a tracking rule wanted when it could last be judged."""

    at: float
    size: int


class RuleState(msgspec.Struct, frozen=True):
    """What must be known of the past to judge a rule."""

    since: Mapping[str, float] = {}
    """By threshold rule, when its condition began to hold."""
    wanted: Mapping[str, Wanted] = {}
    """By tracking rule."""


class Counted(msgspec.Struct, frozen=True):
    """The votes of one evaluation."""

    votes: tuple[Vote, ...]
    floor: Vote | None
    """Of the rule with the highest forecast, with the least size as `wanted`; None: no forecast says anything."""
    state: RuleState


def levels_or_fallback(rules: Rules, levels: Mapping[str, Level]) -> dict[str, Level]:
    """Missing signals with `fallback: {value: …}` have that value."""
    found = dict(levels)
    for name, signal in rules.policy.spec.load.signals.items():
        level = found.setdefault(name, MISSING)
        if level.known is Known.MISSING and signal.fallback.value is not None:
            found[name] = Level(Known.VALUE, signal.fallback.value)
    return found


def count(
    rules: Rules,
    state: RuleState,
    levels: Mapping[str, Level],
    forecasts: Mapping[str, Forecast],
    ranks: int,
    target: int,
    now: float,
) -> Counted:
    """One vote for each rule, in their order. `ranks` are live (at least one), `target` is the present target size."""
    votes, since, wanted = [], {}, {}
    floor: Vote | None = None
    values = {name: level.value for name, level in levels.items() if level.known is Known.VALUE}
    values["ranks"] = float(ranks)
    for rule in rules.policy.spec.load.rules:
        if isinstance(rule, Predictive):
            vote, least = _predict(rule, forecasts.get(rule.name), target, now)
            if least and (floor is None or least > floor.wanted):
                floor = msgspec.structs.replace(vote, wanted=least)
        elif isinstance(rule, TargetTracking):
            vote = _track(rule, rules, levels[rule.signal], state.wanted.get(rule.name), ranks, target, now)
            if levels[rule.signal].known is Known.VALUE:
                wanted[rule.name] = Wanted(now, vote.wanted)
            elif rule.name in state.wanted:
                wanted[rule.name] = state.wanted[rule.name]
        else:
            vote, begun = _threshold(rule, rules, levels, values, state.since.get(rule.name), target, now)
            if begun is not None:
                since[rule.name] = begun
        votes.append(vote)
    return Counted(tuple(votes), floor, RuleState(since, wanted))


def _track(
    rule: TargetTracking, rules: Rules, level: Level, last: Wanted | None, ranks: int, target: int, now: float
) -> Vote:
    if level.known is Known.MISSING:
        return _held(rule, rules.policy.spec.load.signals[rule.signal], last, target, now)
    if level.known is Known.IDLE:
        return Vote(rule.name, Stance.QUIET, target, f"{rule.signal}: nothing to measure")
    shared = rule.signal in rules.extensive
    value = level.value / ranks if shared else level.value
    ratio = max(0.0, value / rule.target)
    shown = f"{rule.signal}{' per rank' if shared else ''} {value:.3g}"
    if abs(ratio - 1) <= rule.tolerance:
        return Vote(rule.name, Stance.CONTENT, target, f"{shown} is within {rule.tolerance:.0%} of {rule.target:g}")
    if ratio > 1:
        # a target above the live ranks is being filled: what those few carry says nothing against it
        size = max(target, math.ceil(ranks * ratio - SLACK))
        text = f"{shown} over target {rule.target:g}"
    else:
        spare = 1 - rules.policy.spec.load.fit_margin
        size = min(target, max(1, math.ceil(ranks * ratio / spare - SLACK)))
        text = f"{shown} under target {rule.target:g}"
    return Vote(rule.name, Stance.CONTENT if size == target else Stance.WANTS, size, text)


def _held(rule: TargetTracking, signal: Signal, last: Wanted | None, target: int, now: float) -> Vote:
    text = f"{rule.signal} is missing"
    holds = signal.fallback.mode == "hold" and last is not None and last.size > target
    if holds and last is not None and now - last.at <= HOLD_FACTOR * signal.stale_after_s:
        return Vote(rule.name, Stance.WANTS, last.size, f"{text}, {now - last.at:.0f} s ago it wanted {last.size}")
    return Vote(rule.name, Stance.MISSING, target, text)


def _threshold(
    rule: Threshold,
    rules: Rules,
    levels: Mapping[str, Level],
    values: Mapping[str, float],
    since: float | None,
    target: int,
    now: float,
) -> tuple[Vote, float | None]:
    """The vote, and since when the condition holds."""
    for name in rules.names[rule.name]:
        known = levels[name].known
        if known is Known.MISSING:
            return Vote(rule.name, Stance.MISSING, target, f"{name} is missing"), None
        if known is Known.IDLE:
            return Vote(rule.name, Stance.QUIET, target, f"{name}: nothing to measure"), None
    try:
        holds = rules.conditions[rule.name].holds(values)
    except ExpressionError as error:  # a division by zero, say
        return Vote(rule.name, Stance.MISSING, target, str(error)), None
    if not holds:
        return Vote(rule.name, Stance.QUIET, target, f"{rule.when} does not hold"), None
    begun = now if since is None else since
    shown = ", ".join(f"{name} {values[name]:.3g}" for name in rules.names[rule.name])
    if now - begun < rule.for_s:
        text = f"{rule.when} holds for {now - begun:.0f} of {rule.for_s:g} s ({shown})"
        return Vote(rule.name, Stance.PENDING, target, text), begun
    step = math.ceil(target * rule.percent / 100 - SLACK) if rule.percent is not None else rule.step or 1
    size = target + step if rule.scale == "up" else max(1, target - step)
    stance = Stance.CONTENT if size == target else Stance.WANTS
    return Vote(rule.name, stance, size, f"{rule.when} holds for {now - begun:.0f} s ({shown})"), begun


def _predict(rule: Predictive, forecast: Forecast | None, target: int, now: float) -> tuple[Vote, int]:
    """The vote, and the least size; 0 where the forecast says nothing."""
    if forecast is None or forecast.error:
        why = forecast.error if forecast is not None else "not made yet"
        return Vote(rule.name, Stance.QUIET, target, f"no forecast of {rule.signal}: {why}"), 0
    peak = forecast.peak(now, rule.horizon_s)
    if peak is None:
        return Vote(rule.name, Stance.QUIET, target, f"the forecast of {rule.signal} is too old"), 0
    least = math.ceil(peak / rule.target - SLACK)
    text = f"{rule.signal} will reach {peak:.3g} within {rule.horizon_s:g} s, {rule.target:g} per rank"
    if least > target:
        return Vote(rule.name, Stance.WANTS, least, text), least
    return Vote(rule.name, Stance.QUIET, target, text), least


def overloads(rules: Rules, levels: Mapping[str, Level], ranks: int, size: int) -> Iterator[str]:
    """Each rule that would ask to grow, were the present load on `size` ranks with the margin on top, as a reason.

    What the ranks share stays the same in sum; other values are taken to grow as the load per rank does.
    """
    load = rules.policy.spec.load
    margin = 1 / (1 - load.fit_margin)
    more = ranks / size * margin
    values = {
        name: level.value * (margin if name in rules.extensive else more)
        for name, level in levels.items()
        if level.known is Known.VALUE
    }
    values["ranks"] = float(size)
    for rule in load.rules:
        if (
            not isinstance(rule, Threshold)
            or rule.scale != "up"
            or any(n not in values for n in rules.names[rule.name])
        ):
            continue
        try:
            if rules.conditions[rule.name].holds(values):
                shown = ", ".join(f"{name} {values[name]:.3g}" for name in rules.names[rule.name])
                yield f"{shown} would meet {rule.when} of {rule.name}"
        except ExpressionError:
            continue
