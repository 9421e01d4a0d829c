"""What healing notes of the verdicts of a moment, before it decides upon them. Pure: the same state gives the same notes."""

from collections.abc import Collection, Iterator

from healer.diagnosis import Cause, Health, Verdict
from healer.evidence import RankRef
from healer.policy import guards
from healer.policy.ladder import backoff_s
from healer.policy.memory import (
    BreakerOpened,
    Fault,
    FaultsSeen,
    Ladder,
    Memory,
    Note,
    Quarantined,
    QuarantineOver,
    Recovered,
    TelemetryBack,
    TelemetryLost,
    remember,
)
from healer.policy.probation import on_hold
from healer.policy.records import State
from healer.policy.rules import RuleBook, book_of
from healer.policy.schema import Policy, Rule


def observe(policy: Policy, verdicts: Collection[Verdict], state: State, now: float) -> tuple[Note, ...]:
    """New faults, recoveries, quarantines that begin or end, a breaker that opens, telemetry that goes or comes back.

    The caller gives each note to `remember` and writes it to the journal, then decides with the new memory."""
    book, memory = book_of(policy), state.memory
    by_rank = {v.rank: v for v in verdicts if isinstance(v.subject, RankRef)}
    found: list[Note] = []
    for note in _telemetry(by_rank.values(), memory, now):
        found.append(note)
        memory = remember(memory, note)
    live = {rank.slot: rank for rank in state.live}
    for slot in sorted({*memory.ladders, *memory.faulty}):
        if _recovered(book, memory, slot, live.get(slot), by_rank, state, now):
            found.append(Recovered(slot, now))
    for note in found:
        memory = remember(memory, note)
    able = guards.observing(policy, state) is None and memory.breaker_open_since is None and not policy.spec.dry_run
    faults = []
    for rank in state.live:
        verdict = by_rank.get(rank)
        if verdict is None or verdict.health != Health.UNHEALTHY or memory.faulty.get(rank.slot) == rank:
            continue
        evidence = [state.evidence[one] for one in verdict.evidence if one in state.evidence]
        fresh = guards.stale(policy, verdict, evidence, memory, now) is None
        faults.append(Fault(rank, verdict.cause, able and fresh))
    if faults:
        seen = FaultsSeen(tuple(faults), now)
        found.append(seen)
        memory = remember(memory, seen)
    found += _quarantines(policy, memory, now)
    if memory.breaker_open_since is None and guards.breaker_room(policy, memory, now) == 0:
        breaker = policy.spec.bounds.breaker
        if breaker is not None:
            why = f"{breaker.max_destructive} destructive steps within {breaker.window_s:g} s"
            found.append(BreakerOpened(why, now))
    return tuple(found)


def _telemetry(verdicts: Collection[Verdict], memory: Memory, now: float) -> Iterator[Note]:
    lost = any(v.cause == Cause.TELEMETRY_LOST for v in verdicts)
    if lost and not memory.telemetry_lost:
        yield TelemetryLost(now)
    elif memory.telemetry_lost and not lost and verdicts:
        yield TelemetryBack(now)


def _recovered(
    book: RuleBook,
    memory: Memory,
    slot: int,
    rank: RankRef | None,
    by_rank: dict[RankRef, Verdict],
    state: State,
    now: float,
) -> bool:
    ladder = memory.ladders.get(slot)
    if rank is None:
        if slot in state.target:
            return False
        # out of the target: nothing more to heal, but for a hook that was given the slot
        rule = book.by_name.get(ladder.rule) if ladder else None
        at_hook = (
            ladder is not None
            and rule is not None
            and ladder.rung < len(rule.rule.ladder)
            and rule.rule.ladder[ladder.rung].action == "hook"
        )
        return not at_hook
    verdict = by_rank.get(rank)
    if verdict is None or verdict.health != Health.HEALTHY:
        return False
    if ladder is None or ladder.rank != rank:
        return True
    rule = book.by_name.get(ladder.rule)
    if rule is not None and now < ladder.at + _proof_s(book.policy, rule.rule, ladder):
        return False
    if verdict.cause == Cause.NONE:
        return True
    return rule is None or not rule.fits_health(Health.HEALTHY)


def _proof_s(policy: Policy, rule: Rule, ladder: Ladder) -> float:
    """How long after an attempt a healthy rank proves nothing. A step that is run again looks healthy until it has stood still
    for `stallAfter` once more: taken for a success, a retry that has no effect would be the first one for ever."""
    if ladder.rung >= len(rule.ladder) or rule.ladder[ladder.rung].action != "retry":
        return 0.0
    return max(backoff_s(rule, ladder.attempts, rule.ladder[ladder.rung]), 2.0 * policy.spec.detection.stall_after_s)


def _quarantines(policy: Policy, memory: Memory, now: float) -> Iterator[Note]:
    budget = policy.spec.bounds.fault_budget
    for slot, held in memory.quarantined.items():
        if now >= held.until:
            yield QuarantineOver(slot, "", now)
    if budget is None:
        return
    for slot in memory.faulty:
        count = guards.failures(policy, memory, slot, now)
        if slot not in memory.quarantined and count >= budget.failures:
            why = f"{count} failures within {budget.window_s:g} s"
            yield Quarantined(slot, now + budget.quarantine_s, why, now)
        elif slot not in memory.quarantined and _failed_again(policy, memory, slot):
            yield Quarantined(slot, now + budget.quarantine_s, "it failed soon after its last quarantine", now)


def _failed_again(policy: Policy, memory: Memory, slot: int) -> bool:
    """Its newest fault came while it was held down."""
    times = memory.faults.get(slot, ())
    return bool(times) and on_hold(policy, memory, slot, times[-1])
