"""What operators ask for, beside a size: carried out within the bounds, in a pause too, and written down like any decision."""

from elastic.errors import ElasticError, Infeasible
from healer.actions import Actions, asked
from healer.clock import Clock
from healer.journal import Journal, Kind
from healer.orders import (
    Cancel,
    Carried,
    Drain,
    Order,
    Pause,
    Quarantine,
    Release,
    Replace,
    ResetBreaker,
    Resume,
    Scale,
)
from healer.policy.decide import Reason, Step
from healer.policy.memory import BreakerReset, Note, Paused, Quarantined, QuarantineOver, Removed, Resumed
from healer.roster import Roster
from healer.targets import Target

ORDERED = "order"
"""Lifecycle event in the journal: one order."""
FOR_GOOD_S = 3650 * 86400.0
"""A quarantine without an end."""


class Requests:
    """Owned by the supervisor, called in its loop."""

    def __init__(self, target: Target, roster: Roster, actions: Actions, journal: Journal, clock: Clock) -> None:
        self._target, self._roster, self._actions = target, roster, actions
        self._journal, self._clock = journal, clock

    def carry_out(self, order: Order, *, who: str, refuse: str) -> Carried:
        """As `_carried`; what was asked, by whom, and what was answered is in the journal, where it was refused too."""
        answer = ""
        try:
            carried = self._carried(order, who=who, refuse=refuse)
            answer = carried.sentence
            return carried
        except ElasticError as error:
            answer = f"refused: {error}"
            raise
        finally:
            body = {"event": ORDERED, "order": type(order).__name__, "body": order, "who": who, "answer": answer}
            self._journal.add(Kind.LIFECYCLE, body)

    def _carried(self, order: Order, *, who: str, refuse: str) -> Carried:
        """`refuse`: why the group must not be touched now; empty when it may. Raises Infeasible with the reason; then nothing
        was changed; Superseded where this daemon may not act. Not for the type `Order` itself."""
        now = self._clock.monotonic()
        match order:
            case Pause(reason):
                why = f"{who}{f': {reason}' if reason else ''}"
                sentence = f"pauses healing and scaling, asked by {why}"
                self._note(Paused(why, now), sentence)
            case Resume():
                sentence = f"heals and scales again, asked by {who}"
                self._note(Resumed(who, now), sentence)
            case ResetBreaker():
                sentence = f"resets the circuit breaker, asked by {who}"
                self._note(BreakerReset(who, now), sentence)
            case Release(slot):
                sentence = self._release(slot, who, now)
            case Quarantine(slot, for_s, reason):
                sentence = self._quarantine(slot, for_s, reason, who, refuse, now)
            case Drain(slot):
                sentence = self._without((slot,), f"drains slot {slot}", who, refuse)
            case Replace(slot, reason):
                sentence = self._replace(slot, reason, who, refuse, now)
            case Cancel():
                sentence = self._cancel(who, refuse)
            case Scale(ranks, slots):
                wanted = ranks if ranks is not None else tuple(slots or ())
                target = self._actions.scale(wanted, who=who, refuse=refuse)
                sentence = f"scales to slots {', '.join(map(str, target))}, asked by {who}"
            case _:
                raise Infeasible(f"{type(order).__name__} is no order that can be carried out")
        return Carried(sentence, self._target.observe().target)

    def _note(self, note: Note, sentence: str) -> None:
        self._roster.note(note)
        self._actions.record(asked(Step.NONE, Reason.OPERATOR, (), sentence))

    def _release(self, slot: int, who: str, now: float) -> str:
        if slot not in self._roster.memory.quarantined:
            raise Infeasible(f"slot {slot} is not quarantined")
        sentence = f"ends the quarantine of slot {slot}, asked by {who}"
        self._note(QuarantineOver(slot, who, now), sentence)
        return sentence

    def _quarantine(self, slot: int, for_s: float | None, reason: str, who: str, refuse: str, now: float) -> str:
        group = self._roster.group
        if not 0 <= slot < group.max_ranks:
            raise Infeasible(f"slot {slot} is outside 0..{group.max_ranks - 1}")
        sentence = f"quarantines slot {slot}{f' for {for_s:g} s' if for_s else ''}"
        removed = slot in group.target
        if removed:
            self._without((slot,), sentence, who, refuse)
        until = now + (for_s if for_s is not None else FOR_GOOD_S)
        self._note(Quarantined(slot, until, reason or f"asked by {who}", now), f"{sentence}, asked by {who}")
        if removed:
            self._roster.note(Removed(slot, now))
        return f"{sentence}, asked by {who}"

    def _without(self, slots: tuple[int, ...], what: str, who: str, refuse: str) -> str:
        target = self._roster.group.target
        outside = sorted(set(slots) - set(target))
        if outside:
            refuse = refuse or f"slot {outside[0]} is not in the target {list(target)}"
        left = tuple(slot for slot in target if slot not in slots)
        if not left:
            refuse = refuse or "no rank would be left; `healer stop` ends serving"
        self._actions.scale(left or (), who=who, refuse=refuse)
        return f"{what}, asked by {who}"

    def _replace(self, slot: int, reason: str, who: str, refuse: str, now: float) -> str:
        rank = self._roster.in_slot(slot)
        if rank is None:
            refuse = refuse or f"slot {slot} has no live rank"
        sentence = f"replaces slot {slot}, asked by {who}{f': {reason}' if reason else ''}"
        if refuse or rank is None:
            self._actions.record(asked(Step.NONE, Reason.REFUSED, (slot,), f"refused: {sentence}: {refuse}"))
            raise Infeasible(refuse)
        self._journal.add(Kind.ACTION, {"step": Step.REPLACE, "slots": (slot,), "who": who})
        self._journal.flush()
        self._actions.authority.check()
        self._roster.condemn(rank, "")
        self._target.lose((slot,), cause="operator", detected=now, replace=True)
        self._actions.record(asked(Step.REPLACE, Reason.OPERATOR, (slot,), sentence))
        return sentence

    def _cancel(self, who: str, refuse: str) -> str:
        """Empty slots leave the target."""
        group = self._roster.group
        empty = tuple(slot for slot in group.target if slot not in group.live)
        if not empty:
            raise Infeasible("nothing is being prepared: every slot of the target is live")
        return self._without(empty, f"gives up slots {', '.join(map(str, empty))}", who, refuse)
