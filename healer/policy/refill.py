"""Empty slots that healing still has to do with: replacements that failed, hooks that run in an emptied slot, quarantines
that have ended. Pure.
"""

import msgspec

from healer.diagnosis import Cause
from healer.policy import bounds
from healer.policy.ladder import Turn, backoff_s, turn_of_empty
from healer.policy.memory import FailedRefill, Ladder, Phase
from healer.policy.reasons import Reason, Step
from healer.policy.records import Decision
from healer.policy.round import Round, decision, show
from healer.policy.rules import CompiledRule


class _Next(msgspec.Struct, frozen=True):
    step: Step
    reason: Reason
    text: str
    rung: int = 0
    hook: str = ""
    destructive: bool = False


def refill(round_: Round) -> list[Decision]:
    """One decision for every such slot, by slot."""
    state, memory = round_.state, round_.state.memory
    live = {rank.slot for rank in state.live}
    found = []
    for slot in sorted({*state.failed, *memory.ladders, *memory.returning} - live):
        one = _slot(round_, slot, state.failed.get(slot), memory.ladders.get(slot))
        if one is not None:
            found.append(round_.count(one))
    return found


def _slot(round_: Round, slot: int, failed: FailedRefill | None, ladder: Ladder | None) -> Decision | None:
    if failed is not None and (failed.asked or slot not in round_.state.target):
        failed = None
    name = failed.rule if failed is not None else ladder.rule if ladder is not None else ""
    rule = round_.book.by_name.get(name)
    at_hook = (
        rule is not None
        and ladder is not None
        and ladder.rule == name
        and ladder.rung < len(rule.rule.ladder)
        and rule.rule.ladder[ladder.rung].action == "hook"
    )
    why = failed.why if failed is not None else ""
    todo: _Next | None = None
    if failed is not None and round_.quarantined(slot):
        todo = _quarantined(round_, slot, len(rule.rule.ladder) if rule is not None else 0)
    elif at_hook and rule is not None and ladder is not None:
        todo = _after_hook(round_, rule, ladder, failed, slot)
    elif failed is not None:
        todo = _after_replacement(round_, rule, failed, slot)
    elif slot in round_.state.memory.returning and slot not in round_.state.target:
        todo, name = _returning(round_, slot), ""
    if todo is None:
        return None
    sentence = f"{todo.text}{f': {why}' if why else ''}"
    return decision(
        todo.step,
        todo.reason,
        (slot,),
        sentence,
        rule=name,
        cause=ladder.cause if ladder is not None else Cause.NONE,
        rung=todo.rung,
        hook=todo.hook,
        destructive=todo.destructive,
    )


def _after_replacement(round_: Round, rule: CompiledRule | None, failed: FailedRefill, slot: int) -> _Next:
    if rule is None:
        return _Next(Step.HUMAN, Reason.BOOT_FAILED, "did nothing, a rank does not start and needs a human")
    ladder = rule.rule.ladder
    at = next((i for i, rung in enumerate(ladder) if rung.action == "replace"), len(ladder))
    rung = ladder[at] if at < len(ladder) else None
    most = rule.rule.max_attempts if rung is None else rule.rule.attempts_of(rung)
    tried = f"{failed.attempts} of {most} replacements failed"
    if failed.attempts < most:
        pause_s = backoff_s(rule.rule, failed.attempts, rung)
        if round_.now < failed.failed_at + pause_s:
            return _Next(Step.NONE, Reason.BACKOFF, f"did nothing, {tried}, waiting {pause_s:g} s", at)
        return _Next(Step.REFILL, Reason.REPLACEMENT_FAILED, f"asks for a replacement again, {tried}", at)
    if rung is not None and rung.on_failure == "human":
        return _Next(Step.HUMAN, Reason.ATTEMPTS_EXHAUSTED, f"did nothing, {tried}; needs a human", at)
    return _walk(round_, rule, 0 if rung is None else at + 1, tried, slot)


def _after_hook(
    round_: Round, rule: CompiledRule, ladder: Ladder, failed: FailedRefill | None, slot: int
) -> _Next | None:
    if ladder.phase == Phase.REFILLING:
        if failed is None:
            return None  # a rank was asked for; the target is at work
        ladder = msgspec.structs.replace(ladder, phase=Phase.FAILED, at=failed.failed_at, why="the rank did not start")
    if ladder.phase == Phase.EMPTYING and slot in round_.state.occupied:
        return _Next(Step.NONE, Reason.RUNNING, f"did nothing, slot {slot} is being emptied", ladder.rung)
    place = turn_of_empty(round_.policy, rule.rule, ladder, round_.now)
    if place.waits:
        return _Next(Step.NONE, place.reason, f"did nothing, {place.text}", ladder.rung)
    if place.reason == Reason.REPAIRED:
        return _ask(round_, slot, Reason.REPAIRED, f"asks for a rank in slot {slot}, {place.text}", ladder.rung)
    if place.reason == Reason.ATTEMPTS_EXHAUSTED:
        return _Next(Step.HUMAN, place.reason, f"did nothing, {place.text}; needs a human", ladder.rung)
    if place.rung == ladder.rung:
        return _hook(round_, rule, place, slot)
    return _walk(round_, rule, place.rung, place.text, slot)


def _walk(round_: Round, rule: CompiledRule, start: int, tried: str, slot: int) -> _Next:
    """The next action that makes sense for an empty slot and is allowed."""
    ladder = rule.rule.ladder
    for index in range(start, len(ladder)):
        rung = ladder[index]
        if rung.action == "human":
            break
        if rung.action == "retry":
            continue
        if rung.action == "replace":
            return _ask(round_, slot, Reason.NEXT_ACTION, f"asks for a replacement, {tried}", index)
        if rung.action == "hook":
            return _hook(round_, rule, Turn(index, Reason.NEXT_ACTION, tried), slot)
        if slot not in round_.state.target:
            return _Next(Step.HUMAN, Reason.ATTEMPTS_EXHAUSTED, f"did nothing, {tried}; the slot is given up", index)
        if round_.size - 1 >= round_.policy.spec.bounds.min_ranks:
            return _Next(Step.GIVE_UP, Reason.ATTEMPTS_EXHAUSTED, f"gives the slot up, {tried}", index)
        text = f"did nothing, {tried}, and a smaller group is below bounds.minRanks"
        return _Next(Step.HUMAN, Reason.BELOW_MIN_RANKS, text, index)
    return _Next(Step.HUMAN, Reason.ATTEMPTS_EXHAUSTED, f"did nothing, {tried}; needs a human", len(ladder))


def _hook(round_: Round, rule: CompiledRule, place: Turn, slot: int) -> _Next:
    name = rule.rule.ladder[place.rung].hook or ""
    hook = round_.policy.spec.hooks.get(name)
    ladder = round_.state.memory.ladders.get(slot)
    begun = ladder is not None and ladder.phase == Phase.EMPTYING
    destructive = hook is not None and hook.destructive and not begun  # counted when the slot was emptied for it
    if destructive and round_.breaker_room() == 0:
        if ladder is not None and ladder.cause == Cause.PROCESS_DEATH:
            # without the hook it is recovery, and no guard stands in its way
            text = f"asks for a rank in slot {slot} without hook {name}, which the circuit breaker holds back, {place.text}"
            return _ask(round_, slot, Reason.BREAKER_OPEN, text, len(rule.rule.ladder))
        text = f"did nothing, the circuit breaker is open; without it: runs hook {name} for {show([slot])}"
        return _Next(Step.NONE, Reason.BREAKER_OPEN, text, place.rung)
    text = f"runs hook {name} for {show([slot])}, {place.text}"
    return _Next(Step.HOOK, place.reason, text, place.rung, hook=name, destructive=destructive)


def _ask(round_: Round, slot: int, reason: Reason, text: str, rung: int) -> _Next:
    block = bounds.larger(round_.policy, round_.state, {*round_.state.target, slot})
    if block is None and slot not in round_.state.target and round_.size + 1 > round_.policy.max_ranks:
        block = bounds.Block(Reason.ABOVE_MAX_RANKS, f"the maximum is {round_.policy.max_ranks} ranks")
    if block is not None:
        return _Next(Step.NONE, block.reason, f"did nothing, since {block.text}; without it: {text}", rung)
    return _Next(Step.REFILL, reason, text, rung)


def _quarantined(round_: Round, slot: int, rung: int) -> _Next:
    """A replacement failed in a slot whose fault budget is spent."""
    held = round_.state.memory.quarantined[slot]
    if round_.size - 1 >= round_.policy.spec.bounds.min_ranks:
        return _Next(Step.GIVE_UP, Reason.QUARANTINED, f"gives the slot up, it is quarantined ({held.why})", rung)
    return _Next(Step.NONE, Reason.QUARANTINED, f"did nothing, the slot is quarantined ({held.why})", rung)


def _returning(round_: Round, slot: int) -> _Next:
    return _ask(round_, slot, Reason.QUARANTINE_OVER, f"asks for a rank in slot {slot}, its quarantine has ended", 0)
