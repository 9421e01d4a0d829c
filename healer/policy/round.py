"""One round of deciding: what both halves of it, the sick ranks and the empty slots, share while they decide."""

from collections.abc import Iterable, Sequence

import msgspec

from healer.diagnosis import Cause, Health, Verdict
from healer.evidence import Evidence, RankRef
from healer.policy import bounds, guards
from healer.policy.reasons import ACTS, Reason, Step
from healer.policy.records import Decision, State
from healer.policy.rules import CompiledRule, Facts, RuleBook
from healer.policy.schema import Policy


class Case(msgspec.Struct, frozen=True):
    """One verdict, ready to be decided upon."""

    facts: Facts
    rule: CompiledRule | None
    dead: bool
    """Its process is gone: releasing the others is recovery."""
    urgent: bool
    """The group waits for it."""

    @property
    def verdict(self) -> Verdict:
        return self.facts.verdict

    @property
    def rank(self) -> RankRef:
        return self.facts.verdict.rank

    @property
    def unhealthy(self) -> bool:
        return self.facts.verdict.health == Health.UNHEALTHY


class Round:
    """Made for one call of `decide` and thrown away after it; keeps count of what the round has decided so far."""

    def __init__(self, book: RuleBook, verdicts: Iterable[Verdict], state: State, now: float) -> None:
        self.book, self.policy, self.state, self.now = book, book.policy, state, now
        live = set(state.live)
        self.verdicts = tuple(v for v in verdicts if isinstance(v.subject, RankRef))
        self.present = tuple(v for v in self.verdicts if v.rank in live)
        """About ranks that are still the ones that the verdict means."""
        self.sick = sum(v.health == Health.UNHEALTHY for v in self.present)
        self.size = len(state.target)
        """Of the target, after what was decided so far."""
        self.healthy = len(live) - self.sick
        """Live ranks that nothing is held against, after what was decided so far."""
        self.away = self._away()
        """Slots that should have a rank which serves, and have none."""
        self.destructive = 0
        self.reconfigures = bool(state.sequence)
        """A reconfiguration is in flight or was decided upon in this round."""

    def case(self, verdict: Verdict) -> Case:
        state, slot = self.state, verdict.rank.slot
        evidence = self._evidence(verdict)
        facts = Facts(
            verdict,
            evidence,
            self.now,
            host=state.hosts.get(slot, ""),
            labels=self.book.labels(slot),
            failures=max(1, guards.failures(self.policy, state.memory, slot, self.now)),
            live=len(state.live),
            target=len(state.target),
            lost=self.sick,
        )
        unhealthy = verdict.health == Health.UNHEALTHY
        dead = unhealthy and guards.is_dead(verdict, evidence)
        return Case(facts, self._rule(facts), dead, dead or (unhealthy and verdict.cause in guards.UNRESPONSIVE))

    def _evidence(self, verdict: Verdict) -> tuple[Evidence, ...]:
        known = self.state.evidence
        return tuple(known[one] for one in verdict.evidence if one in known)

    def _away(self) -> int:
        serving = {rank.slot for rank in self.state.live}
        for verdict in self.present:
            if verdict.health == Health.UNHEALTHY and (
                verdict.cause in guards.UNRESPONSIVE or guards.is_dead(verdict, self._evidence(verdict))
            ):
                serving.discard(verdict.rank.slot)
        # a slot that a hook works on has left the target, and comes back
        return len({*self.state.target, *self.state.memory.ladders} - serving)

    def _rule(self, facts: Facts) -> CompiledRule | None:
        """The first that matches. Once its ladder is begun, only a rule before it takes over: otherwise evidence that comes
        and goes would start ladders anew for ever."""
        found, ladder = self.book.first(facts), self.state.memory.ladders.get(facts.slot)
        begun = self.book.by_name.get(ladder.rule) if ladder and ladder.rank == facts.verdict.rank else None
        if begun is None or not begun.fits_health(facts.verdict.health):
            return found
        return begun if found is None or found.index > begun.index else found

    def count(self, decision: Decision) -> Decision:
        """Keep count of what was decided. Returns it."""
        if decision.step in ACTS:
            slots = len(decision.slots)
            outside = sum(slot not in self.state.target for slot in decision.slots)
            self.size += outside if decision.step == Step.REFILL else 0
            self.size -= slots - outside if decision.step in (Step.SCALE_DOWN, Step.DRAIN, Step.GIVE_UP) else 0
            self.destructive += slots if decision.destructive else 0
            self.reconfigures |= decision.step in (Step.REPLACE, Step.SCALE_DOWN, Step.DRAIN, Step.GIVE_UP)
        return decision

    def quarantined(self, slot: int) -> bool:
        held = self.state.memory.quarantined.get(slot)
        return held is not None and self.now < held.until

    def breaker_room(self) -> int | None:
        room = guards.breaker_room(self.policy, self.state.memory, self.now)
        return None if room is None else max(0, room - self.destructive)

    def may_shrink(self, removed: int) -> bounds.Block | None:
        return bounds.smaller(self.policy, size=self.size, healthy=self.healthy, removed=removed)


def decision(
    step: Step,
    reason: Reason,
    slots: Sequence[int],
    sentence: str,
    *,
    rule: str = "",
    cause: Cause = Cause.NONE,
    verdicts: tuple[Verdict, ...] = (),
    rung: int = 0,
    hook: str = "",
    destructive: bool = False,
) -> Decision:
    return Decision(
        step=step,
        reason=reason,
        slots=tuple(slots),
        cause=cause,
        rule=rule,
        sentence=sentence,
        verdicts=verdicts,
        rung=rung,
        hook=hook,
        destructive=destructive,
    )


def show(slots: Sequence[int]) -> str:
    return f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"


def hold_back(policy: Policy, found: list[Decision], state: State) -> list[Decision]:
    """What must not be carried out now, whatever was decided: a pause, a maintenance window, a dry run."""
    hold = guards.observing(policy, state)
    if hold is not None:
        found = [_held(one, hold) if one.step in ACTS else one for one in found]
    return [_dry(one) if one.step in ACTS else one for one in found] if policy.spec.dry_run else found


def _held(one: Decision, hold: guards.Hold) -> Decision:
    sentence = f"did nothing, {hold.text}; without it: {one.sentence}"
    return msgspec.structs.replace(one, step=Step.NONE, reason=hold.reason, sentence=sentence)


def _dry(one: Decision) -> Decision:
    return msgspec.structs.replace(one, dry_run=True, sentence=f"did nothing, dry run; without it: {one.sentence}")
