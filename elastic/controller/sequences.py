"""The sequences: loss, join, retire. Each brings the group from one view to the next, or leaves it as it was.

Any of them may be cancelled at any await, since a new loss pre-empts everything. What makes that safe: a commit carries the
whole view, ranks may take it again, and `Group.unsettled` tells the executor that a full commit (a loss of nobody) must
follow. Contents of the expert buffers are always taken from the ranks' answers, never from memory.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

from elastic.config import GroupConfig
from elastic.controller.boots import Boots
from elastic.controller.gateway import GatewayLink
from elastic.controller.group import Group, first_plan, moves_by_slot
from elastic.controller.guard import GuardedLauncher
from elastic.controller.link import RankLink
from elastic.controller.phases import Step
from elastic.controller.recorder import Recorder
from elastic.controller.records import Event, Joiner
from elastic.errors import ElasticError, Infeasible, Unreachable
from elastic.launch.base import Launched
from elastic.placement import Move, Plan, initial, replan
from elastic.placement.maps import Row
from elastic.protocol import Abort, Done, Leave, Link, Parked, Prepare, Prepared, Route
from elastic.view import View

T = TypeVar("T")

RESUMED_S = 2.0
"""How long a report waits for the first step of every survivor."""

LEAVE_S = 1.0


class Sequences:
    """Run by the executor, one at a time."""

    def __init__(
        self,
        config: GroupConfig,
        group: Group,
        boots: Boots,
        gateway: GatewayLink,
        launcher: GuardedLauncher,
        on_event: Callable[[Event], None],
        view_changed: Callable[[], None],
    ) -> None:
        self.recorder: Recorder | None = None
        self._config, self._group, self._boots, self._gateway = config, group, boots, gateway
        self._launcher, self._on_event, self._view_changed = launcher, on_event, view_changed

    # --- unplanned loss -------------------------------------------------------------------------------------------

    async def loss(self, lost: Collection[int], reason: str, detected: float) -> None:
        """Go on without `lost` (nobody: bring a half-changed group back to one view). The survivors serve again on
        return; where they cannot hold every expert they stay parked, and the next join covers."""
        group = self._group
        group.epoch += 1
        self.recorder = rec = Recorder("loss", lost, reason, group.epoch, detected, self._on_event)
        if lost:
            rec.add_phase("detect", detected, time.monotonic())
        group.unsettled = True
        for slot in lost:
            if (link := group.links.get(slot)) is not None:
                self._launcher.end(Launched(link.member.pid, link.member.pid_start))
        survivors = tuple(s for s in group.live if s not in lost)
        began = time.monotonic()
        with rec.phase(Step.PARK):
            group.parked = await group.each({s: self._abort(s, lost) for s in survivors})
        released = max((p.released_s for p in group.parked.values()), default=0.0)
        rec.add_phase("release", began, began + released)
        for slot in lost:
            if (link := group.links.pop(slot, None)) is not None:
                await link.aclose()
                self._launcher.remove(link.member.address)
        contents = group.contents({s: p.contents for s, p in group.parked.items()})
        group.note_held(contents)
        if not survivors:
            group.view, group.unsettled = None, False
            self._view_changed()
            rec.end("committed", "nobody is left; the group must be formed anew", ())
            return
        try:
            plan = replan(
                contents,
                present=survivors,
                live=survivors,
                redundant=self._config.redundant_experts,
                restore_redundancy=False,
            )
        except Infeasible as no:
            group.view = View(group.epoch, survivors, contents)
            group.unsettled = False
            self._view_changed()
            rec.end("committed", f"survivors stay parked until a rank joins: {no}", survivors)
            return
        moves = moves_by_slot(plan.fills, plan.overwrites)
        await self._commit(rec, self._next_view(survivors, plan), moves, phase="cover")
        rec.end("committed", f"serving on {list(survivors)}", survivors)

    async def _abort(self, slot: int, lost: Collection[int]) -> Parked:
        link = self._group.links[slot]
        order = Abort(id=link.next_id(), epoch=self._group.epoch, lost=tuple(lost))
        return await link.call(order, Parked, deadline_s=self._config.commit_deadline_s)

    # --- join -----------------------------------------------------------------------------------------------------

    async def join(self, slots: Collection[int], reason: str, began: float) -> None:
        """Take the ready processes of `slots` into the view. On failure of a joiner the others serve as before."""
        group, kind = self._group, ("join" if self._group.live else "form")
        group.epoch += 1
        joiners = {s: self._boots.ready[s] for s in slots}
        self.recorder = rec = Recorder(
            "join" if kind == "join" else "form", slots, reason, group.epoch, began, self._on_event
        )
        rec.add_phase("boot", self._boots.since(slots), time.monotonic())
        present = group.live
        everyone = tuple(sorted({*present, *slots}))
        try:
            plan = await self._plan_join(present, everyone)
        except Infeasible as no:
            rec.end("failed", str(no), present)
            raise
        if plan.overwrites and present and not group.parked:
            await self._vacate(rec, plan)
            plan = await self._plan_join(present, everyone)
        parked = bool(group.parked)
        moves = moves_by_slot(plan.fills) if parked else moves_by_slot(plan.fills, plan.overwrites)
        with rec.phase(Step.LOAD):
            failed = await self._prepare_all(rec, joiners, present, moves)
        if not failed:
            with rec.phase(Step.CONNECT):
                failed = await self._link_all(joiners, present)
        if not failed:
            with rec.phase(Step.PARK):
                await group.stop()
            failed = {s: f"slot {s} died" for s, link in joiners.items() if self._boots.ready.get(s) is not link}
            if failed and not parked:
                await group.resume()
        if failed:
            for slot, why in failed.items():
                self._boots.failed(joiners[slot], why)
            rec.end("rolled-back", "; ".join(failed.values()), present)
            return
        view = self._next_view(everyone, plan)
        # from here on the joiners are members: whatever interrupts the commit treats them as survivors
        for slot in slots:
            group.links[slot] = self._boots.take(slot)
        leftover = moves_by_slot(plan.overwrites) if parked else {}
        await self._commit(rec, view, leftover, phase="commit", survivors=present)
        rec.end("committed", f"serving on {list(everyone)}", everyone)

    async def _plan_join(self, present: Collection[int], everyone: Collection[int]) -> Plan:
        group, config = self._group, self._config
        if not present:
            return first_plan(
                initial(
                    experts=group.model.experts,
                    layers=group.model.moe_layers,
                    capacity=config.max_ranks,
                    slots_per_rank=config.slots_per_rank,
                    live=everyone,
                    redundant=config.redundant_experts,
                )
            )
        contents = group.contents(await self._held(present))
        return replan(contents, present=present, live=everyone, redundant=config.redundant_experts)

    async def _held(self, slots: Collection[int]) -> dict[int, tuple[Row, ...]]:
        if self._group.parked:
            return {s: self._group.parked[s].contents for s in slots}
        deadline_s = self._config.commit_deadline_s
        found = await self._group.each({s: self._group.links[s].refresh(deadline_s=deadline_s) for s in slots})
        return {s: status.contents for s, status in found.items()}

    async def _prepare_all(
        self, rec: Recorder, joiners: dict[int, RankLink], present: Collection[int], moves: dict[int, tuple[Move, ...]]
    ) -> dict[int, str]:
        """Connect and load on all sides while the group serves. Returns why each failed joiner failed: by its own word or
        silence, or because others could not reach it. Any other failure of a present rank is raised.

        The ranks keep to the deadline; the wait for their answers is longer, so that a rank that was kept waiting can
        say by whom."""
        group = self._group
        deadline_s = self._config.prepare_deadline_s + self._config.commit_deadline_s
        new = {s: link.status.peer for s, link in joiners.items()}

        async def joiner(slot: int, link: RankLink, order_: int) -> Prepared:
            peers = (*(group.peer(s) for s in present), *(p for s, p in new.items() if s != slot))
            source = tuple(present)[order_ % len(present)] if present else -1
            order = Prepare(
                id=link.next_id(),
                epoch=group.epoch,
                peers=peers,
                moves=moves.get(slot, ()),
                dense_from=source,
                capture=True,
            )
            return await link.call(order, Prepared, deadline_s=deadline_s)

        async def survivor(slot: int) -> Prepared:
            link = group.links[slot]
            order = Prepare(id=link.next_id(), epoch=group.epoch, peers=tuple(new.values()), moves=moves.get(slot, ()))
            return await link.call(order, Prepared, deadline_s=deadline_s)

        ups, olds, failed = await self._both(
            {s: joiner(s, link, i) for i, (s, link) in enumerate(joiners.items())}, {s: survivor(s) for s in present}
        )
        for slot, prepared in (olds | ups).items():
            rec.loaded(slot, prepared.loaded)
            if slot in ups:
                rec.joiners[slot] = Joiner(
                    spare=self._boots.from_spare(slot),
                    boot_s=joiners[slot].status.boot_s,
                    reach_s=prepared.connect_s,
                    load_s=prepared.loaded.seconds,
                    capture_s=prepared.capture_s,
                )
                end = time.monotonic()
                rec.add_phase(f"capture {slot}", end - prepared.capture_s, end)
        return failed

    async def _link_all(self, joiners: dict[int, RankLink], present: Collection[int]) -> dict[int, str]:
        """Connect the EP back ends, joiners first: see `Link`. Returns failures as `_prepare_all`."""
        group = self._group
        deadline_s = self._config.prepare_deadline_s + self._config.commit_deadline_s
        new = {s: link.status.peer for s, link in joiners.items()}
        old = {s: group.peer(s) for s in present}

        async def joiner(slot: int, link: RankLink, wait: bool) -> Done:
            peers = (*old.values(), *(p for s, p in new.items() if s != slot))
            order = Link(id=link.next_id(), epoch=group.epoch, peers=peers, wait=wait)
            return await link.call(order, Done, deadline_s=deadline_s)

        async def survivor(slot: int) -> Done:
            link = group.links[slot]
            order = Link(id=link.next_id(), epoch=group.epoch, peers=tuple(new.values()), wait=True)
            return await link.call(order, Done, deadline_s=deadline_s)

        _, _, failed = await self._both({s: joiner(s, link, False) for s, link in joiners.items()}, {})
        if not failed:
            waits = {s: joiner(s, link, True) for s, link in joiners.items()}
            _, _, failed = await self._both(waits, {s: survivor(s) for s in present})
        return failed

    async def _both(
        self, joiners: dict[int, Coroutine[Any, Any, T]], present: dict[int, Coroutine[Any, Any, T]]
    ) -> tuple[dict[int, T], dict[int, T], dict[int, str]]:
        """Run calls to joiners and to present ranks at once. Returns the answers of both, and why each failed joiner
        failed; a failure of a present rank that is no joiner's fault is raised."""
        async with asyncio.TaskGroup() as tasks:
            ups = {s: tasks.create_task(_outcome(call)) for s, call in joiners.items()}
            old = await _outcome(self._group.each(present))
            if isinstance(old, ElasticError):
                for task in ups.values():
                    task.cancel()
        if isinstance(old, ElasticError):
            if accused := _accused(old, joiners):
                return {}, {}, accused
            raise old
        answers: dict[int, T] = {}
        failed: dict[int, str] = {}
        for slot, task in ups.items():
            result = task.result()
            if isinstance(result, ElasticError):
                failed |= _accused(result, joiners) or {slot: str(result)}
            else:
                answers[slot] = result
        return answers, old, failed

    # --- retire ---------------------------------------------------------------------------------------------------

    async def retire(self, slots: Collection[int], reason: str, began: float) -> None:
        """Let ranks go: their requests are handed over and sole copies moved away first."""
        group = self._group
        group.epoch += 1
        self.recorder = rec = Recorder("retire", slots, reason, group.epoch, began, self._on_event)
        present = group.live
        staying = tuple(s for s in present if s not in slots)
        with rec.phase(Step.HANDOVER):
            await self._gateway.route(group.epoch, self.routes(draining=slots))
            await self._gateway.drained(slots, deadline_s=self._config.commit_deadline_s)
        try:
            plan = await self._move_away(rec, present, staying)
        except ElasticError:
            # nobody knows whether they will be asked to leave again: until then they work
            await self._gateway.route(group.epoch, self.routes())
            raise
        view = self._next_view(staying, plan)
        leavers = {s: group.links.pop(s) for s in slots}
        for slot in slots:
            group.parked.pop(slot, None)
        try:
            await self._commit(rec, view, {}, phase="commit", survivors=staying)
            await self._disconnected(staying)
            await self._dismiss(leavers)
        finally:
            # whether or not they said good-bye, they are part of no view; a loss that cut this off does not wait for them
            for link in leavers.values():
                self._launcher.end(Launched(link.member.pid, link.member.pid_start))
                self._launcher.remove(link.member.address)
            await asyncio.gather(*(link.aclose() for link in leavers.values()))
        rec.end("committed", f"serving on {list(staying)}", staying)

    async def _move_away(self, rec: Recorder, present: Collection[int], staying: tuple[int, ...]) -> Plan:
        """Load on those who stay what only others hold, then bring all to a stand."""
        group = self._group
        plan = await self._plan_retire(present, staying)
        if plan.overwrites:
            await self._vacate(rec, plan)
            plan = await self._plan_retire(present, staying)
        moves = moves_by_slot(plan.fills, plan.overwrites)
        with rec.phase(Step.MOVE):
            orders = {}
            for slot in staying:
                link = group.links[slot]
                order = Prepare(id=link.next_id(), epoch=group.epoch, moves=moves.get(slot, ()))
                deadline_s = self._config.prepare_deadline_s + self._config.commit_deadline_s
                orders[slot] = link.call(order, Prepared, deadline_s=deadline_s)
            for slot, prepared in (await group.each(orders)).items():
                rec.loaded(slot, prepared.loaded)
        with rec.phase(Step.PARK):
            await group.stop()
        return plan

    async def _plan_retire(self, present: Collection[int], staying: Collection[int]) -> Plan:
        contents = self._group.contents(await self._held(present))
        return replan(contents, present=present, live=staying, redundant=self._config.redundant_experts)

    async def _disconnected(self, slots: Collection[int]) -> None:
        """Wait until these ranks have taken down what the last view left over: work of the background, in its order. A
        rank that leaves keeps its memory until then."""
        group, orders = self._group, {}
        for slot in slots:
            order = Prepare(id=group.links[slot].next_id(), epoch=group.epoch)
            orders[slot] = group.links[slot].call(order, Prepared, deadline_s=self._config.commit_deadline_s)
        await group.each(orders)

    async def _dismiss(self, leavers: dict[int, RankLink]) -> None:
        """Every peer has disconnected from them: let them end."""

        async def one(link: RankLink) -> None:
            order = Leave(id=link.next_id(), epoch=self._group.epoch)
            await _outcome(link.call(order, Done, deadline_s=LEAVE_S))

        await asyncio.gather(*(one(link) for link in leavers.values()))

    # --- shared ---------------------------------------------------------------------------------------------------

    async def _vacate(self, rec: Recorder, plan: Plan) -> None:
        """Commit the present map without the buffers that are to be overwritten, so that they can be filled in the
        background instead of while the group stands."""
        group = self._group
        with rec.phase(Step.VACATE):
            await group.stop()
            view = View(group.epoch, group.live, plan.vacated.only(group.live))
            await group.commit(view, {})
            group.view = view
            self._view_changed()
            await group.resume()
        group.epoch += 1

    def _next_view(self, live: tuple[int, ...], plan: Plan) -> View:
        """Raises ElasticError, before anything is changed, for a plan that leaves an expert without a live copy."""
        view = View(self._group.epoch, live, plan.target.only(live))
        if missing := view.placement.uncovered(live):
            raise ElasticError(
                f"epoch {view.epoch}: refused to commit a view without {len(missing)} (layer, expert) pairs"
            )
        return view

    async def _commit(
        self,
        rec: Recorder,
        view: View,
        moves: dict[int, tuple[Move, ...]],
        *,
        phase: str,
        survivors: Collection[int] | None = None,
    ) -> None:
        group = self._group
        group.view = view
        start = time.monotonic()
        with rec.phase(Step.COMMIT):
            committing = asyncio.create_task(group.commit(view, moves), name="commit")
            try:
                # the orders go first: the state file is a hint, and the group stands until they are answered
                await asyncio.sleep(0)
                self._view_changed()
                done = await committing
            finally:
                committing.cancel()
        if phase == "cover":
            rec.add_phase("cover", start, start + max((c.loaded.seconds for c in done.values()), default=0.0))
        for slot, committed in done.items():
            rec.loaded(slot, committed.loaded)
        with rec.phase(Step.RESUME):
            await group.resume()
            await self._gateway.route(group.epoch, self.routes())
            await self._first_steps(rec, view.live if survivors is None else survivors)
        # so that the owner sees the counters as they are after the sequence
        await asyncio.gather(*(_outcome(link.refresh(deadline_s=RESUMED_S)) for link in group.links.values()))

    async def _first_steps(self, rec: Recorder, survivors: Collection[int]) -> None:
        async def one(slot: int) -> None:
            link = self._group.links[slot]
            resumed = await link.next_resumed(self._group.epoch, deadline_s=RESUMED_S)
            if not resumed.idle:
                rec.pause_s[slot] = resumed.pause_s

        await asyncio.gather(*(_outcome(one(s)) for s in survivors))

    def routes(self, draining: Collection[int] = ()) -> tuple[Route, ...]:
        """The ranks of the view, as the gateway is told of them."""
        links = self._group.links
        return tuple(
            Route(slot, links[slot].member.incarnation, links[slot].member.address, slot not in draining)
            for slot in self._group.live
            if slot in links
        )


def _accused(error: ElasticError, joiners: Collection[int]) -> dict[int, str]:
    """The joiners that others could not reach, with their words."""
    return {s: str(error) for s in error.slots if s in joiners} if isinstance(error, Unreachable) else {}


async def _outcome(call: Coroutine[Any, Any, T]) -> T | ElasticError:
    """The result of a call, or the ElasticError that it raised."""
    try:
        return await call
    except ElasticError as error:
        return error
