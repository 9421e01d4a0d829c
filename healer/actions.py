"""Carrying decisions out: the intent into the journal, then the target. Small; decides nothing."""

from elastic.errors import ElasticError, Infeasible
from healer.casebook import Casebook
from healer.clock import Clock
from healer.diagnosis import Cause
from healer.journal import Journal, Kind
from healer.logs import LateLog
from healer.metrics import Metrics
from healer.policy.decide import Decision, Reason, Step
from healer.roster import Roster
from healer.targets import Target


class Actions:
    """Owned by the supervisor, called in its loop."""

    def __init__(
        self,
        target: Target,
        roster: Roster,
        casebook: Casebook,
        journal: Journal,
        metrics: Metrics,
        log: LateLog,
        clock: Clock,
    ) -> None:
        self._target, self._roster, self._casebook = target, roster, casebook
        self._journal, self._metrics, self._log, self._clock = journal, metrics, log, clock

    def record(self, decision: Decision) -> None:
        self._journal.add(Kind.DECISION, decision, self._casebook.id)
        self._metrics.decisions.labels(decision.step, decision.reason).inc()
        self._log.say("info", "decision", step=decision.step, reason=decision.reason, sentence=decision.sentence)

    def carry_out(self, decision: Decision) -> None:
        """Give an acting decision to the target. Returns at once; what becomes of it is reported by the target's events.
        Where the target refuses, the slots become a human's."""
        intent = {"step": decision.step, "slots": decision.slots, "cause": decision.cause, "rule": decision.rule}
        action = self._journal.add(Kind.ACTION, intent, self._casebook.id)
        self._journal.flush()
        slots, target = decision.slots, set(self._roster.group.target)
        try:
            match decision.step:
                case Step.REPLACE | Step.SCALE_DOWN:
                    self._lose(decision)
                case Step.REFILL:
                    for slot in slots:
                        self._roster.asked_again(slot)
                    self._target.scale(sorted({*target, *slots}), reason=decision.sentence)
                case Step.GIVE_UP:
                    self._target.scale(sorted(target - {*slots}), reason=decision.sentence)
        except ElasticError as error:
            self._journal.add(Kind.OUTCOME, {"action": action, "refused": str(error)}, self._casebook.id)
            for slot in slots:
                self._roster.refused(slot, str(error))
            self._log.say("error", "action.refused", step=decision.step, slots=slots, error=str(error))

    def _lose(self, decision: Decision) -> None:
        detected = min(v.since for v in decision.verdicts)
        for verdict in decision.verdicts:
            self._roster.condemn(verdict.rank, decision.rule)
        replace = decision.step == Step.REPLACE
        self._target.lose(decision.slots, cause=str(decision.cause), detected=detected, replace=replace)
        self._metrics.reaction.observe(max(0.0, self._clock.monotonic() - detected))

    def scale(self, wanted: int | tuple[int, ...], *, who: str, refuse: str) -> tuple[int, ...]:
        """An operator's request. `refuse`: why it must not be; empty when it may. Returns the new target; raises
        Infeasible with the reason, nothing changed."""
        shown = f"{wanted} ranks" if isinstance(wanted, int) else f"slots {', '.join(map(str, wanted))}"
        try:
            if refuse:
                raise Infeasible(refuse)
            self._journal.add(Kind.ACTION, {"step": Step.SCALE, "wanted": shown, "who": who})
            self._journal.flush()
            target = self._target.scale(wanted, reason=f"{who} asked for {shown}")
        except Infeasible as error:
            self.record(_asked(Step.NONE, Reason.REFUSED, (), f"refused {shown}, asked by {who}: {error}"))
            raise
        self.record(
            _asked(Step.SCALE, Reason.OPERATOR, target, f"scales to slots {list(target)}: {who} asked for {shown}")
        )
        return target


def _asked(step: Step, reason: Reason, slots: tuple[int, ...], sentence: str) -> Decision:
    return Decision(step=step, reason=reason, slots=slots, cause=Cause.NONE, rule="", sentence=sentence)
