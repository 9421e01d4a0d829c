"""The executor: drives one group towards its target slots, one sequence at a time; a loss pre-empts everything else."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

from elastic.config import GroupConfig, read_model_shape
from elastic.controller.adoption import find_members, refuse_other_shape, used_incarnations, view_of
from elastic.controller.boots import Boots
from elastic.controller.ending import remove_leftovers
from elastic.controller.gateway import GatewayLink
from elastic.controller.group import Group, Unresponsive
from elastic.controller.guard import GuardedLauncher
from elastic.controller.link import RankLink
from elastic.controller.records import BootFailed, Event, Fenced, GroupStatus, RankBeat, RankGone
from elastic.controller.roster import Roster
from elastic.controller.sequences import Sequences
from elastic.controller.spares import Spares
from elastic.controller.state import ControllerLock, GroupState, drop_older_states, launched, load_state
from elastic.controller.status import group_status
from elastic.controller.targets import choose, refuse_infeasible
from elastic.cores import confine_controller
from elastic.errors import ElasticError, Retryable, Superseded
from elastic.launch.base import Launcher
from elastic.launch.local import LocalLauncher
from elastic.paths import config_path, write_json
from elastic.view import Member

log = logging.getLogger(__name__)

RETRY_S, RETRY_MAX_S = 0.25, 8.0
"""Pause before a failed sequence is tried again, unless something new happens; doubled each time that it fails again."""

CLOSE_ATTEMPTS = 3
TIER_DEADLINE_S = 600.0
END_S = 5.0


class Executor:
    """Everything here runs in the owner's event loop. Methods that only note a wish return at once."""

    def __init__(
        self,
        config: GroupConfig,
        on_event: Callable[[Event], None],
        launcher: Launcher | None = None,
        *,
        term: int = 0,
        armed: Callable[[], bool] = lambda: True,
    ) -> None:
        """`term`: of the lease under which this controller acts; ranks and gateway refuse the controllers of lower terms.
        0: no lease, and a file lock in the run directory keeps other controllers away. `armed`: asked at the last moment
        before a process is started or ended, which no rank can refuse; False once the lease is over."""
        self.config = config
        self._on_event = on_event
        self._term, self._armed, self._fenced = term, armed, ""
        self._launcher = GuardedLauncher(launcher or LocalLauncher(config), self._why_not, config.root)
        self._lock = ControllerLock(config) if term == 0 else None
        self._group = Group(config, read_model_shape(config.checkpoint))
        self._gateway = GatewayLink(config, self._launcher, term, self._fence)
        self._spares = Spares(config, self._launcher, lambda: self._wake.set(), term, self._fence)
        self._roster = Roster(
            config, self._group, lambda: self._boots.booting | set(self._boots.ready), self._why_not, term
        )
        self._boots = Boots(
            config,
            self._launcher,
            self._spares,
            self._roster,
            self._event,
            lambda: self._wake.set(),
            term,
        )
        self._sequences = Sequences(
            config, self._group, self._boots, self._gateway, self._launcher, on_event, self._roster.save
        )
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._wanted: dict[int, tuple[str, float]] = {}
        """Why and since when a slot should be live, or should leave."""
        self._lost: dict[int, tuple[str, float]] = {}
        self._loop: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._failure = ""
        self._failures = 0
        """Sequences in a row that failed."""
        self._released = False
        """The owner asked for the step to be run again, and it has not been yet."""
        self._formed = False

    # --- the owner's side -----------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Adopt the group that runs in `config.run_dir`, else form it (launch, load, first commit). Also starts the
        gateway where none runs. Returns a sentence: what was found, what was done. Raises ElasticError (bad checkpoint,
        ranks that die at start, another controller holds the group: Superseded where its term is higher); nothing is left
        running by a failed form."""
        self.config.validate(self._group.model)
        self.config.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        confine_controller(self.config)
        if self._lock is not None:
            self._lock.acquire()
        try:
            state = load_state(self.config)
            self._roster.recall(used_incarnations(self.config), state)
            if state is not None:
                self._group.epoch = state.epoch
            spares = await self._spares.find()
            found = await find_members(self.config, state, self._launcher, self._event, spares, self._term)
            if found:
                refuse_other_shape(self.config)
                sentence = await self._adopt(found, state)
            else:
                sentence = await self._form()
            if self._fenced:
                raise Superseded(self._fenced)
            drop_older_states(self.config, self._term)
            return sentence
        except Superseded:
            await self.close()
            raise
        except BaseException:
            self._release_lock()
            raise

    def lose(self, slots: Iterable[int], *, cause: str, detected: float, replace: bool = True) -> None:
        """The owner's verdict: these live slots are lost. Their processes are ended (fenced) if they still run. The loss
        sequence begins at once, superseding any sequence under way; with `replace` the slots stay in the target and are
        refilled afterwards, otherwise they leave the target."""
        if self._why_not():
            return
        fresh = {s: (cause, detected) for s in slots if s in self._group.live and s not in self._lost}
        if not replace:
            self._roster.target = tuple(s for s in self._roster.target if s not in fresh)
        if not fresh:
            return
        self._lost |= fresh
        self._group.hasten(self._lost)
        self._wanted |= dict.fromkeys(fresh, (f"refill after {cause}", detected))
        if self._running is not None:
            self._running.cancel()
        self._wake.set()

    def release(self) -> None:
        """The owner's verdict: the ranks wait, and nobody is condemned yet. The step in flight is dropped on every rank and
        run again by the same ranks: a loss of nobody. A rank that does not answer within the commit's deadline is lost.
        Nothing to do while a sequence runs: that releases the step itself."""
        if self._why_not() or self._running is not None or self._group.view is None:
            return
        self._released = True
        self._group.unsettled = True
        self._wake.set()

    def scale(self, target: int | Iterable[int], *, reason: str) -> tuple[int, ...]:
        """Set the target: a number of ranks, or the very slots. Returns the new target slots; raises Infeasible with the
        numbers (below 1, above max_ranks, too few expert slots), nothing changed; Superseded where this controller may not
        act any more. The sequences run in the background."""
        if why := self._why_not():
            raise Superseded(why)
        slots = (
            choose(self.config, self._roster.target, target) if isinstance(target, int) else tuple(sorted(set(target)))
        )
        refuse_infeasible(self.config, self._group.model.experts, slots)
        self._boots.pardon(slots)
        self._spares.pardon()
        now = time.monotonic()
        self._wanted |= dict.fromkeys({*slots} ^ {*self._roster.target}, (reason, now))
        self._roster.target = slots
        self._roster.save()
        self._wake.set()
        return slots

    async def settled(self, *, deadline_s: float) -> None:
        """Wait until live equals target and no sequence runs. Raises Retryable with what is still open."""
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(self._is_settled)
        except TimeoutError:
            raise Retryable(
                f"not settled within {deadline_s:g} s: live {list(self._group.live)}, target {list(self._roster.target)}, "
                f"quarantined {self._boots.quarantined}, last failure: {self._failure or 'none'}"
            ) from None

    def status(self) -> GroupStatus:
        running, recorder = self._running is not None, self._sequences.recorder
        sequence = f"{recorder.kind}: {recorder.state}" if running and recorder else None
        return group_status(
            self._group,
            self._boots,
            self._spares.status(),
            target=self._roster.target,
            lost=self._lost,
            sequence=sequence,
            gateway=self._gateway.trouble,
            term=self._term,
            fenced=self._why_not(),
        )

    @property
    def gateway_http(self) -> str:
        return self._gateway.process.http if self._gateway.process else ""

    async def close(self) -> None:
        """Let go: ranks and gateway go on serving. What a sequence that is cut off had stopped is set going first."""
        acted = self._loop is not None
        await self._end_loop()
        for _ in range(0 if self._why_not() else CLOSE_ATTEMPTS):
            if (sequence := self._repair()) is None:
                break
            await self._run(sequence)
        if acted and not self._why_not():
            # those who were asked to leave, and did not come to it, work on
            await self._gateway.route(self._group.epoch, self._sequences.routes())
        await self._boots.close()
        await self._spares.close()
        for link in self._group.links.values():
            await link.aclose()
        await self._gateway.close()
        self._release_lock()

    async def stop(self) -> None:
        """End the group: gateway and every rank, by pid and start time. The host-memory tier goes too. Where this controller
        may not act any more it lets go instead, as `close`."""
        if self._why_not():
            await self.close()
            return
        await self._end_loop()
        await self._boots.cancel(range(self.config.max_ranks))
        await self._spares.stop()
        await self._gateway.stop()
        for link in self._group.links.values():
            await link.aclose()
        for found in self._launcher.strays():
            self._launcher.end(found)
        await self._launcher.ended(deadline_s=END_S)
        remove_leftovers(self.config.root)
        self._group.links.clear()
        self._group.view = None
        self._roster.forget()
        self._release_lock()

    # --- the fence ------------------------------------------------------------------------------------------------

    def _why_not(self) -> str:
        """Why this controller may not act; empty where it may."""
        return self._fenced or ("" if self._armed() else f"the lease of term {self._term} is over")

    def _fence(self, why: str) -> None:
        """A rank, a spare or the gateway listens to a later controller: this one does nothing more, and lets go."""
        if self._fenced:
            return
        self._fenced = why
        log.error("this controller acts no more: %s", why)
        if self._running is not None and (recorder := self._sequences.recorder) is not None:
            recorder.end("superseded", why, self._group.live)
        for task in (self._loop, self._running):
            if task is not None:
                task.cancel()
        self._on_event(Fenced(why, time.monotonic()))

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    # --- start ----------------------------------------------------------------------------------------------------

    async def _form(self) -> str:
        write_json(config_path(self.config.root), self.config)
        self._roster.target = tuple(range(self.config.ranks))
        self._wanted = dict.fromkeys(self._roster.target, ("start", time.monotonic()))
        try:
            if self.config.host_tier:
                await self._launcher.build_tier(deadline_s=TIER_DEADLINE_S)
            await self._gateway.start(deadline_s=self.config.prepare_deadline_s)
            await self._take_gateway_epoch()
            self._begin()
            with contextlib.suppress(TimeoutError):
                # a boot, a load and a commit, each with its own deadline
                async with asyncio.timeout(3 * self.config.prepare_deadline_s), self._changed:
                    await self._changed.wait_for(lambda: self._formed or bool(self._boots.quarantined))
            if not self._formed:
                why = "; ".join(f"slot {s}: {w}" for s, w in self._boots.quarantined.items()) or self._failure
                raise ElasticError(f"the group could not be formed: {why}")
        except BaseException:
            await self.stop()
            raise
        return f"formed a group of {len(self._roster.target)} ranks on slots {list(self._roster.target)}"

    async def _adopt(self, found: dict[int, list[RankLink]], state: GroupState | None) -> str:
        group = self._group
        links, view, strays = view_of(found)
        for link in strays:
            await link.aclose()
            self._launcher.end(launched(link.member))
            self._launcher.remove(link.member.address)
        top = [link.status.epoch for links_ in found.values() for link in links_]
        group.epoch = max([group.epoch, *top])
        for link in links.values():
            self._roster.meet(link.member)
        group.view = view
        serving = set(view.live) if view else set()
        # a process without a view is a joiner, also in a slot that the view counts as live: the one it counts is dead
        group.links = {s: link for s, link in links.items() if s in serving and link.status.view is not None}
        self._boots.ready = {s: link for s, link in links.items() if s not in group.links}
        missing = sorted(serving - set(group.links))
        group.unsettled = any(
            link.status.phase != "serving" or (view is not None and link.status.view != view)
            for link in group.links.values()
        )
        self._roster.target = (
            state.target if state and state.target else tuple(sorted(serving)) or tuple(range(self.config.ranks))
        )
        self._formed = True
        await self._gateway.adopt()
        unsettled = group.unsettled
        self._lost |= dict.fromkeys(missing, ("died while no controller watched", time.monotonic()))
        await self._take_gateway_epoch()
        await self._gateway.route(group.epoch, self._sequences.routes())
        self._begin()
        self._roster.save()
        if not missing and not unsettled:
            return f"adopted the running group: slots {sorted(serving)} at epoch {group.epoch}, nothing to do"
        return (
            f"adopted the running group: slots {sorted(group.links)} at epoch {group.epoch}; "
            f"lost meanwhile: {missing or 'none'}; a sequence was under way: {'yes' if unsettled else 'no'}"
        )

    async def _take_gateway_epoch(self) -> None:
        if (gateway := await self._gateway.status()) is not None:
            # its routes may be newer than what any rank or the state file knows: those of a retirement, or of a group
            # that died as a whole
            self._group.epoch = max(self._group.epoch, gateway.epoch)

    def _begin(self) -> None:
        self._loop = asyncio.create_task(self._reconcile(), name="executor")
        self._wake.set()

    async def _end_loop(self) -> None:
        for task in (self._loop, self._running):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(t for t in (self._loop, self._running) if t is not None), return_exceptions=True)
        self._loop = self._running = None

    # --- the loop -------------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._settle()
            except Exception as error:
                # without this loop nothing is healed any more: no bug may end it
                log.error("the executor's loop failed", exc_info=error)
                self._failure, self._running = f"{type(error).__name__}: {error}", None
                self._failures += 1
                await self._pause()
                self._wake.set()
            await self._notify()

    async def _settle(self) -> None:
        while (sequence := await self._next()) is not None:
            if await self._run(sequence):
                await self._pause()

    async def _run(self, sequence: Coroutine[Any, Any, None]) -> bool:
        """True when it failed."""
        serves = self._formed
        if serves:
            self._spares.disturbed()
        self._running = asyncio.create_task(sequence, name="sequence")
        failed = await self._finish(self._running)
        self._running = None
        if serves:
            self._spares.disturbed()
        self._roster.save()
        await self._notify()
        return failed

    async def _next(self) -> Coroutine[Any, Any, None] | None:
        """What to do now; None: nothing, until somebody wakes the loop."""
        group, boots = self._group, self._boots
        if self._why_not():
            return None
        if (sequence := self._repair()) is not None:
            return sequence
        await boots.cancel((boots.booting | set(boots.ready)) - set(self._roster.target))
        wanted = [s for s in self._roster.target if s not in group.live and s not in boots.quarantined]
        if wanted:
            boots.ensure(wanted)
            ready = [s for s in wanted if s in boots.ready]
            if ready and (self._formed or len(ready) == len(wanted)) and self._can_hold({*group.live, *ready}):
                return self._sequences.join(ready, *self._why(ready))
            if boots.booting & set(wanted):
                # nobody leaves before those who come in their place are there
                return None
        leavers = [s for s in group.live if s not in self._roster.target]
        if leavers and not group.parked and self._can_hold(set(group.live) - set(leavers)):
            return self._sequences.retire(leavers, *self._why(leavers))
        if self._formed:
            # not before: a spare on its way would take the processor from a rank that is
            self._spares.ensure()
        return None

    def _repair(self) -> Coroutine[Any, Any, None] | None:
        """What brings a group with lost ranks, or one that was stopped half-way, back to serving."""
        self._lost = {s: why for s, why in self._lost.items() if s in self._group.live}
        if self._lost:
            cause = "; ".join(dict.fromkeys(c for c, _ in self._lost.values()))
            detected = min(d for _, d in self._lost.values())
            return self._sequences.loss(tuple(self._lost), cause, detected)
        if self._group.unsettled:
            why = "the step is run again, as the owner asked" if self._released else "a sequence was interrupted"
            self._released = False
            return self._sequences.loss((), why, time.monotonic())
        return None

    def _why(self, slots: Collection[int]) -> tuple[str, float]:
        found = [self._wanted.get(s, ("the target says so", time.monotonic())) for s in slots]
        return "; ".join(dict.fromkeys(reason for reason, _ in found)), min(since for _, since in found)

    def _can_hold(self, ranks: Collection[int]) -> bool:
        return len(ranks) * self.config.slots_per_rank >= self._group.model.experts

    async def _finish(self, task: asyncio.Task[None]) -> bool:
        """Wait for a sequence; True when it failed. A cancelled one was superseded by a loss."""
        await asyncio.wait([task])
        recorder, live = self._sequences.recorder, self._group.live
        if task.cancelled():
            if recorder is not None:
                recorder.end("superseded", "another rank was lost", live)
            return False
        error = task.exception()
        if error is None:
            self._formed = self._formed or bool(live)
            self._failure, self._failures = "", 0
            return False
        self._failure = str(error) if isinstance(error, ElasticError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, ElasticError):
            log.error("a sequence failed unexpectedly", exc_info=error)
        if recorder is not None:
            recorder.end("failed", self._failure, live)
        if isinstance(error, Unresponsive):
            self.lose(error.slots, cause=f"no answer within the commit deadline: {error}", detected=time.monotonic())
            return False
        self._failures += 1
        return True

    async def _pause(self) -> None:
        """A failed sequence is tried again after a while, or when something new is known."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(RETRY_S * 2 ** min(self._failures - 1, 10), RETRY_MAX_S)):
                await self._wake.wait()
        self._wake.clear()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # --- bookkeeping ----------------------------------------------------------------------------------------------

    def _event(self, event: Event) -> None:
        if isinstance(event, Fenced):
            self._fence(event.why)
            return
        if isinstance(event, RankGone) and self._group.links.get(event.member.slot) is None:
            slot = event.member.slot
            link = self._boots.ready.get(slot)
            if link is not None and link.member == event.member:
                self._boots.failed(link, f"ended before it joined: {self._words(event.member)}")
            return
        if isinstance(event, BootFailed) and not self._formed:
            # at the first start a rank that cannot come up is a mistake to report, not a fault to heal
            self._boots.quarantined[event.slot] = event.why
        if isinstance(event, RankGone) and not self._why_not():
            self._group.hasten_without(event, self._lost)
        self._on_event(event)
        if isinstance(event, RankBeat) and event.beat.phase == "parked" and self._serves(event.member):
            # it masked a peer by itself and stands; only a full commit makes the masks agree again
            self._group.unsettled = True
            self._wake.set()

    def _serves(self, member: Member) -> bool:
        """Whether this rank should be running rounds now. A beat that comes after the answer to Resume is newer than it."""
        group = self._group
        stands = group.parked or group.hastened or group.unsettled
        return self._running is None and not stands and member.slot in group.links

    def _words(self, member: Member) -> str:
        return self._launcher.last_words(f"rank-{member.slot}.{member.incarnation}")

    def _is_settled(self) -> bool:
        group = self._group
        return self._running is None and not self._lost and not group.unsettled and group.live == self._roster.target
