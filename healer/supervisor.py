"""The supervisor: the loop that owns all state. Events and ticks become evidence, evidence verdicts, verdicts decisions,
decisions actions, all in one call without an await in between: a dead rank is given to the target in the very iteration
that reports it, after one cheap write of the intent.

Everything here runs in one event loop. Nobody else writes its state.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

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
from healer.chronicle import Chronicle
from healer.clock import Clock
from healer.diagnosis import Cause, Health, Verdict
from healer.evidence import Evidence, GpuRef, RankRef
from healer.journal import Journal, Kind
from healer.logs import LateLog
from healer.machine import Machine
from healer.metrics import Metrics
from healer.orders import Carried, Order
from healer.policy import guards
from healer.policy.decide import Decision, decide
from healer.policy.schema import Policy
from healer.progress import Progress, given_up
from healer.requests import Requests
from healer.roster import Roster
from healer.senses import Senses
from healer.sensors import ref
from healer.status import DaemonStatus, JournalStatus, alive, trouble
from healer.targets import TargetFactory
from healer.trace import Recorder
from healer.turns import Turns
from healer.upkeep import Upkeep

if TYPE_CHECKING:
    from healer.scaling import Scaling

HOUSEKEEPING_S = 1.0
CLOSE_DEADLINE_S = 20.0
STOP_DEADLINE_S = 60.0


class Supervisor:
    """One policy, one target. Call `run`; the other public methods are for the API, in the same loop."""

    def __init__(
        self,
        policy: Policy,
        make_target: TargetFactory,
        journal: Journal,
        clock: Clock,
        *,
        machine: Machine | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Raises ElasticError where the target cannot be made from the policy (a bad checkpoint). `machine`: the sensors of
        the host, none by default. `recorder`: keeps a trace."""
        self.policy, self.journal = policy, journal
        self.metrics = Metrics(self, lambda: journal.entries)
        self._clock, self._log = clock, LateLog("healer")
        self._tick_s = min(0.1, policy.spec.detection.stall_after_s / 8)
        machine = machine or Machine()
        self._senses = Senses(policy, clock, machine, self._sensor_failed)
        self._casebook = Casebook(journal, clock, self.metrics, self._log)
        self._upkeep = Upkeep(journal, self.metrics, self._log)
        self._chronicle = Chronicle(policy.limits, machine, self._casebook, journal, self.metrics, self._log, recorder)
        self._target = make_target(self.on_event)
        self._roster = Roster(self._target.observe())
        self._actions = Actions(
            self._target, self._roster, self._casebook, journal, self.metrics, self._log, clock, policy
        )
        self._requests = Requests(self._target, self._roster, self._actions, journal, clock)
        self._progress = Progress(self._casebook, journal, self.metrics, self._log)
        self._scaling = self._make_scaling(recorder)
        self._said: tuple[Decision, ...] = ()
        self._turns: Turns[Event] = Turns(self._handle, self._event_failed, self._log.flush)
        self._started_at = self._last_round = clock.monotonic()
        self._next_housekeeping = self._started_at
        self._started = ""
        self._ending = ""
        self._wake = asyncio.Event()

    # --- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start the target, keep it healthy until `end` is called, then let go of it or stop it. Raises what the target's
        start raises."""
        self._note("daemon-started", policy=self.policy.metadata.name, version=__version__, pid=os.getpid())
        self._senses.start(self._wake.set)
        if self._scaling is not None:
            self._scaling.start()
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
        with self._turns.alone():
            self._refresh()
            # a rank may have died before anybody watched it
            self._consider(self._senses.scan())

    async def _finish(self, *, stop: bool) -> None:
        await self._upkeep.close(CLOSE_DEADLINE_S)
        await asyncio.gather(self._senses.stop(), self._actions.close())
        if self._scaling is not None:
            await self._scaling.stop()
        outcome = "serving was stopped" if stop else "serving goes on" if self._started else "nothing was started"
        try:
            async with asyncio.timeout(STOP_DEADLINE_S if stop else CLOSE_DEADLINE_S):
                await (self._target.stop() if stop else self._target.close())
        except (ElasticError, TimeoutError) as error:
            outcome = f"the target did not answer: {error or 'deadline passed'}"
            self._log.say("error", "target.unreachable", error=outcome)
        self._note("daemon-ended", sentence=outcome)
        self.journal.flush()
        self._chronicle.close()
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
        self._turns.take(event)

    def _event_failed(self, event: Event, error: Exception) -> None:
        self.metrics.errors.labels("event").inc()
        self._log.say("error", "event.failed", event_type=type(event).__name__, exc_info=error)

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
                self._progress.phase_began(event)
                self._phase(event)
            case SequenceEnded():
                self._progress.sequence_ended(event)
                self._refresh()
                self._judge([])

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
                with self._turns.alone():
                    self._consider(dead)
            else:
                self._look_again(rank, after_s * 2)

        if after_s < self.policy.spec.detection.process_interval_s:
            asyncio.get_running_loop().call_later(after_s, look)

    def _boot_failed(self, event: BootFailed) -> None:
        self._progress.boot_failed(event)
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
        self._actions.record(given_up(unknown))
        self._refresh()
        self.journal.flush()

    def _round(self, late_s: float) -> None:
        """One tick. Guarded like `on_event`."""
        with self._turns.alone():
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
        if found or self._roster.waiting or self._unsettled:
            self._consider(found)
        if self._scaling is not None and self._started and not self._ending:
            self._scaling.tick(now)

    @property
    def _unsettled(self) -> bool:
        """Something stands that time alone may change."""
        chronicle = self._chronicle
        return any(v.health != Health.HEALTHY for v in (*chronicle.ranks, *chronicle.gpus, *chronicle.hosts))

    def _sensor_failed(self, name: str, error: Exception) -> None:
        self.metrics.errors.labels("sensor").inc()
        self._log.say("error", "sensor.failed", sensor=name, exc_info=error)

    def _keep_house(self) -> None:
        if self._started:
            self._chronicle.equip(self._senses.hardware(), self._clock.monotonic())
            self._refresh()
            self._judge([])
        self._chronicle.tidy(self._clock.monotonic())
        self._upkeep.checkpoint(busy=self._casebook.current is not None)

    # --- evidence, verdict, decision, action ----------------------------------------------------------------------

    def _consider(self, found: list[Evidence]) -> None:
        now = self._clock.monotonic()
        if any(isinstance(e.subject, GpuRef) for e in found):
            # whose GPU that is must be known before it is judged
            self._chronicle.equip(self._senses.hardware(), now)
        self._judge(self._chronicle.take(found, now))

    def _judge(self, fresh: list[Evidence]) -> None:
        now = self._clock.monotonic()
        found = self._chronicle.judge(now)
        verdicts = found.diagnosis.ranks
        sick = [v for v in verdicts if v.health == Health.UNHEALTHY]
        if sick:
            self._open(sick[0].cause, tuple(v.rank.slot for v in sick), min(v.since for v in sick))
        self._chronicle.write(fresh, found)
        if self._started or sick:
            self._decide(verdicts, now)
        self._close_if_healed()
        self.journal.flush()
        self._upkeep.check()

    def _decide(self, verdicts: Iterable[Verdict], now: float) -> None:
        verdicts, hardware = tuple(verdicts), self._chronicle.hardware
        state = self._roster.state(
            self._chronicle.standing(now).values(),
            wall=self._clock.wall(),
            hosts={member.slot: member.host for member in self._roster.live.values()},
            gpus=len(hardware.gpus) or None,
        )
        decisions = decide(self.policy, verdicts, self._roster.observe(self.policy, verdicts, state, now), now)
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
        if not self._roster.refresh(self._target.observe(), self._clock.monotonic()):
            return
        now, live = self._clock.monotonic(), self._roster.live
        self._senses.watch(live.values())
        self._chronicle.watch(live, now)
        self._chronicle.equip(self._senses.hardware(), now)

    def _open(self, cause: Cause, slots: tuple[int, ...], detected: float) -> None:
        self._casebook.open(cause, slots, detected, len(self._roster.group.target))

    def _close_if_healed(self) -> None:
        if self._casebook.current is None or not self._started or not self._roster.settled:
            return
        if self._progress.in_sequence:
            return  # the view counts a joining rank before its commit has ended, and its report belongs to the incident
        if any(v.health == Health.UNHEALTHY for v in self._chronicle.ranks):
            return
        self._casebook.close(len(self._roster.group.target))

    def _note(self, event: str, *, incident: str = "", **fields: object) -> None:
        self.journal.add(Kind.LIFECYCLE, {"event": event, **fields}, incident)

    # --- for the API ------------------------------------------------------------------------------------------------

    def observe(self) -> GroupStatus:
        """The group now; once the daemon is ending, as last seen."""
        return self._roster.group if self._ending else self._target.observe()

    def scale(self, wanted: int | tuple[int, ...], *, who: str) -> tuple[int, ...]:
        """An operator's request. Returns the new target. Raises Infeasible with the reason; then nothing was changed."""
        try:
            with self._turns.alone():
                target = self._actions.scale(wanted, who=who, refuse=self._untouchable())
                self._refresh()
        finally:
            self.journal.flush()
        return target

    def order(self, order: Order, *, who: str) -> Carried:
        """Any other request. Raises Infeasible with the reason; then nothing was changed."""
        try:
            with self._turns.alone():
                carried = self._requests.carry_out(order, who=who, refuse=self._untouchable())
                self._refresh()
                self._judge([])
        finally:
            self.journal.flush()
        return carried

    def _untouchable(self) -> str:
        """Why the group must not be changed now; empty: it may."""
        if not self._started or self._ending:
            return "the daemon is starting or ending; try again when `healer status` shows a group"
        return "spec.dryRun is set in the policy" if self.policy.spec.dry_run else ""

    def _make_scaling(self, recorder: Recorder | None) -> "Scaling | None":
        if not self.policy.spec.load.rules and not self.policy.spec.schedules:
            return None
        from healer.scaling import Scaling  # reading signals costs start-up time and memory that most policies save

        def scale(size: int, who: str) -> object:
            return self.scale(size, who=who)

        return Scaling(
            self.policy, self._clock, self.observe, self._target.address, self._unscalable, scale, self.journal, self._log,
            recorder,
        )  # fmt: skip

    def _unscalable(self) -> str:
        """Why load may not change the size now; empty: it may."""
        state = self._roster.state(wall=self._clock.wall())
        held = guards.scaling(self.policy, self._chronicle.ranks, state, self._clock.monotonic())
        return held.text if held else f"incident {self._casebook.id} is open" if self._casebook.id else ""

    def status(self) -> DaemonStatus:
        now, journal, group, chronicle = self._clock.monotonic(), self.journal, self.observe(), self._chronicle
        live = alive(group, chronicle.ranks)
        why = "the target is starting"
        if self._started:
            why = trouble(group, live, chronicle.ranks, chronicle.below, self._casebook.id, journal.error)
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
            scaling=self._scaling.status() if self._scaling is not None else None,
            group=group,
            live=live,
            verdicts=chronicle.ranks,
            gpus=chronicle.gpus,
            hosts=chronicle.hosts,
            placed=chronicle.placed,
            sensors=self._senses.status(),
            journal=JournalStatus(str(journal.path), journal.entries, journal.error, str(journal.set_aside or "")),
        )
