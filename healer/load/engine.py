"""From votes to a size: the largest wish, held back by windows, rates and cool-down, then cut to the bounds. Pure: the
state goes in and comes out, and the time is an argument.

The order, each step able to hold back what the one before it let through:
1. the largest size that a rule votes for, at least the forecasts' floor;
2. smaller only if no rule would then want to grow (`fitMargin`);
3. stabilisation windows, rates, `selectPolicy`;
4. cool-down after any change of size, whoever made it;
5. schedules and `spec.bounds`: these need no rule and no window, since they are limits and not wishes;
6. one change at a time, and none while something is being healed.
"""

import math
from collections.abc import Mapping

import msgspec

from healer.load.behavior import Wish, limited, memory_s, remember, stabilised
from healer.load.decision import Change, ScaleDecision, Stance, Vote
from healer.load.forecast import Forecast
from healer.load.plan import Rules
from healer.load.readings import Level
from healer.load.votes import Counted, RuleState, count, levels_or_fallback, overloads
from healer.policy.reasons import Reason
from healer.policy.schedules import InForce


class Group(msgspec.Struct, frozen=True):
    """The group, as far as its size is concerned."""

    target: int
    """Ranks that should be live."""
    live: int
    """Ranks that are."""
    held: str = ""
    """Why no change may be begun now, such as a reconfiguration, an incident, a pause; empty: one may."""
    least: int = 1
    """Fewer ranks have no room for every expert and the redundancy that the policy asks for."""


class Seen(msgspec.Struct, frozen=True):
    """Everything that one evaluation looks at."""

    group: Group
    levels: Mapping[str, Level]
    """By signal; absent: missing."""
    forecasts: Mapping[str, Forecast] = {}
    """By predictive rule."""
    calendar: InForce = InForce()
    rank_hours: float = 0.0
    """Spent since midnight UTC."""


class ScalerState(msgspec.Struct, frozen=True):
    """What one evaluation hands to the next."""

    target: int = -1
    """At the last evaluation; -1: there was none."""
    live: int = -1
    changed_at: float = -math.inf
    """When the target or the number of live ranks changed last."""
    changes: tuple[Change, ...] = ()
    wishes: tuple[Wish, ...] = ()
    rules: RuleState = RuleState()
    refused: str = ""
    """What the executor said when it refused a size; kept until the cool-down from then is over."""
    refused_at: float = -math.inf


class Limits(msgspec.Struct, frozen=True):
    """The sizes that are allowed now, and who says so."""

    low: int
    high: int
    low_by: str
    high_by: str


def evaluate(rules: Rules, state: ScalerState, seen: Seen, now: float) -> tuple[ScaleDecision, ScalerState]:
    """One decision, with a sentence, and the state for the next."""
    group, spec = seen.group, rules.policy.spec
    state = _observed(rules, state, group, now)
    limits = limits_of(rules, seen)
    if group.live < 1:
        said = _Said(Reason.STARTING, group.target, group.target, "", "no rank is live yet")
        return _decision(said, group, rules, ()), state
    levels = levels_or_fallback(rules, seen.levels)
    counted = count(rules, state.rules, levels, seen.forecasts, group.live, group.target, now)
    state = msgspec.structs.replace(state, rules=counted.state)
    wanted, lead = _wanted(counted, group.target)
    state = msgspec.structs.replace(state, wishes=remember(state.wishes, wanted, now, rules.longest_window_s + 1.0))
    said = _size(rules, state, seen, levels, counted, wanted, lead, limits, now) if spec.load.rules else _idle(group)
    said = _bounded(said, group, limits)
    if said.size != group.target and group.held:
        said = _Said(Reason.HELD, said.wanted, group.target, said.rule, said.because, f"held: {group.held}")
    return _decision(said, group, rules, counted.votes), state


def limits_of(rules: Rules, seen: Seen) -> Limits:
    """`spec.bounds`, narrowed by the schedules in force: what a schedule asks beyond spec.bounds does not count."""
    policy, calendar = rules.policy, seen.calendar
    bounds, unit = policy.spec.bounds, policy.spec.bounds.divisibility
    low, low_by = max(bounds.min_ranks, seen.group.least), "spec.bounds.minRanks"
    if seen.group.least > bounds.min_ranks:
        low_by = "room for every expert and spec.bounds.redundancyFloor"
    high, high_by = policy.max_ranks, "spec.bounds.maxRanks"
    if calendar.max_ranks is not None and calendar.max_ranks < high:
        high, high_by = max(calendar.max_ranks, low), f"schedule {calendar.ceiling_by}"
    if calendar.min_ranks > low:
        low, low_by = calendar.min_ranks, f"schedule {calendar.floor_by}"
    high = max(high - high % unit, min(unit, high))
    low = min(math.ceil(low / unit) * unit, high)
    return Limits(low, high, low_by, high_by)


def refused(state: ScalerState, why: str, now: float) -> ScalerState:
    """The executor would not: it is left alone for a cool-down."""
    return msgspec.structs.replace(state, refused=why, refused_at=now)


class _Said(msgspec.Struct, frozen=True):
    """A decision in the making."""

    reason: Reason
    wanted: int
    size: int
    rule: str
    because: str
    held: str = ""
    """Why `wanted` is not done, or not wholly."""
    held_s: float = 0.0


def _observed(rules: Rules, state: ScalerState, group: Group, now: float) -> ScalerState:
    """Notice changes of size, whoever made them."""
    change = msgspec.structs.replace
    if state.target < 0:
        # as if the present size had been wanted until now: a daemon that starts does not scale on its first look
        wishes = (Wish(now, now, group.target),)
        return change(state, target=group.target, live=group.live, changed_at=now, wishes=wishes)
    if group.target != state.target:
        keep_s = memory_s(rules.policy.spec.load.behavior)
        changes = (*(c for c in state.changes if c.at > now - keep_s), Change(now, state.target, group.target))
        # a condition must hold for its time at the new size
        rule_state = RuleState({}, state.rules.wanted)
        state = change(state, target=group.target, changes=changes, changed_at=now, rules=rule_state)
    if group.live != state.live:
        state = change(state, live=group.live, changed_at=now)
    return state


def _wanted(counted: Counted, target: int) -> tuple[int, Vote | None]:
    """The largest wish and whose it is. Rules that are content or cannot be judged wish for the present size; those that
    are quiet wish for nothing."""
    heard = [v for v in counted.votes if v.stance in (Stance.WANTS, Stance.CONTENT, Stance.MISSING)]
    lead = max(heard, key=lambda vote: vote.wanted, default=None)
    if counted.floor is not None and counted.floor.wanted > (lead.wanted if lead else target):
        lead = counted.floor
    return (lead.wanted if lead else target), lead


def _size(
    rules: Rules,
    state: ScalerState,
    seen: Seen,
    levels: Mapping[str, Level],
    counted: Counted,
    wanted: int,
    lead: Vote | None,
    limits: Limits,
    now: float,
) -> _Said:
    """What the rules come to, before the hard bounds."""
    group, load = seen.group, rules.policy.spec.load
    current = group.target
    if wanted == current or lead is None:
        return _content(counted, current)
    rule, because = lead.rule, lead.text
    held = _Said(Reason.CONTENT, wanted, current, rule, because)
    replace = msgspec.structs.replace
    aim = _cut(wanted, current, limits)
    if aim == current:
        by = limits.high_by if wanted > current else limits.low_by
        return replace(held, reason=Reason.AT_BOUND, held=f"at the bound of {by}")
    if aim < current:
        aim, misfit = _fitting(rules, levels, group, aim)
        if aim == current:
            return replace(held, reason=Reason.DOES_NOT_FIT, held=f"the load does not fit: {misfit}")
    size, held_s = stabilised(state.wishes, current, aim, load.behavior, now)
    text = f"held by stabilisation for {held_s:.0f} s" if held_s else ""
    if size == current:
        return replace(held, reason=Reason.STABILISATION, held=text, held_s=held_s)
    direction = load.behavior.scale_up if size > current else load.behavior.scale_down
    if direction.select_policy == "disabled":
        way = "up" if size > current else "down"
        return replace(held, reason=Reason.DISABLED, held=f"scaling {way} is disabled by behavior")
    if size > current and _spent(rules, seen) and size > limits.low:
        text = f"held: {seen.rank_hours:.1f} rank-hours are spent of spec.bounds.budgetRankHoursPerDay"
        return replace(held, reason=Reason.BUDGET, held=text)
    aim = size
    size, wait_s = limited(state.changes, current, aim, direction, now)
    size = _whole(size, aim, current, rules.policy.spec.bounds.divisibility, fresh=wait_s == 0)
    if size == current:
        text = f"held by the rate limits for {wait_s:.0f} s"
        return replace(held, reason=Reason.RATE, held=text, held_s=wait_s)
    cooldown_s = state.changed_at + load.cooldown_s - now
    if cooldown_s > 0:
        text = f"held by the cool-down for {cooldown_s:.0f} s"
        return replace(held, reason=Reason.COOLDOWN, held=text, held_s=cooldown_s)
    refused_s = state.refused_at + max(load.cooldown_s, load.interval_s) - now
    if state.refused and refused_s > 0:
        text = f"refused a moment ago: {state.refused}; asked again in {refused_s:.0f} s"
        return replace(held, reason=Reason.REFUSED, held=text, held_s=refused_s)
    return replace(held, reason=Reason.RULE, size=size)


def _fitting(rules: Rules, levels: Mapping[str, Level], group: Group, wanted: int) -> tuple[int, str]:
    """The least size from `wanted` to the present one that the load fits, and what would not fit one rank less; empty:
    `wanted` fits. What fits a size fits every larger one."""
    low, high, why = wanted, group.target, ""
    while low < high:
        middle = (low + high) // 2
        found = next(overloads(rules, levels, group.live, middle), None)
        if found is None:
            high = middle
        else:
            low, why = middle + 1, found
    return high, why


def _content(counted: Counted, current: int) -> _Said:
    missing = [v for v in counted.votes if v.stance is Stance.MISSING]
    if missing:
        others = f" and {len(missing) - 1} more rules" if len(missing) > 1 else ""
        return _Said(Reason.SIGNAL_MISSING, current, current, missing[0].rule, f"{missing[0].text}{others}")
    content = next((v for v in counted.votes if v.stance is Stance.CONTENT), None)
    pending = next((v for v in counted.votes if v.stance is Stance.PENDING), None)
    held_up = counted.floor if counted.floor is not None and counted.floor.wanted == current else None
    first = pending or content or held_up or (counted.votes[0] if counted.votes else None)
    return _Said(Reason.CONTENT, current, current, first.rule if first else "", first.text if first else "")


def _idle(group: Group) -> _Said:
    return _Said(Reason.NO_RULES, group.target, group.target, "", "the policy has no load rules")


def _cut(size: int, current: int, limits: Limits) -> int:
    """`size` within the bounds, but never past `current` in the other direction."""
    cut = min(max(size, limits.low), limits.high)
    return max(cut, current) if size > current else min(cut, current)


def _whole(size: int, aim: int, current: int, unit: int, *, fresh: bool) -> int:
    """The multiple of `unit` that `size` reaches on the way to `aim`. Where the rates allow less than one unit, one is
    taken all the same as the first change of a period: else nothing would ever change."""
    if unit == 1:
        return size
    if size > current:
        whole = math.ceil(size / unit) * unit if size == aim else size - size % unit
        return whole if whole > current else (current - current % unit + unit if fresh else current)
    whole = math.ceil(size / unit) * unit
    return whole if whole < current else (math.ceil(current / unit) * unit - unit if fresh and size != aim else current)


def _spent(rules: Rules, seen: Seen) -> bool:
    budget = rules.policy.spec.bounds.budget_rank_hours_per_day
    return budget is not None and seen.rank_hours >= budget


def _bounded(said: _Said, group: Group, limits: Limits) -> _Said:
    """The bounds, last and always."""
    size = min(max(said.size, limits.low), limits.high)
    if size == said.size:
        return said
    by = limits.low_by if size > said.size else limits.high_by
    word = "at least" if size > said.size else "at most"
    if size == group.target:
        return msgspec.structs.replace(said, reason=Reason.AT_BOUND, size=size, held=f"{word} {size} by {by}")
    reason = Reason.SCHEDULE if by.startswith("schedule ") else Reason.BOUNDS
    return _Said(reason, said.wanted, size, "", f"{word} {size} by {by}")


def _decision(said: _Said, group: Group, rules: Rules, votes: tuple[Vote, ...]) -> ScaleDecision:
    current, dry = group.target, rules.policy.spec.dry_run
    aim = said.size if said.size != current else said.wanted
    because = f": {said.because}" if said.because else ""
    held = f"; {said.held}" if said.held else ""
    if aim == current:
        sentence = f"keeps {current} ranks{because}{held}"
    elif said.size != current and not dry:
        wish = f" (of {said.wanted} wanted)" if said.wanted != said.size and said.rule else ""
        sentence = f"scales {current} -> {said.size}{wish}{because}{held}"
    else:
        sentence = f"would scale {current} -> {aim}{because}{held or ('; dry run' if dry else '')}"
    return ScaleDecision(
        reason=said.reason,
        current=current,
        wanted=said.wanted,
        size=said.size,
        rule=said.rule,
        sentence=sentence,
        held_s=said.held_s,
        votes=votes,
        dry_run=dry,
    )
