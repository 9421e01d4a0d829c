"""From evidence to action, in one call without an await: evidence is judged, verdicts are decided upon, decisions carried out.

A dead rank is given to the target in the very call that reports it, after one cheap write of the intent.
"""

from collections.abc import Collection

from healer.actions import Actions
from healer.authority import Authority
from healer.casebook import Casebook
from healer.chronicle import Chronicle
from healer.clock import Clock
from healer.diagnosis import Cause, Health, Verdict
from healer.evidence import Evidence, GpuRef
from healer.herald import Herald
from healer.journal import Journal
from healer.policy.decide import Decision, decide
from healer.policy.probation import suspects
from healer.policy.schema import Policy
from healer.progress import Progress
from healer.roster import Roster
from healer.senses import Senses
from healer.targets import Target
from healer.upkeep import Upkeep


class Deliberation:
    """Owned by the supervisor, called in its loop."""

    def __init__(
        self,
        policy: Policy,
        target: Target,
        roster: Roster,
        senses: Senses,
        chronicle: Chronicle,
        casebook: Casebook,
        actions: Actions,
        progress: Progress,
        herald: Herald,
        upkeep: Upkeep,
        journal: Journal,
        clock: Clock,
        authority: Authority,
    ) -> None:
        self.policy = policy
        self.started = False
        """The target has started. Before, only what is known to be sick is decided upon, and no incident is closed."""
        self.suspects: frozenset[int] | None = None
        """Slots that must prove themselves, as the target was last told; None: it never was."""
        self._target, self._roster, self._senses, self._chronicle = target, roster, senses, chronicle
        self._casebook, self._actions, self._progress, self._herald = casebook, actions, progress, herald
        self._upkeep, self._journal, self._clock, self._authority = upkeep, journal, clock, authority
        self._said: tuple[Decision, ...] = ()

    @property
    def sentence(self) -> str:
        """What was decided last."""
        return "; ".join(d.sentence for d in self._said)

    def consider(self, found: list[Evidence]) -> None:
        """New evidence; none: time has passed, or the group has changed. Nothing where this daemon may not act any more."""
        if not self._authority.armed():
            return
        now = self._clock.monotonic()
        if any(isinstance(e.subject, GpuRef) for e in found):
            # whose GPU that is must be known before it is judged
            self._chronicle.equip(self._senses.hardware(), now)
        fresh = self._chronicle.take(found, now)
        judged = self._chronicle.judge(now)
        verdicts = judged.diagnosis.ranks
        sick = [v for v in verdicts if v.health == Health.UNHEALTHY]
        if sick:
            self.open_incident(sick[0].cause, tuple(v.rank.slot for v in sick), min(v.since for v in sick))
        self._chronicle.write(fresh, judged)
        if self.started or sick:
            self._decide(verdicts, now)
        self._close_if_healed()
        self._journal.flush()
        self._upkeep.check()

    def refresh(self) -> None:
        """Look at the group again."""
        if not self._roster.refresh(self._target.observe(), self._clock.monotonic()):
            return
        now, live = self._clock.monotonic(), self._roster.live
        self._senses.watch(live.values())
        self._chronicle.watch(live, now)
        self._chronicle.equip(self._senses.hardware(), now)

    def open_incident(self, cause: Cause, slots: tuple[int, ...], detected: float) -> None:
        """Unless one is open. `detected`: monotonic seconds."""
        opened = self._casebook.open(cause, slots, detected, len(self._roster.group.target))
        if opened is not None:
            self._herald.opened(opened)

    def _decide(self, verdicts: Collection[Verdict], now: float) -> None:
        hardware = self._chronicle.hardware
        state = self._roster.state(
            self._chronicle.standing(now).values(),
            wall=self._clock.wall(),
            hosts={member.slot: member.host for member in self._roster.live.values()},
            gpus=len(hardware.gpus) or None,
            placed=hardware.placed,
        )
        state = self._roster.observe(self.policy, verdicts, state, now)
        self._tell_suspects(now)
        decisions = decide(self.policy, verdicts, state, now)
        said = {d.key for d in self._said}
        self._said = decisions
        for decision in decisions:
            if decision.acts or decision.key not in said:
                self._actions.record(decision)
                self._herald.decided(decision, self._casebook.id)
            if decision.acts:
                self._actions.carry_out(decision)
                self._upkeep.harden()
                self.refresh()

    def _tell_suspects(self, now: float) -> None:
        """The target must know before it starts a rank in one of these slots."""
        found = suspects(self.policy, self._roster.memory, self._roster.gpus, self._chronicle.gpus, now)
        if found != self.suspects:
            self.suspects = found
            self._target.probation(found)

    def _close_if_healed(self) -> None:
        if self._casebook.current is None or not self.started or not self._roster.settled:
            return
        if self._progress.in_sequence:
            return  # the view counts a joining rank before its commit has ended, and its report belongs to the incident
        if any(v.health == Health.UNHEALTHY for v in self._chronicle.ranks):
            return
        incident = self._casebook.current
        self._herald.closed(incident, self._casebook.close(len(self._roster.group.target)))
