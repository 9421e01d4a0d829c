"""The sequences: loss, join, retire. Each brings the group from one view to the next, or leaves it as it was.

Any of them may be cancelled at any await, since a new loss pre-empts everything. What makes that safe: a commit carries the
whole view, ranks may take it again, and `Group.unsettled` tells the executor that a full commit (a loss of nobody) must
follow. Contents of the expert buffers are always taken from the ranks' answers, never from memory.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from elastic.config import GroupConfig
from elastic.controller.boots import Boots
from elastic.controller.gateway import GatewayLink
from elastic.controller.group import Group, first_plan, moves_by_slot
from elastic.controller.guard import GuardedLauncher
from elastic.controller.joining import Joining, outcome_of
from elastic.controller.link import RankLink
from elastic.controller.phases import Step
from elastic.controller.recorder import Recorder
from elastic.controller.records import Event
from elastic.errors import ElasticError, Infeasible
from elastic.launch.base import Launched
from elastic.placement import Move, Placement, Plan, initial, replan
from elastic.placement.maps import Row
from elastic.protocol import Abort, Done, Leave, Parked, Prepare, Prepared, Route
from elastic.view import View

T = TypeVar("T")

RESUMED_S = 2.0
"""How long a report waits for the first step of every survivor."""

LEAVE_S = 1.0

NO_MOVES: Mapping[int, tuple[Move, ...]] = MappingProxyType({})


class _Cover(NamedTuple):
    """How survivors go on whose buffers hold `contents`."""

    contents: Placement
    plan: Plan
    view: View


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
        self._joining = Joining(config, group, boots)
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
            parking = asyncio.create_task(group.each({s: self._abort(s, lost) for s in survivors}), name="park")
            try:
                # the orders go first; what the ranks should hold is planned for while they come to a stand
                await asyncio.sleep(0)
                expected = self._cover_expected(survivors)
                group.parked = await parking
            finally:
                parking.cancel()
        released = max((p.released_s for p in group.parked.values()), default=0.0)
        rec.add_phase("release", began, began + released)
        gone = [link for slot in lost if (link := group.links.pop(slot, None)) is not None]
        try:
            await self._go_on(rec, survivors, expected)
        finally:
            for link in gone:
                self._launcher.remove(link.member.address)
            await asyncio.gather(*(link.aclose() for link in gone))

    async def _go_on(self, rec: Recorder, survivors: tuple[int, ...], expected: "_Cover | None") -> None:
        """The survivors stand: cover and serve, or say why not."""
        group = self._group
        contents = group.contents({s: p.contents for s, p in group.parked.items()})
        group.note_held(contents)
        if not survivors:
            group.view, group.unsettled = None, False
            self._view_changed()
            rec.end("committed", "nobody is left; the group must be formed anew", ())
            return
        try:
            if expected is None or expected.contents != contents:
                expected = self._cover(contents, survivors)
        except Infeasible as no:
            group.view = View(group.epoch, survivors, contents)
            group.unsettled = False
            self._view_changed()
            rec.end("committed", f"survivors stay parked until a rank joins: {no}", survivors)
            return
        moves = moves_by_slot(expected.plan.fills, expected.plan.overwrites)
        await self._commit(rec, expected.view, moves=moves, phase="cover", survivors=survivors)
        rec.end("committed", f"serving on {list(survivors)}", survivors)

    def _cover_expected(self, survivors: tuple[int, ...]) -> "_Cover | None":
        """As `_cover`, for buffers that hold what the view says; None where that does not lead to a view."""
        view = self._group.view
        if view is None or not survivors:
            return None
        try:
            return self._cover(view.placement.only(survivors), survivors)
        except ElasticError:
            return None

    def _cover(self, contents: Placement, survivors: tuple[int, ...]) -> "_Cover":
        """Raises Infeasible, and as `_next_view`."""
        plan = replan(
            contents,
            present=survivors,
            live=survivors,
            redundant=self._config.redundant_experts,
            restore_redundancy=False,
        )
        return _Cover(contents, plan, self._next_view(survivors, plan))

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
            failed = await self._joining.prepare(rec, joiners, present, moves)
        view, round_ = self._next_view(everyone, plan), None
        serves = bool(present) and not parked
        if not failed:
            with rec.phase(Step.CONNECT):
                failed = await self._joining.link(joiners, present)
                if serves and not failed:
                    failed = await self._joining.stage(view, joiners, present)
        if not failed:
            with rec.phase(Step.PARK):
                round_ = await group.agree() if serves else None
            failed = {s: f"slot {s} died" for s, link in joiners.items() if self._boots.ready.get(s) is not link}
            if failed and serves:
                await group.resume()
        if failed:
            for slot, why in failed.items():
                self._boots.failed(joiners[slot], why)
            rec.end("rolled-back", "; ".join(failed.values()), present)
            return
        # from here on the joiners are members: whatever interrupts the commit treats them as survivors
        for slot in slots:
            group.links[slot] = self._boots.take(slot)
        leftover = moves_by_slot(plan.overwrites) if parked else {}
        await self._commit(rec, view, moves=leftover, round_=round_, survivors=present)
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
            view, round_ = await self._move_away(rec, present, staying)
        except ElasticError:
            # nobody knows whether they will be asked to leave again: until then they work
            await self._gateway.route(group.epoch, self.routes())
            raise
        leavers = {s: group.links.pop(s) for s in slots}
        for slot in slots:
            group.parked.pop(slot, None)
        try:
            await self._commit(rec, view, round_=round_, survivors=staying)
            await self._disconnected(staying)
            await self._dismiss(leavers)
        finally:
            # whether or not they said good-bye, they are part of no view; a loss that cut this off does not wait for them
            for link in leavers.values():
                self._launcher.end(Launched(link.member.pid, link.member.pid_start))
                self._launcher.remove(link.member.address)
            await asyncio.gather(*(link.aclose() for link in leavers.values()))
        rec.end("committed", f"serving on {list(staying)}", staying)

    async def _move_away(self, rec: Recorder, present: Collection[int], staying: tuple[int, ...]) -> tuple[View, int]:
        """Load on those who stay what only others hold, lay down the view without these, and agree on a round. At that round
        the leavers stand."""
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
                order = self._joining.loading(slot, moves.get(slot, ()))
                deadline_s = self._config.prepare_deadline_s + self._config.commit_deadline_s
                orders[slot] = link.call(order, Prepared, deadline_s=deadline_s)
            for slot, prepared in (await group.each(orders)).items():
                rec.loaded(slot, prepared.loaded)
            view = self._next_view(staying, plan)
            await group.each(group.staging(view, {}))
        with rec.phase(Step.PARK):
            return view, await group.agree()

    async def _plan_retire(self, present: Collection[int], staying: Collection[int]) -> Plan:
        contents = self._group.contents(await self._held(present))
        return replan(contents, present=present, live=staying, redundant=self._config.redundant_experts)

    async def _disconnected(self, slots: Collection[int]) -> None:
        """Wait until these ranks have taken down what the last view left over: work of the background, in its order. A
        rank that leaves keeps its memory until then."""
        group, orders = self._group, {}
        for slot in slots:
            order = Prepare(id=group.links[slot].next_id(), epoch=group.epoch, members=group.incarnations())
            orders[slot] = group.links[slot].call(order, Prepared, deadline_s=self._config.commit_deadline_s)
        await group.each(orders)

    async def _dismiss(self, leavers: dict[int, RankLink]) -> None:
        """Every peer has disconnected from them: let them end."""

        async def one(link: RankLink) -> None:
            order = Leave(id=link.next_id(), epoch=self._group.epoch)
            await outcome_of(link.call(order, Done, deadline_s=LEAVE_S))

        await asyncio.gather(*(one(link) for link in leavers.values()))

    # --- shared ---------------------------------------------------------------------------------------------------

    async def _vacate(self, rec: Recorder, plan: Plan) -> None:
        """Commit the present map without the buffers that are to be overwritten, so that they can be filled in the
        background instead of while the group stands."""
        group = self._group
        with rec.phase(Step.VACATE):
            view = View(group.epoch, group.live, plan.vacated.only(group.live))
            await group.each(group.staging(view, {}))
            round_ = await group.agree()
            group.view = view
            await group.switch(view, round_)
            self._view_changed()
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
        *,
        survivors: Collection[int],
        moves: Mapping[int, tuple[Move, ...]] = NO_MOVES,
        round_: int | None = None,
        phase: str = "",
    ) -> None:
        """Bring all ranks of `view` to it: at `round_`, where it is staged and agreed, else all stand and run afterwards."""
        group = self._group
        group.view = view
        start = time.monotonic()
        orders = group.commit(view, moves) if round_ is None else group.switch(view, round_)
        with rec.phase(Step.COMMIT):
            committing = asyncio.create_task(orders, name="commit")
            try:
                # the orders go first: the state file is a hint, and the group stands, or is about to, until they come
                await asyncio.sleep(0)
                self._view_changed()
                done = await committing
            finally:
                committing.cancel()
        if phase:
            rec.add_phase(phase, start, start + max((c.loaded.seconds for c in done.values()), default=0.0))
        for slot, committed in done.items():
            rec.loaded(slot, committed.loaded)
        with rec.phase(Step.RESUME):
            if round_ is None:
                await group.resume()
            await self._gateway.route(group.epoch, self.routes())
            await self._first_steps(rec, survivors)
        # so that the owner sees the counters as they are after the sequence
        await asyncio.gather(*(outcome_of(link.refresh(deadline_s=RESUMED_S)) for link in group.links.values()))

    async def _first_steps(self, rec: Recorder, survivors: Collection[int]) -> None:
        async def one(slot: int) -> None:
            link = self._group.links[slot]
            resumed = await link.next_resumed(self._group.epoch, deadline_s=RESUMED_S)
            if not resumed.idle:
                rec.pause_s[slot] = resumed.pause_s

        await asyncio.gather(*(outcome_of(one(s)) for s in survivors))

    def routes(self, draining: Collection[int] = ()) -> tuple[Route, ...]:
        """The ranks of the view, as the gateway is told of them."""
        links = self._group.links
        return tuple(
            Route(slot, links[slot].member.incarnation, links[slot].member.address, slot not in draining)
            for slot in self._group.live
            if slot in links
        )
