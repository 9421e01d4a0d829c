"""The supervisor: the loop that owns all state. Events and ticks become evidence, evidence verdicts, verdicts decisions,
decisions actions, all in one call without an await in between: a dead rank is given to the target in the very iteration
that reports it, after one cheap write of the intent.

Everything here runs in one event loop. Nobody else writes its state.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator

from elastic.controller.records import (
    BootFailed,
    Event,
    GroupStatus,
    PeerFaultSeen,
    PhaseBegan,
    RankBeat,
    RankGone,
    SequenceEnded,
)
from elastic.errors import ElasticError
from healer import __version__
from healer.actions import Actions
from healer.casebook import Casebook
from healer.clock import Clock
from healer.diagnosis import Cause, Health, Verdict, diagnose
from healer.dossier import Dossier
from healer.evidence import Evidence, RankRef
from healer.journal import Journal, Kind
from healer.logs import LateLog
from healer.metrics import Metrics
from healer.policy.decide import Decision, Reason, Step, decide
from healer.policy.schema import Policy
from healer.roster import Roster
from healer.senses import Senses
from healer.sensors import ref
from healer.status import DaemonStatus, JournalStatus, trouble
from healer.targets import TargetFactory

HOUSEKEEPING_S = 1.0
CLOSE_DEADLINE_S = 20.0
STOP_DEADLINE_S = 60.0
CHECKPOINT_IDLE_BYTES, CHECKPOINT_BUSY_BYTES = 256 << 10, 16 << 20


class Supervisor:
    """One policy, one target. Call `run`; the other public methods are for the API, in the same loop."""

    def __init__(self, policy: Policy, make_target: TargetFactory, journal: Journal, clock: Clock) -> None:
        """Raises ElasticError where the target cannot be made from the policy (a bad checkpoint)."""
        detection = policy.spec.detection
        self.policy, self.journal = policy, journal
        self.metrics = Metrics(self.observe, lambda: journal.entries)
        self._clock, self._log = clock, LateLog("healer")
        self._tick_s = min(0.1, detection.stall_after_s / 8)
        self._limits = policy.limits
        self._senses = Senses(detection, clock)
        self._dossier, self._casebook = Dossier(), Casebook(journal, clock)
        self._target = make_target(self.on_event)
        self._roster = Roster(self._target.observe())
        self._actions = Actions(self._target, self._roster, self._casebook, journal, self.metrics, self._log, clock)
        self._verdicts: dict[RankRef, Verdict] = {}
        self._said: tuple[Decision, ...] = ()
        self._entry_of: dict[str, int] = {}
        """By evidence id, its entry in the journal."""
        self._events: deque[Event] = deque()
        self._busy = False
        self._in_sequence = False
        self._started_at = self._last_round = clock.monotonic()
        self._next_housekeeping = self._started_at
        self._started = ""
        self._ending = ""
        self._journal_error = ""
        self._wake = asyncio.Event()
        self._checkpoint: asyncio.Task[None] | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start the target, keep it healthy until `end` is called, then let go of it or stop it. Raises what the target's
        start raises."""
        self._note("daemon-started", policy=self.policy.metadata.name, version=__version__, pid=os.getpid())
        starting = asyncio.create_task(self._target.start(), name="target start")
        starting.add_done_callback(lambda _: self._wake.set())
        try:
            while not self._ending:
                late_s = await self._sleep()
                if not self._started and starting.done():
                    self._begin(starting.result())
                self._round(late_s)
        finally:
            if not starting.done():
                starting.cancel()
                await asyncio.wait([starting], timeout=STOP_DEADLINE_S)
            if starting.done() and not starting.cancelled() and starting.exception() is not None:
                self._log.say("error", "target.start_failed", error=str(starting.exception()))
            await self._finish(stop=self._ending == "stop")

    def end(self, *, stop: bool, who: str) -> None:
        """Leave the loop: with `stop` serving ends too, without it goes on."""
        if not self._ending:
            self._ending = "stop" if stop else "close"
            self._log.say("info", "daemon.ending", stop_serving=stop, who=who)
            self._wake.set()

    @property
    def loop_age_s(self) -> float:
        return self._clock.monotonic() - self._last_round

    def _begin(self, sentence: str) -> None:
        self._started = sentence
        self._note("target-started", sentence=sentence, incident=self._casebook.id)
        self._log.say(
            "info", "target.started", sentence=sentence, took_s=round(self._clock.monotonic() - self._started_at, 3)
        )
        with self._alone():
            self._refresh()
            # a rank may have died before anybody watched it
            self._consider(self._senses.scan())

    async def _finish(self, *, stop: bool) -> None:
        if self._checkpoint is not None:
            await asyncio.wait([self._checkpoint], timeout=CLOSE_DEADLINE_S)
        outcome = "serving was stopped" if stop else "serving goes on" if self._started else "nothing was started"
        try:
            async with asyncio.timeout(STOP_DEADLINE_S if stop else CLOSE_DEADLINE_S):
                await (self._target.stop() if stop else self._target.close())
        except (ElasticError, TimeoutError) as error:
            outcome = f"the target did not answer: {error or 'deadline passed'}"
            self._log.say("error", "target.unreachable", error=outcome)
        self._note("daemon-ended", sentence=outcome)
        self.journal.flush()
        self._log.say("info", "daemon.ended", sentence=outcome)
        self._log.flush()

    async def _sleep(self) -> float:
        """Until the next tick, or until woken. Returns by how many seconds the loop was late, wherever it lost them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._tick_s):
                await self._wake.wait()
        self._wake.clear()
        return max(0.0, self._clock.monotonic() - self._last_round - self._tick_s)

    # --- events and ticks: what comes in --------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Takes one event of the target. Never raises: a failure of the daemon must not become one of serving. Events
        that the target reports from within an action wait until the action is recorded."""
        self._events.append(event)
        if not self._busy:
            with self._alone():
                pass

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One piece of work at a time; then the events that came meanwhile."""
        outer, self._busy = self._busy, True
        try:
            yield
        finally:
            while self._events and not outer:
                event = self._events.popleft()
                try:
                    self._handle(event)
                except Exception as error:
                    self.metrics.errors.labels("event").inc()
                    self._log.say("error", "event.failed", event_type=type(event).__name__, exc_info=error)
            self._busy = outer
            if not outer:
                self._log.flush()

    def _handle(self, event: Event) -> None:
        match event:
            case RankBeat():
                found = self._senses.heard(event)
                if found:
                    self._consider(found)
            case RankGone():
                self._gone(event)
            case PeerFaultSeen():
                peer = self._roster.in_slot(event.peer)
                if peer is not None:
                    self._consider(self._senses.peer_fault(event, peer))
            case BootFailed():
                self._boot_failed(event)
            case PhaseBegan():
                self._in_sequence = True
                self._log.say(
                    "debug", "phase", sequence=event.kind, phase=event.phase, epoch=event.epoch, slots=event.slots
                )
                self._phase(event)
            case SequenceEnded():
                self._in_sequence = False
                self._sequence_ended(event)

    def _gone(self, event: RankGone) -> None:
        rank = ref(event.member)
        if rank not in self._roster.live:
            self._refresh()
        if rank not in self._roster.live:
            return  # retired, already condemned, or never part of the view: the target's own business
        self._consider(self._senses.gone(event, rank))
        if rank in self._roster.live:
            self._look_again(rank, 0.001)

    def _look_again(self, rank: RankRef, after_s: float) -> None:
        """A closed socket and a process that lives: look at it ever more slowly, up to the sensor's own rate."""

        def look() -> None:
            if rank not in self._roster.live or self._ending:
                return
            dead = self._senses.died(rank)
            if dead:
                with self._alone():
                    self._consider(dead)
            else:
                self._look_again(rank, after_s * 2)

        if after_s < self.policy.spec.detection.process_interval_s:
            asyncio.get_running_loop().call_later(after_s, look)

    def _boot_failed(self, event: BootFailed) -> None:
        self._log.say(
            "warning", "boot.failed", slot=event.slot, attempt=event.attempt, gave_up=event.gave_up, why=event.why
        )
        self._note("boot-failed", incident=self._casebook.id, failure=event)
        if event.gave_up:
            self._roster.boot_failed(event)
            self._refresh()
            self._judge([])

    def _phase(self, event: PhaseBegan) -> None:
        unknown = tuple(s for s in event.slots if not self._roster.is_lost(s))
        if event.kind != "loss" or not unknown:
            return
        self._refresh()
        self._roster.given_up(unknown)
        self._open(Cause.EXECUTOR, unknown, event.at)
        decision = Decision(
            step=Step.NONE,
            reason=Reason.EXECUTOR,
            slots=unknown,
            cause=Cause.EXECUTOR,
            rule="",
            sentence=f"did nothing: the executor itself gave up slots {', '.join(map(str, unknown))} and replaces them",
        )
        self._actions.record(decision)
        self._refresh()
        self.journal.flush()

    def _sequence_ended(self, event: SequenceEnded) -> None:
        report = event.report
        self.metrics.sequence_ended(report)
        self.journal.add(Kind.OUTCOME, {"report": report}, self._casebook.id)
        self._log.say(
            "info",
            "sequence.ended",
            sequence=report.kind,
            outcome=report.outcome,
            slots=report.slots,
            epoch=report.epoch,
            took_s=round(report.ended - report.began, 4),
            reason=report.reason,
        )
        self._refresh()
        self._judge([])

    def _round(self, late_s: float) -> None:
        """One tick. Guarded like `on_event`."""
        with self._alone():
            try:
                self._tick(late_s)
            except Exception as error:
                self.metrics.errors.labels("round").inc()
                self._log.say("error", "round.failed", exc_info=error)

    def _tick(self, late_s: float) -> None:
        self.metrics.loop_late.observe(late_s)
        now = self._last_round = self._clock.monotonic()
        found = self._senses.round(late_s)
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + HOUSEKEEPING_S
            self._keep_house()
        if found or self._roster.waiting or any(v.health != Health.HEALTHY for v in self._verdicts.values()):
            self._consider(found)

    def _keep_house(self) -> None:
        if self._started:
            self._refresh()
            self._judge([])
        standing = {e.id for e in self._dossier.standing()}
        self._entry_of = {e: seq for e, seq in self._entry_of.items() if e in standing}
        limit = CHECKPOINT_BUSY_BYTES if self._casebook.current else CHECKPOINT_IDLE_BYTES
        if self.journal.wal_bytes > limit and (self._checkpoint is None or self._checkpoint.done()):
            self._checkpoint = asyncio.create_task(asyncio.to_thread(self.journal.checkpoint), name="checkpoint")

    # --- evidence, verdict, decision, action ----------------------------------------------------------------------

    def _consider(self, found: list[Evidence]) -> None:
        self._dossier.extend(found)
        self._judge(found)

    def _judge(self, fresh: list[Evidence]) -> None:
        now = self._clock.monotonic()
        live = tuple(self._roster.live)
        verdicts = {v.rank: v for v in diagnose(self._dossier.standing(), live, self._limits, now)}
        before = {rank: v.key for rank, v in self._verdicts.items()}
        # not to have been heard yet is how every rank begins
        changed = [v for v in verdicts.values() if v.key != before.get(v.rank, (v.rank, Health.UNKNOWN, Cause.UNHEARD))]
        self._verdicts = verdicts
        sick = [v for v in verdicts.values() if v.health == Health.UNHEALTHY]
        if sick and self._casebook.current is None:
            self._open(sick[0].cause, tuple(v.rank.slot for v in sick), min(v.since for v in sick))
        for evidence in fresh:
            self._entry_of[evidence.id] = self.journal.add(Kind.EVIDENCE, evidence, self._casebook.id)
            self.metrics.evidence.labels(evidence.source, evidence.what).inc()
        for verdict in changed:
            entries = [self._entry_of[e] for e in verdict.evidence if e in self._entry_of]
            self.journal.add(Kind.VERDICT, {"verdict": verdict, "entries": entries}, self._casebook.id)
            self._log.say(
                "info",
                "verdict",
                rank=str(verdict.rank),
                health=verdict.health,
                cause=verdict.cause,
                why=verdict.sentence,
            )
        if self._started or sick:
            self._decide(verdicts.values(), now)
        self._close_if_healed()
        self.journal.flush()
        if self.journal.error != self._journal_error:
            self._journal_error = self.journal.error
            if self._journal_error:
                self.metrics.errors.labels("journal").inc()
                self._log.say("error", "journal.unwritable", error=self._journal_error)
            else:
                self._log.say("info", "journal.writable")

    def _decide(self, verdicts: Iterable[Verdict], now: float) -> None:
        decisions = decide(self.policy, tuple(verdicts), self._roster.state(), now)
        said = {d.key for d in self._said}
        self._said = decisions
        for decision in decisions:
            if decision.acts or decision.key not in said:
                self._actions.record(decision)
            if decision.acts:
                self._actions.carry_out(decision)
                self._refresh()

    # --- the group as observed --------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        if not self._roster.refresh(self._target.observe()):
            return
        live = self._roster.live
        self._senses.watch(live.values())
        self._dossier.keep(live)

    def _open(self, cause: Cause, slots: tuple[int, ...], detected: float) -> None:
        if self._casebook.current is None:
            incident = self._casebook.open(cause, slots, detected, len(self._roster.group.target))
            self.metrics.incidents.labels(cause).inc()
            self.metrics.incident_open.set(1)
            self._log.say("warning", "incident.opened", incident=incident.id, cause=cause, slots=slots)

    def _close_if_healed(self) -> None:
        if self._casebook.current is None or not self._started or not self._roster.settled:
            return
        if self._in_sequence:
            return  # the view counts a joining rank before its commit has ended, and its report belongs to the incident
        if any(v.health == Health.UNHEALTHY for v in self._verdicts.values()):
            return
        incident, outcome, open_s = self._casebook.close(len(self._roster.group.target))
        self.metrics.incident_open.set(0)
        self._log.say("info", "incident.closed", incident=incident.id, outcome=outcome, open_s=round(open_s, 3))

    def _note(self, event: str, *, incident: str = "", **fields: object) -> None:
        self.journal.add(Kind.LIFECYCLE, {"event": event, **fields}, incident)

    # --- for the API ------------------------------------------------------------------------------------------------

    def observe(self) -> GroupStatus:
        """The group now; once the daemon is ending, as last seen."""
        return self._roster.group if self._ending else self._target.observe()

    def scale(self, wanted: int | tuple[int, ...], *, who: str) -> tuple[int, ...]:
        """An operator's request. Returns the new target. Raises Infeasible with the reason; then nothing was changed."""
        size = wanted if isinstance(wanted, int) else len(set(wanted))
        least = self.policy.spec.bounds.min_ranks
        refuse = ""
        if not self._started or self._ending:
            refuse = "the daemon is starting or ending; try again when `healer status` shows a group"
        elif self.policy.spec.dry_run:
            refuse = "spec.dryRun is set in the policy"
        elif size < least:
            refuse = f"a target of {size} is below spec.bounds.minRanks {least}"
        try:
            with self._alone():
                target = self._actions.scale(wanted, who=who, refuse=refuse)
                self._refresh()
        finally:
            self.journal.flush()
        return target

    def status(self) -> DaemonStatus:
        now, journal, group = self._clock.monotonic(), self.journal, self.observe()
        verdicts = tuple(self._verdicts.values())
        why = trouble(group, verdicts, self._casebook.id, journal.error) if self._started else "the target is starting"
        return DaemonStatus(
            state="stopping" if self._ending else "starting" if not self._started else "degraded" if why else "ok",
            why=why,
            version=__version__,
            pid=os.getpid(),
            policy=self.policy.metadata.name,
            dry_run=self.policy.spec.dry_run,
            uptime_s=now - self._started_at,
            loop_age_s=self.loop_age_s,
            started=self._started,
            serving=self._target.address() if self._started else "",
            incident=self._casebook.current,
            decision="; ".join(d.sentence for d in self._said),
            group=group,
            verdicts=verdicts,
            sensors=self._senses.status(),
            journal=JournalStatus(str(journal.path), journal.entries, journal.error, str(journal.set_aside or "")),
        )
