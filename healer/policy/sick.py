"""Ranks that are live and unhealthy, or about which a rule asks for a hook: what is done about them. Pure.

Ranks with the same rule, cause and place on the ladder are decided upon together.
"""

import msgspec

from healer.diagnosis import Cause
from healer.policy import guards
from healer.policy.bounds import Block, fewer_serving
from healer.policy.ladder import Turn, turn
from healer.policy.memory import Ladder, Phase
from healer.policy.reasons import Reason, Step
from healer.policy.records import Decision
from healer.policy.round import Case, Round, decision, show
from healer.policy.rules import CompiledRule
from healer.policy.schema import Rule, Rung


class _Choice(msgspec.Struct, frozen=True):
    """An action of the ladder that is allowed, before the guards."""

    step: Step
    reason: Reason
    rung: int
    hook: str = ""
    note: str = ""


def heal(round_: Round) -> list[Decision]:
    """One decision or more for every verdict that a rule could answer, urgent ones first."""
    groups: dict[tuple[object, ...], tuple[Turn, list[Case]]] = {}
    for verdict in round_.present:
        if verdict.health != "unhealthy" and not round_.book.concerns(verdict):
            continue
        case = round_.case(verdict)
        if case.rule is None and not case.unhealthy:
            continue
        place = _place(round_, case)
        quarantined = round_.quarantined(case.rank.slot)
        name = case.rule.name if case.rule else ""
        key = (name, verdict.cause, verdict.health, case.dead, case.urgent, quarantined, place.rung, place.reason)
        groups.setdefault(key, (place, []))[1].append(case)
    found: list[Decision] = []
    for place, members in sorted(groups.values(), key=lambda group: not group[1][0].urgent):
        for one in _decide(round_, place, members):
            found.append(round_.count(one))
    return found


def _place(round_: Round, case: Case) -> Turn:
    """Where the case stands on its ladder, or why it waits."""
    if case.rule is None:
        return Turn(0, Reason.NO_RULE)
    memory, now = round_.state.memory, round_.now
    ladder = memory.ladders.get(case.rank.slot)
    begun = ladder is not None and ladder.rank == case.rank
    if not begun:
        waits = case.rule.waits_for(case.facts)
        if waits is not None:
            return Turn(0, Reason.AWAITING_EVIDENCE, str(waits))
    if case.unhealthy and not case.dead:
        hold = guards.settling(round_.policy, case.verdict, memory, now)
        if hold is None and not begun:
            hold = guards.stale(round_.policy, case.verdict, case.facts.evidence, memory, now)
        if hold is not None:
            return Turn(0, hold.reason, hold.text)
    place = turn(round_.policy, case.rule.rule, ladder, case.rank, now)
    if ladder is None or not begun or not case.urgent or ladder.rule != case.rule.name:
        return place
    return _no_time(case, case.rule.rule, ladder, place)


def _no_time(case: Case, rule: Rule, ladder: Ladder, place: Turn) -> Turn:
    """The group waits for this rank: what waits for the rank's own help is not waited for any longer."""
    action = rule.ladder[ladder.rung].action if ladder.rung < len(rule.ladder) else "human"
    if action == "hook" and ladder.phase != Phase.EMPTYING:
        return Turn(ladder.rung + 1, Reason.RULE_MATCHED)  # it ran alongside
    if place.reason == Reason.RUNNING:
        return Turn(ladder.rung, Reason.RULE_MATCHED)  # a drain; a rank that was ended is not judged any more
    if case.dead and place.reason == Reason.BACKOFF and action == "retry":
        return Turn(ladder.rung + 1, Reason.NEXT_ACTION)
    if case.dead and place.reason == Reason.BACKOFF and ladder.cause != case.verdict.cause:
        return Turn(ladder.rung, Reason.RETRY_DUE)  # the attempt failed while it still served
    return place


_WAITING = frozenset(
    {Reason.AWAITING_EVIDENCE, Reason.STALE, Reason.TELEMETRY_SETTLING, Reason.BACKOFF, Reason.RUNNING}
)


def _decide(round_: Round, place: Turn, members: list[Case]) -> list[Decision]:
    rule = members[0].rule
    if rule is None:
        return [
            _nothing(
                place.reason, members, f"did nothing, {_which(members)} needs a human (no rule matches)", human=True
            )
        ]
    if place.reason in _WAITING:
        head = f"did nothing about {_which(members)} (rule {rule.name}), {place.text}"
        return [_nothing(place.reason, members, head, rung=place.rung)]
    alongside, choice = _choose(round_, rule, place, members)
    found = [_decision(one, members, rule, destructive=False) for one in alongside]
    return found + _guarded(round_, rule, choice, members)


def _choose(round_: Round, rule: CompiledRule, place: Turn, members: list[Case]) -> tuple[list[_Choice], _Choice]:
    """The first action from the ladder's place on that is allowed; before it, hooks that run alongside."""
    first, ladder = members[0], rule.rule.ladder
    quarantined = round_.quarantined(first.rank.slot)
    alongside: list[_Choice] = []
    reason, block = place.reason, None
    for index in range(place.rung, len(ladder)):
        rung = ladder[index]
        if rung.action == "human":
            break
        if not first.unhealthy and _touches(round_, rung):
            block = Block(Reason.NOT_UNHEALTHY, f"the rank is {first.verdict.health}")
        elif rung.action == "retry":
            if not first.dead:
                return alongside, _Choice(Step.RETRY, reason, index)
            continue
        elif rung.action == "hook" and not _touches(round_, rung):
            one = _Choice(Step.HOOK, reason, index, hook=rung.hook or "")
            if not first.urgent:
                return alongside, one
            alongside.append(one)
            continue
        elif rung.action == "replace" and not quarantined:
            block = None if first.urgent else fewer_serving(round_.policy, round_.state, removed=len(members))
            if block is None:
                return alongside, _Choice(Step.REPLACE, reason, index)
        else:
            block = _may_leave(round_, members)
            if block is not None and rung.action == "replace" and first.urgent:
                note = f"; quarantined, and filled again all the same, since {block.text}"
                return alongside, _Choice(Step.REPLACE, block.reason, index, note=note)
            if block is None:
                graceful = not first.urgent and rung.action != "scale-down"
                step = Step.DRAIN if graceful else Step.SCALE_DOWN
                if rung.action == "replace":
                    held = round_.state.memory.quarantined[first.rank.slot]
                    return alongside, _Choice(step, Reason.QUARANTINED, index, note=f"; quarantined: {held.why}")
                return alongside, _Choice(step, reason, index, hook=rung.hook or "")
        reason = block.reason
    note = ""
    if block is not None:
        what = "scaled down" if block.reason == Reason.BELOW_MIN_RANKS else "touched"
        note = f"; not {what}, since {block.text}"
    if block is not None and first.urgent and not any(rung.action == "human" for rung in ladder):
        # the survivors must be released whatever the bounds say; replacing keeps the intended size
        return alongside, _Choice(Step.REPLACE, block.reason, len(ladder), note=note)
    if block is None:
        says_human = place.reason == Reason.RULE_MATCHED and ladder[-1].action == "human"
        reason = Reason.RULE_SAYS_HUMAN if says_human else Reason.ATTEMPTS_EXHAUSTED
    return alongside, _Choice(Step.HUMAN, reason, len(ladder), note=note or (f"; {place.text}" if place.text else ""))


def _touches(round_: Round, rung: Rung) -> bool:
    """Does the action do anything to the rank, its GPU or its host?"""
    if rung.action != "hook":
        return rung.action not in ("retry", "human")
    hook = round_.policy.spec.hooks.get(rung.hook or "")
    return hook is not None and hook.destructive


def _may_leave(round_: Round, members: list[Case]) -> Block | None:
    """May these ranks leave the target?"""
    in_target = sum(case.rank.slot in round_.state.target for case in members)
    block = round_.may_shrink(in_target)
    if block is None and not members[0].urgent:
        block = fewer_serving(round_.policy, round_.state, removed=len(members))
    return block


def _guarded(round_: Round, rule: CompiledRule, choice: _Choice, members: list[Case]) -> list[Decision]:
    """The choice, or what is left of it after the guards; what they hold back is decided upon again in the next round."""
    first = members[0]
    ends_rank = choice.step in (Step.REPLACE, Step.SCALE_DOWN, Step.DRAIN)
    hook = round_.policy.spec.hooks.get(choice.hook)
    destructive = (ends_rank and not first.dead) or (hook is not None and hook.destructive)
    if not destructive:
        return [_decision(choice, members, rule, destructive=False)]
    if not first.urgent and round_.reconfigures:
        what = round_.state.sequence or "decided a moment ago"
        return [_held(Reason.QUEUED, f"waits for the reconfiguration in flight ({what})", choice, rule, members)]
    room = round_.breaker_room()
    if room is not None and room < len(members):
        if first.dead:
            # without the hook it is recovery, and no guard stands in its way
            note = "; its hook is held back by the circuit breaker"
            plain = _Choice(Step.REPLACE, Reason.BREAKER_OPEN, len(rule.rule.ladder), note=note)
            return [_decision(plain, members, rule, destructive=False)]
        breaker = round_.policy.spec.bounds.breaker
        limit = (
            f"more than {breaker.max_destructive} destructive steps within {breaker.window_s:g} s" if breaker else ""
        )
        why = round_.state.memory.breaker_why or limit
        return [_held(Reason.BREAKER_OPEN, f"the circuit breaker is open: {why}", choice, rule, members)]
    if first.urgent:
        return [_decision(choice, members, rule, destructive=True)]
    most = round_.policy.spec.bounds.max_unavailable
    free = len(members) if most is None else max(0, most - round_.away)
    now, later = members[:free], members[free:]
    found = [_decision(choice, now, rule, destructive=True)] if now else []
    if later:
        found.append(_held(Reason.MAX_UNAVAILABLE, f"bounds.maxUnavailable is {most}", choice, rule, later))
    return found


_VERBS = {
    Step.REPLACE: "replaces {which}",
    Step.SCALE_DOWN: "scales down by {which}",
    Step.DRAIN: "drains {which}",
    Step.RETRY: "gives {which} time to come back",
    Step.HOOK: "runs hook {hook} for {which}",
}


_AGAIN = "runs the step again for {which}"
"""A retry where no rank is what the others wait for."""


def _decision(choice: _Choice, members: list[Case], rule: CompiledRule, *, destructive: bool) -> Decision:
    head = _heading(choice, members, rule)
    return decision(
        choice.step,
        choice.reason,
        [case.rank.slot for case in members],
        f"{head}: {'; '.join(case.verdict.sentence for case in members)}{choice.note}",
        rule=rule.name,
        cause=members[0].verdict.cause,
        verdicts=tuple(case.verdict for case in members),
        rung=choice.rung,
        hook=choice.hook,
        destructive=destructive,
    )


def _heading(choice: _Choice, members: list[Case], rule: CompiledRule) -> str:
    which = _which(members)
    if choice.step == Step.HUMAN:
        return f"did nothing, {which} needs a human (rule {rule.name})"
    again = choice.step == Step.RETRY and members[0].verdict.cause == Cause.MUTUAL_WAIT
    verb = (_AGAIN if again else _VERBS[choice.step]).format(which=which, hook=choice.hook)
    then = f", for hook {choice.hook}" if choice.hook and choice.step != Step.HOOK else ""
    return f"{verb}{then} (rule {rule.name})"


def _held(reason: Reason, text: str, choice: _Choice, rule: CompiledRule, members: list[Case]) -> Decision:
    head = f"did nothing, {text}; without it: {_heading(choice, members, rule)}"
    return _nothing(reason, members, head, rung=choice.rung)


def _nothing(reason: Reason, members: list[Case], head: str, *, rung: int = 0, human: bool = False) -> Decision:
    rule = members[0].rule
    return decision(
        Step.HUMAN if human else Step.NONE,
        reason,
        [case.rank.slot for case in members],
        f"{head}: {'; '.join(case.verdict.sentence for case in members)}",
        rule=rule.name if rule else "",
        cause=members[0].verdict.cause,
        verdicts=tuple(case.verdict for case in members),
        rung=rung,
    )


def _which(members: list[Case]) -> str:
    return show([case.rank.slot for case in members])
