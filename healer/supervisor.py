"""The supervisor: the loop that owns all state. It starts and ends what belongs to a daemon, and goes round: events and ticks
come in and are handed on, one at a time.

Everything here runs in one event loop. Nobody else writes its state.
"""

import asyncio
import contextlib
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.controller.records import Event, GroupStatus
from elastic.errors import ElasticError, Infeasible
from healer import __version__, logs
from healer.actions import Actions
from healer.authority import Authority
from healer.casebook import Casebook
from healer.chronicle import Chronicle
from healer.clock import Clock
from healer.deliberation import Deliberation
from healer.diagnosis import Cause, Health
from healer.evidence import Evidence
from healer.herald import Herald
from healer.journal import Journal, Kind
from healer.load_desk import LoadDesk
from healer.logs import LateLog
from healer.machine import Machine
from healer.metrics import Metrics
from healer.orders import Carried, Order
from healer.policy import guards
from healer.policy.decide import Reason
from healer.policy.memory import Note
from healer.policy.schema import Policy
from healer.progress import Progress
from healer.reception import Reception
from healer.reload import PolicyFile
from healer.requests import Requests
from healer.roster import Roster
from healer.senses import Senses
from healer.status import DaemonStatus, LeaseStatus, alive, healing_status, trouble
from healer.systemd import Notifier as ServiceManager
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
        authority: Authority | None = None,
        lease: Callable[[], LeaseStatus | None] = lambda: None,
        policy_file: Path | None = None,
        service: ServiceManager | None = None,
    ) -> None:
        """Raises ElasticError where the target cannot be made from the policy (a bad checkpoint). `machine`: the sensors of
        the host, none by default. `recorder`: keeps a trace. `authority`: whether this daemon may act, always by default;
        `lease`: what the status shows of it. `policy_file`: watched for changes. `service`: the service manager."""
        self.policy, self.journal = policy, journal
        self._authority, self._lease = authority or Authority(), lease
        self._service = service or ServiceManager({})
        self.metrics = Metrics(self, lambda: journal.entries)
        self._clock, self._log = clock, LateLog("healer")
        self._tick_s = _tick_s(policy)
        self._policy_file = PolicyFile(policy_file, policy, clock)
        machine = machine or Machine()
        self._senses = Senses(policy, clock, machine, self._sensor_failed)
        self._casebook = Casebook(journal, clock, self.metrics, self._log)
        self._upkeep = Upkeep(journal, self.metrics, self._log, policy.spec.journal.retention)
        self._herald = Herald(policy, journal, clock, self.metrics, self._log)
        self._chronicle = Chronicle(policy.limits, machine, self._casebook, journal, self.metrics, self._log, recorder)
        self._target = make_target(self.on_event)
        self._roster = Roster(self._target.observe())
        self._actions = Actions(
            self._target, self._roster, self._casebook, journal, self.metrics, self._log, clock, policy,
            authority=self._authority,
        )  # fmt: skip
        self._roster.on_note = self._noted
        self._requests = Requests(self._target, self._roster, self._actions, journal, clock)
        self._progress = Progress(self._casebook, journal, self.metrics, self._log)
        self._recorder = recorder
        self._load = LoadDesk(policy, self._make_scaling)
        self._deliberation = Deliberation(
            policy, self._target, self._roster, self._senses, self._chronicle, self._casebook, self._actions,
            self._progress, self._herald, self._upkeep, journal, clock, self._authority,
        )  # fmt: skip
        reception = Reception(
            self, self._senses, self._roster, self._actions, self._progress, journal,
            lambda: self.policy.spec.detection.process_interval_s,
        )  # fmt: skip
        self._turns: Turns[Event] = Turns(reception.handle, self._event_failed, self._log.flush_soon)
        self._started_at = self._last_round = clock.monotonic()
        self._next_housekeeping = self._started_at
        self._started = ""
        self._ending = ""
        self._wake = asyncio.Event()

    # --- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start the target, keep it healthy until `end` is called, then let go of it or stop it. Raises what the target's
        start raises, and Superseded where this daemon may not act any more; then it has let go."""
        self._note("daemon-started", policy=self.policy.metadata.name, version=__version__, pid=os.getpid())
        self._senses.start(self._wake.set)
        self._herald.start()
        self._load.start()
        # the first verdict must not wait for the import and start of what runs its threads
        await asyncio.to_thread(os.getpid)
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
        self._authority.check()

    def end(self, *, stop: bool, who: str) -> None:
        """Leave the loop: with `stop` serving ends too, without it goes on. Raises Infeasible where serving is not to be
        touched."""
        if stop and self.policy.spec.dry_run:
            raise Infeasible(
                "spec.dryRun is set in the policy: this daemon does not end serving; SIGTERM ends it alone"
            )
        if not self._ending:
            self._ending = "stop" if stop else "close"
            self._service.stopping()
            self._note("daemon-ending", stop_serving=stop, who=who)
            self._log.say("info", "daemon.ending", stop_serving=stop, who=who)
            self._wake.set()

    def disarm(self, why: str) -> None:
        """Another daemon may act from now on: nothing more is done, and the loop is left."""
        if not self._authority.over or not self._ending:
            self._authority.end(why)
            self._log.say("error", "lease.lost", why=self._authority.over)
            self._herald.lease_lost(f"this daemon acts no more and lets go: {self._authority.over}")
            self.end(stop=False, who="the lease")

    def reload(self) -> None:
        """Read the policy file again, changed or not."""
        self._policy_file.reload()
        self._wake.set()

    @property
    def ending(self) -> bool:
        return bool(self._ending)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return self._turns.alone()

    @property
    def loop_age_s(self) -> float:
        return self._clock.monotonic() - self._last_round

    def _begin(self, sentence: str) -> None:
        self._started, self._deliberation.started = sentence, True
        self._note("target-started", sentence=sentence, incident=self._casebook.id)
        self._service.ready(sentence)
        self._log.say(
            "info", "target.started", sentence=sentence, took_s=round(self._clock.monotonic() - self._started_at, 3)
        )
        with self._turns.alone():
            self.refresh()
            # a rank may have died before anybody watched it
            self.consider(self._senses.scan())
        # all that was loaded for the start stays, and a full collection would hold up a decision: 37 ms on an H200's host
        gc.collect()
        gc.freeze()

    async def _finish(self, *, stop: bool) -> None:
        await self._upkeep.close(CLOSE_DEADLINE_S)
        await asyncio.gather(self._senses.stop(), self._actions.close(), self._policy_file.close(), self._load.stop())
        outcome = "serving was stopped" if stop else "serving goes on" if self._started else "nothing was started"
        try:
            async with asyncio.timeout(STOP_DEADLINE_S if stop else CLOSE_DEADLINE_S):
                await (self._target.stop() if stop else self._target.close())
        except (ElasticError, TimeoutError) as error:
            outcome = f"the target did not answer: {error or 'deadline passed'}"
            self._log.say("error", "target.unreachable", error=outcome)
        self._note("daemon-ended", sentence=outcome)
        self.journal.flush()
        await self._herald.close()
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
        self._service.alive(now)
        if not self._authority.armed():
            self.disarm(self._authority.over)
            return
        self._look_at_policy(now)
        found = self._senses.round(late_s)
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + HOUSEKEEPING_S
            self._keep_house()
        if found or self._roster.waiting or self._unsettled:
            self.consider(found)
        if self._started and not self._ending:
            self._load.tick(now)

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
            self.refresh()
            self.consider([])
        self._chronicle.tidy(self._clock.monotonic())
        self._upkeep.tidy(self._casebook.id)
        if self._started:
            self._service.status(self._why() or f"all {len(self._roster.live)} ranks are healthy")

    # --- for those who report: evidence goes to judgement ---------------------------------------------------------------

    def consider(self, found: list[Evidence]) -> None:
        self._deliberation.consider(found)

    def refresh(self) -> None:
        self._deliberation.refresh()

    def open_incident(self, cause: Cause, slots: tuple[int, ...], detected: float) -> None:
        self._deliberation.open_incident(cause, slots, detected)

    def _noted(self, note: Note) -> None:
        self._actions.write_note(note)
        self._herald.noted(note)

    def _note(self, event: str, *, incident: str = "", **fields: object) -> None:
        self.journal.add(Kind.LIFECYCLE, {"event": event, **fields}, incident)

    # --- for the API ------------------------------------------------------------------------------------------------

    def observe(self) -> GroupStatus:
        """The group now; once the daemon is ending, as last seen."""
        return self._roster.group if self._ending else self._target.observe()

    def order(self, order: Order, *, who: str) -> Carried:
        """An operator's request. Raises ElasticError with the reason; then nothing was changed."""
        try:
            with self._turns.alone():
                carried = self._requests.carry_out(order, who=who, refuse=self._untouchable())
                self.refresh()
                self.consider([])
        finally:
            self.journal.flush()
        self._upkeep.harden()
        return carried

    def _scale(self, wanted: int, who: str) -> tuple[int, ...]:
        """A size that load rules or schedules ask for."""
        try:
            with self._turns.alone():
                target = self._actions.scale(wanted, who=who, refuse=self._untouchable(), reason=Reason.LOAD)
                self.refresh()
        finally:
            self.journal.flush()
        return target

    def _untouchable(self) -> str:
        """Why the group must not be changed now; empty: it may."""
        if not self._started or self._ending:
            return "the daemon is starting or ending; try again when `healer status` shows a group"
        return "spec.dryRun is set in the policy" if self.policy.spec.dry_run else ""

    # --- a changed policy -------------------------------------------------------------------------------------------

    def _look_at_policy(self, now: float) -> None:
        found = self._policy_file.poll(now)
        if isinstance(found, str):
            self.metrics.policy_rejected.inc()
            self._note("policy-rejected", why=found)
            self._herald.policy_rejected(found)
            self._log.say("error", "policy.rejected", why=found)
        elif found is not None:
            self._adopt(found)
        if found is not None:
            # nothing else may happen for long that would write it down
            self.journal.flush()

    def _adopt(self, policy: Policy) -> None:
        """All at once, between two rounds."""
        self.policy = self._deliberation.policy = policy
        self._tick_s = _tick_s(policy)
        self._senses.adopt(policy)
        self._chronicle.adopt(policy.limits)
        self._actions.adopt(policy)
        self._herald.adopt(policy)
        self._upkeep.retention = policy.spec.journal.retention
        self._load.adopt(policy)
        digest = self._policy_file.status.digest
        self._note("policy-loaded", digest=digest)
        self._log.say("info", "policy.loaded", digest=digest)

    # --- load -------------------------------------------------------------------------------------------------------

    def _make_scaling(self, policy: Policy) -> "Scaling":
        from healer.scaling import Scaling

        return Scaling(
            policy, self._clock, self.observe, self._target.address, self._unscalable, self._scale, self.journal,
            self._log, self._recorder,
        )  # fmt: skip

    def _unscalable(self) -> str:
        """Why load may not change the size now; empty: it may."""
        state = self._roster.state(wall=self._clock.wall())
        held = guards.scaling(self.policy, self._chronicle.ranks, state, self._clock.monotonic())
        return held.text if held else f"incident {self._casebook.id} is open" if self._casebook.id else ""

    def _why(self) -> str:
        """What keeps the daemon from "ok"; empty when nothing does."""
        group, chronicle = self.observe(), self._chronicle
        if not self._started:
            return "the target is starting"
        live = alive(group, chronicle.ranks)
        return trouble(group, live, chronicle.ranks, chronicle.below, self._casebook.id, self._upkeep.trouble)

    def status(self) -> DaemonStatus:
        now, group, chronicle = self._clock.monotonic(), self.observe(), self._chronicle
        why = self._why()
        return DaemonStatus(
            state="stopping" if self._ending else "starting" if not self._started else "degraded" if why else "ok",
            why=why,
            version=__version__,
            pid=os.getpid(),
            policy=self.policy.metadata.name,
            policy_file=self._policy_file.status,
            lease=self._lease(),
            acts=self._authority.armed(),
            healing=healing_status(self.policy, self._roster.memory, self._deliberation.suspects or ()),
            dry_run=self.policy.spec.dry_run,
            uptime_s=now - self._started_at,
            loop_age_s=self.loop_age_s,
            started=self._started,
            serving=self._target.address() if self._started else "",
            incident=self._casebook.current,
            decision=self._deliberation.sentence,
            scaling=self._load.status(),
            group=group,
            live=alive(group, chronicle.ranks),
            verdicts=chronicle.ranks,
            gpus=chronicle.gpus,
            hosts=chronicle.hosts,
            placed=chronicle.placed,
            sensors=self._senses.status(),
            journal=self._upkeep.status(),
            log_dropped=logs.dropped(),
        )


def _tick_s(policy: Policy) -> float:
    """Between two rounds of the loop: a fraction of the shortest silence that counts."""
    return min(0.1, policy.spec.detection.stall_after_s / 8)
