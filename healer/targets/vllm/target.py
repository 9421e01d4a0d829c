"""The target: a vLLM group behind `healer.targets.Target`. One task asks the ranks, one decides and acts."""

import asyncio
import os
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from pathlib import Path
from typing import Any

import structlog

from elastic.controller.records import Event, GroupStatus
from elastic.errors import ElasticError
from elastic.vllm.records import GuardState
from healer.authority import Authority
from healer.policy.schema import Policy, VllmTarget
from healer.targets.vllm import adopt, commands, healing, in_place, recovery, scaling, sequences
from healer.targets.vllm.endpoints import read_key
from healer.targets.vllm.group import Group
from healer.targets.vllm.machine import State, Trigger
from healer.targets.vllm.plan import LEAST_RANKS, Do, Step, decide
from healer.targets.vllm.polling import Poller
from healer.targets.vllm.processes import Processes
from healer.targets.vllm.proof import Broken, NotStarted, Yielded
from healer.targets.vllm.record import Record
from healer.targets.vllm.records import Role
from healer.targets.vllm.router import RouterLink
from healer.targets.vllm.starters import HookStarter, LocalStarter, Onlooker, Starter

log = structlog.get_logger("healer.vllm")

PAUSE_S, PAUSE_MAX_S = 5.0, 300.0
"""Before a failed action is tried again, doubled each time."""
HOLD_SLACK_S = 60.0
ROUTER_S = 30.0


class VllmGroupTarget:
    """External load balancing: one API server for each rank."""

    def __init__(
        self,
        policy: Policy,
        on_event: Callable[[Event], None],
        *,
        observe_only: bool = False,
        authority: Authority | None = None,
        starter: Starter | None = None,
    ) -> None:
        """With `observe_only` (a dry run) a group that runs is watched and never changed. `authority`: under which it acts. `starter`: another than that of
        spec.target.mode. Raises ElasticError for arguments that contradict healer's."""
        target = policy.spec.target
        if not isinstance(target, VllmTarget):
            raise ElasticError(f"spec.target.kind {target.kind} is not vllm")
        self._on_event, self._observe_only = on_event, observe_only
        self._authority = authority or Authority()
        key = read_key(target.api_key_file)
        run_dir = Path(target.run_dir)
        self._processes = Processes(run_dir)
        hold_s = min(86400.0, target.deadlines.start_s + HOLD_SLACK_S)
        self._router = RouterLink(run_dir, target.gateway, self._processes, hold_s=hold_s)
        if starter is None and target.mode == "launch":
            starter = LocalStarter(target, self._processes, key, lambda: self.group.variables())
        starter = starter or HookStarter(target, policy.spec.hooks)
        if observe_only:
            starter = Onlooker(starter)
        self.group = Group(
            policy, target, starter, self._router, on_event, key, observes=observe_only, armed=self._authority.armed
        )
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._running: asyncio.Task[None] | None = None
        self._poller = Poller(self.group, self._processes, self._router, lambda: self._idle, self._wake.set)
        self._failures = 0
        self._lost_since = 0.0
        self._said = ""

    # --- the owner's side -----------------------------------------------------------------------------------------

    async def start(self) -> str:
        group = self.group
        group.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._tasks = [asyncio.create_task(self._poller.run(), name="vllm poll")]
        try:
            if not self._observe_only:
                await adopt.end_spares(group, self._processes)
            await self._use_plugin()
            if await adopt.adopt(group):
                group.machine.move(Trigger.ADOPT, "a group runs")
                await adopt.prove(group)
                sentence = f"adopted {len(group.held(Role.LIVE))} ranks"
            elif self._observe_only:
                raise ElasticError(f"{group.run_dir}: no group {group.name!r} serves here, and a dry run starts none")
            else:
                sentence = await self._form()
        except BaseException:
            await self._let_go()
            if not self._observe_only:
                self._router.stop()
                if group.coordinated and not group.ranks:
                    await in_place.quit(group.run_dir)
            raise
        group.publish()
        await self._router_up()
        self._poller.serves = True
        self._tasks.append(asyncio.create_task(self._run(), name="vllm actions"))
        if self._observe_only and group.config.mode == "launch":
            self._tasks.append(asyncio.create_task(self._follow(), name="vllm follow"))
        if group.spares is not None:
            spares = group.spares.keep(lambda: group.calm and not self._idle)
            self._tasks.append(asyncio.create_task(spares, name="vllm spares"))
        return sentence

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self.group.poll_s)
            try:
                await adopt.follow(self.group)
            except Exception as error:
                log.error("follow.failed", exc_info=error)

    async def _use_plugin(self) -> None:
        """Launches have it from now on, and who runs with it is healed in place, if the guard and the arguments let it be."""
        group, config = self.group, self.group.config
        found = await in_place.verdict(config, group.arguments)
        log.info("in_place", state=found.state.value, why=found.reason)
        if found.state != GuardState.READY or not isinstance(group.starter, LocalStarter):
            return
        python, env = in_place.interpreter(config.executable), os.environ | config.env
        group.in_place = in_place.InPlace(
            group.run_dir, python, self._processes, host=commands.HOST, env=env, installed=found.plugins
        )
        if not self._observe_only:
            self._tasks.append(asyncio.create_task(self._watch_coordination(group.in_place), name="vllm coordination"))

    async def _watch_coordination(self, plugin: in_place.InPlace) -> None:
        group, spares = self.group, self.group.spares
        await plugin.watch(
            lambda: len(group.held(Role.LIVE)) if group.coordinated and not self._idle else 0,
            warm=lambda: spares is not None and spares.complete,
        )

    async def _router_up(self) -> None:
        """A router that does not come up is reported and tried again: the ranks are worth more than it is."""
        until = time.monotonic() + ROUTER_S
        while self._router.trouble and not self._observe_only:
            try:
                await self.group.after_poll(until)
            except TimeoutError:
                log.error("router.late", why=self._router.trouble)
                return

    async def _form(self) -> str:
        """Raises ElasticError with nothing left running."""
        group = self.group
        group.machine.move(Trigger.START, "nothing runs")
        record = Record(group, "form", group.target, "nothing ran", time.monotonic())
        while True:
            slots = [slot for slot in group.target if slot not in group.unstartable]
            try:
                await sequences.form(group, slots, record)
            except BaseException as error:
                if not isinstance(error, ElasticError):
                    await asyncio.shield(sequences.fence_all(group))
                    raise
                failed = error.failed if isinstance(error, NotStarted) else {}
                if isinstance(error, NotStarted):
                    for event in sequences.boot_failures(group, error):
                        self._on_event(event)
                left = [slot for slot in group.target if slot not in group.unstartable]
                if not failed or len(left) < LEAST_RANKS:
                    record.end("failed", str(error))
                    raise ElasticError(f"the group cannot be started: {error}") from error
                continue
            group.machine.move(Trigger.STARTED, "all answer canaries")
            record.end("committed")
            return f"started {len(slots)} ranks"

    def observe(self) -> GroupStatus:
        return self.group.status()

    def address(self) -> str:
        return self._router.http

    def lose(self, slots: Iterable[int], *, cause: str, detected: float, replace: bool) -> None:
        group = self.group
        live = {h.slot for h in group.held(Role.LIVE)}
        slots = tuple(slots)
        fresh = [s for s in slots if s in live and s not in group.lost]
        if not replace:
            # a rank that did not come along when the others went on is no longer there to be lost, and not wanted back either
            left_out = {s for s in slots if s in group.holes.values() and s not in live}
            group.target = tuple(s for s in group.target if s not in left_out)
        if self._idle or not fresh or group.machine.state in (State.YIELDED, State.CLOSED):
            return
        group.lost |= dict.fromkeys(fresh, cause)
        self._lost_since, group.lost_since = detected, time.monotonic()
        if not replace:
            group.target = tuple(s for s in group.target if s not in fresh)
        group.publish()
        if self._running is not None and group.machine.state != State.HEALING:
            # those who go on in place leave out by themselves whoever dies meanwhile
            self._running.cancel()
        self._wake.set()

    def scale(self, target: int | Iterable[int], *, reason: str) -> tuple[int, ...]:
        group = self.group
        self._authority.check()
        slots = scaling.wanted(group, target)
        for slot in slots:
            group.attempts.pop(slot, None)
        group.target, group.not_before = slots, 0.0
        group.save()
        log.info("target.set", slots=list(slots), reason=reason)
        self._wake.set()
        return slots

    def release(self) -> None:
        """Nothing: a policy that asks for it is refused, since vLLM's ranks cannot drop a step."""

    def probation(self, slots: Collection[int]) -> None:
        """Nothing: every rank answers a canary before it serves, with the others' tokens."""

    async def close(self) -> None:
        await self._let_go()

    async def stop(self) -> None:
        group = self.group
        held = group.held()
        await self._let_go()
        if self._observe_only:
            return
        self._router.stop()
        await group.starter.end(held, deadline_s=group.config.deadlines.end_s)
        group.ranks.clear()
        if group.coordinated:
            await in_place.quit(group.run_dir)
            group.coordinated = False
        group.save()

    async def _let_go(self) -> None:
        tasks, self._tasks = [*self._tasks, *([self._running] if self._running else [])], []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.group.spares is not None:
            await self.group.spares.end()
        if self.group.machine.may(Trigger.CLOSE):
            self.group.machine.move(Trigger.CLOSE, "the daemon ends")
        if self.group.ranks:
            self.group.save()
        for rank in self.group.ranks.values():
            await rank.aclose()
        if self.group.in_place is not None:
            await self.group.in_place.aclose()

    # --- acting ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._idle:
                continue
            await healing.look(self.group)
            step = self._next()
            if step.do == Do.NOTHING:
                if step.why != self._said:
                    self._said = step.why
                    log.debug("plan.nothing", why=step.why)
                continue
            log.info("plan", do=step.do.value, slots=list(step.slots), why=step.why)
            self._said = ""
            self._running = asyncio.create_task(self._act(step), name=f"vllm {step.do}")
            try:
                await asyncio.wait([self._running])
                if not self._running.cancelled() and (error := self._running.exception()) is not None:
                    log.error("action.failed", exc_info=error)
                    self._pause()
            finally:
                self._running = None
            self.group.publish()

    @property
    def _idle(self) -> bool:
        """A dry run, or a daemon whose lease is over."""
        return self._observe_only or not self._authority.armed()

    def _next(self) -> Step:
        group = self.group
        if group.machine.state == State.RESTARTING:
            # what was under way was cut off by the loss of a rank
            return Step(Do.RESTART, group.machine.why, tuple(sorted(group.lost)))
        return decide(group.facts())

    async def _act(self, step: Step) -> None:
        group, machine = self.group, self.group.machine
        match step.do:
            case Do.YIELD:
                machine.move(Trigger.OTHER_CONTROLLER, step.why)
                log.error("yielded", why=step.why)
            case Do.RESTART:
                machine.move(Trigger.BROKEN, step.why)
                await self._restart(step)
            case Do.START:
                machine.move(Trigger.START, step.why)
                await self._restart(step)
            case Do.RETRY:
                machine.move(Trigger.RETRY, step.why)
                record = Record(group, "loss", step.slots, step.why, time.monotonic())
                await self._sequence(recovery.retry(group, record), record, step)
            case Do.REMOVE:
                machine.move(Trigger.REMOVE, step.why)
                record = Record(group, "loss", step.slots, step.why, self._lost_since or time.monotonic())
                await self._sequence(recovery.remove(group, step.slots, record), record, step)
            case Do.HEAL if group.in_place is not None:
                machine.move(Trigger.HEAL, step.why)
                record = Record(group, "loss", step.slots, step.why, self._lost_since or time.monotonic())
                await self._sequence(healing.heal(group, group.in_place, step.slots, record), record, step)
            case Do.FILL if group.in_place is not None:
                machine.move(Trigger.FILL, step.why)
                record = Record(group, "join", step.slots, step.why, time.monotonic())
                await self._sequence(healing.fill(group, group.in_place, step.slots[0], record), record, step)
            case Do.GROW:
                machine.move(Trigger.GROW, step.why)
                record = Record(group, "join", step.slots, step.why, time.monotonic())
                await self._sequence(scaling.grow(group, step.slots, record), record, step)
            case Do.SHRINK:
                machine.move(Trigger.SHRINK, step.why)
                record = Record(group, "retire", step.slots, step.why, time.monotonic())
                await self._sequence(scaling.shrink(group, step.slots, record), record, step)

    async def _sequence(self, work: Coroutine[Any, Any, None], record: Record, step: Step) -> None:
        machine = self.group.machine
        try:
            await work
        except asyncio.CancelledError:
            record.end("superseded", "a rank was lost meanwhile")
            if machine.state == State.FILLING:
                machine.move(Trigger.FAILED, "a rank was lost meanwhile")
            elif self.group.lost:
                machine.move(Trigger.BROKEN, "a rank was lost meanwhile")
            raise
        except Yielded as error:
            record.end("failed", str(error))
            machine.move(Trigger.OTHER_CONTROLLER, str(error))
            log.error("yielded", why=str(error))
        except (Broken, ElasticError) as error:
            if isinstance(error, NotStarted):
                for event in sequences.boot_failures(self.group, error):
                    self._on_event(event)
            if isinstance(error, Broken) or step.do in (Do.RETRY, Do.REMOVE, Do.HEAL):
                record.end("failed", str(error))
                machine.move(Trigger.BROKEN, str(error))
                await self._restart(Step(Do.RESTART, str(error), step.slots))
            else:
                record.end("rolled-back", str(error))
                machine.move(Trigger.FAILED, str(error))
                self._refused(step)
                self._pause()
        else:
            self._failures = 0
            machine.move(Trigger.DONE, step.why)
            record.end("committed")

    def _refused(self, step: Step) -> None:
        """A size that vLLM refuses is not asked for again and again."""
        live = {h.slot for h in self.group.held(Role.LIVE)}
        if step.do == Do.SHRINK:
            self.group.target = tuple(sorted(live | set(self.group.target)))

    async def _restart(self, step: Step) -> None:
        """All ranks are ended and launched again, as many as can be."""
        group, machine = self.group, self.group.machine
        began = self._lost_since if group.lost and self._lost_since else time.monotonic()
        slots = step.slots or group.target
        record = Record(group, "loss", slots, step.why, began)
        try:
            # from here on nobody is live, so that the end of the survivors is no news
            group.abandon()
            record.phase("fence")
            await sequences.fence_all(group)
            wanted = [s for s in group.target if s not in group.unstartable]
            if len(wanted) < LEAST_RANKS:
                raise ElasticError(f"{len(wanted)} slots can be started, and vLLM needs {LEAST_RANKS}")
            await sequences.form(group, wanted, record)
        except asyncio.CancelledError:
            record.end("superseded", "a rank was lost meanwhile")
            raise
        except ElasticError as error:
            if isinstance(error, NotStarted):
                for event in sequences.boot_failures(group, error):
                    self._on_event(event)
            machine.move(Trigger.FAILED, str(error))
            record.end("failed", str(error))
            self._pause()
        else:
            self._failures, self._lost_since = 0, 0.0
            machine.move(Trigger.STARTED, "all answer canaries")
            group.publish()
            record.end("committed")

    def _pause(self) -> None:
        self._failures += 1
        self.group.not_before = time.monotonic() + min(PAUSE_MAX_S, PAUSE_S * 2 ** (self._failures - 1))
