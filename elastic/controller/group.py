"""The controller's picture of one group: the slots, who holds them, the view, and the commands sent to many ranks at once."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from elastic.config import GroupConfig, ModelShape
from elastic.controller.link import RankLink
from elastic.controller.records import RankGone
from elastic.errors import ElasticError, NeedsReplan, Retryable, Unreachable
from elastic.placement import HOLE, Move, Placement, Plan, losses_without_load
from elastic.placement.maps import Row
from elastic.process import ENDED
from elastic.protocol import Abort, Commit, Committed, Done, Late, Parked, Peer, Resume, Stage, Staged, StopAt, Switch
from elastic.view import View

T = TypeVar("T")

EPOCH_SHIFT = 24
"""Dispatch numbers are counted from epoch << EPOCH_SHIFT, so a stale signal word of an earlier epoch never matches."""

BUSY_LEAD = 4
"""Rounds between the newest round seen and the one to change before: both orders should arrive before it begins."""


MISSES = 3
"""Deadlines that a rank which beats may miss, with nothing to show, before it counts as unresponsive all the same."""


class Unresponsive(Retryable):
    """Ranks of the view that gave no answer within the deadline although their connection stands, and do not beat."""

    def __init__(self, message: str, slots: Collection[int]) -> None:
        super().__init__(message)
        self.slots = tuple(slots)


class Group:
    """Owned by the executor's loop; only sequences and the executor write to it."""

    def __init__(self, config: GroupConfig, model: ModelShape) -> None:
        self.config, self.model = config, model
        self.epoch = 0
        self.view: View | None = None
        self.links: dict[int, RankLink] = {}
        """The ranks of the view."""
        self.parked: dict[int, Parked] = {}
        """Ranks of the view that stand, since this answer. Empty while the group serves."""
        self.unsettled = False
        """Orders of a sequence are out that only a full commit takes back."""
        self.hastened: set[int] = set()
        """Lost slots for which the survivors were told to stop, ahead of their sequence."""
        self._misses: Counter[int] = Counter()
        self._held: Placement | None = None
        self._counted: tuple[View | None, int] = (None, 0)
        """The last view whose redundancy was asked for, and the answer."""

    def empty_placement(self) -> Placement:
        row: Row = (HOLE,) * (self.config.max_ranks * self.config.slots_per_rank)
        return Placement(
            self.model.experts, self.config.max_ranks, self.config.slots_per_rank, (row,) * self.model.moe_layers
        )

    def contents(self, held: Mapping[int, tuple[Row, ...]]) -> Placement:
        """The truth of the expert buffers, from what each rank reports to hold."""
        empty = self.empty_placement()
        rows = [list(row) for row in empty.rows]
        for slot, layers in held.items():
            span = empty.physical(slot)
            for layer, row in enumerate(layers):
                rows[layer][span.start : span.stop] = row
        return msgspec.structs.replace(empty, rows=tuple(tuple(row) for row in rows))

    def note_held(self, contents: Placement) -> None:
        """What the ranks hold at the start of an attempt. A commit that was too slow is given up and tried again, and what
        it loaded stays: as long as that gets on, slowness is no fault."""
        if contents != self._held:
            self._misses.clear()
        self._held = contents

    @property
    def live(self) -> tuple[int, ...]:
        return self.view.live if self.view else ()

    @property
    def losses_without_load(self) -> int:
        """As `elastic.placement.losses_without_load`; 0 without a view. Counted once for each view."""
        view = self.view
        if view is not None and self._counted[0] is not view:
            self._counted = (view, losses_without_load(view.placement, view.live))
        return self._counted[1] if view is not None else 0

    async def each(self, calls: Mapping[int, Coroutine[Any, Any, T]]) -> dict[int, T]:
        """Run one call per slot at once and wait for all. Of several failures the one that says most is raised: a rank
        that is gone (Retryable; its owner is told by its link), then silence (Unresponsive; Retryable where the ranks
        beat, and so are slow, not hung), then ranks that could not reach others (Unreachable), then the rest."""
        results = await asyncio.gather(*calls.values(), return_exceptions=True)
        failures: dict[int, BaseException] = {}
        answers: dict[int, T] = {}
        for slot, result in zip(calls, results, strict=True):
            if isinstance(result, BaseException):
                failures[slot] = result
            else:
                answers[slot] = result
        if not failures:
            return answers
        for error in failures.values():
            if not isinstance(error, ElasticError):
                raise error
        text = "; ".join(str(e) for e in failures.values())
        unanswered = [s for s, e in failures.items() if isinstance(e, Retryable) and not isinstance(e, Unreachable)]
        silent = [s for s in unanswered if s in self.links and not self.links[s].gone]
        if len(silent) < len(unanswered):
            raise Retryable(text)
        self._misses.update(silent)
        hung = [s for s in silent if self._mute(s) or self._misses[s] >= MISSES]
        if hung:
            raise Unresponsive(text, hung)
        if silent:
            raise Retryable(text)
        if accused := {s for e in failures.values() if isinstance(e, Unreachable) for s in e.slots}:
            raise Unreachable(text, accused)
        if any(isinstance(e, NeedsReplan) for e in failures.values()):
            raise NeedsReplan(text)
        raise ElasticError(text)

    def _mute(self, slot: int) -> bool:
        limit_s = max(self.config.commit_deadline_s / 2, 3 * self.config.heartbeat_s)
        return time.monotonic() - self.links[slot].beat_at > limit_s

    # --- a planned change: staged while the group serves, taken over between two rounds --------------------------------

    def staging(self, view: View, joiners: Mapping[int, RankLink]) -> dict[int, Coroutine[Any, Any, Staged]]:
        """One call for each rank of `view`: lay it down, while the group serves. Each raises ElasticError where the rank
        cannot take it over, or has another map than the view's."""
        links = {**self.links, **joiners}

        async def one(slot: int) -> Staged:
            link = links[slot]
            order = Stage(
                id=link.next_id(),
                epoch=view.epoch,
                view=view,
                peers=tuple(links[s].status.peer for s in view.live if s != slot),
                base=_base(view),
            )
            staged = await link.call(order, Staged, deadline_s=self.config.commit_deadline_s)
            _same(view, {slot: staged.placement_hash})
            return staged

        return {slot: one(slot) for slot in view.live}

    def incarnations(self) -> dict[int, int]:
        """Of the members, by slot."""
        return {slot: link.member.incarnation for slot, link in self.links.items()}

    def hasten(self, lost: Collection[int]) -> None:
        """Have the survivors end every wait and drop the step in flight now, ahead of the sequence that orders it in full and
        takes their answers: until that has its turn in the loop, others may keep it busy for milliseconds. In an epoch of its
        own, since no rank is given the same order twice in one. Once for a slot, until the group runs again."""
        if self.hastened.issuperset(lost):
            return
        self.hastened.update(lost)
        self.epoch += 1
        for slot in self.live:
            link = self.links.get(slot)
            if slot not in lost and link is not None:
                link.tell(Abort(id=link.next_id(), epoch=self.epoch, lost=tuple(lost)))

    def hasten_without(self, gone: RankGone, lost: Collection[int]) -> None:
        """No step ends without a process that is dead. What its owner makes of that takes milliseconds, in which the survivors
        come to a stand. `lost`: slots that were condemned already."""
        link = self.links.get(gone.member.slot)
        # a process may close a socket and live on
        dead = gone.witness != "socket" or gone.process_state in ENDED
        if dead and link is not None and link.member == gone.member:
            self.hasten({*lost, gone.member.slot})

    async def agree(self) -> int:
        """Find a round that no live rank has begun, and have all stand before it unless `switch` comes first. Returns it.

        A rank that has begun it already says so, and all run on to a later one. Until `switch` or `resume` nothing has
        changed. Ends by the answers, by the death of a rank (its channel closes), or at the commit deadline.
        """
        deadline_s = self.config.commit_deadline_s
        self.unsettled = True
        beats = await self.each({s: self.links[s].refresh(deadline_s=deadline_s) for s in self.live})
        idle = all(self.links[s].beat is not None and self.links[s].beat.idle for s in self.live)  # type: ignore[union-attr]
        lead = BUSY_LEAD
        at = max(b.round for b in beats.values()) + (0 if idle else lead)
        until = time.monotonic() + deadline_s
        while True:
            answers = await self.each({s: self._stop_at(s, at) for s in self.live})
            late = [a.round for a in answers.values() if isinstance(a, Late)]
            if not late:
                return at
            if time.monotonic() > until:
                raise Retryable(f"no common round to stop before within {deadline_s:g} s; the last was {at}")
            # rounds may be shorter than the way of an order on a busy machine
            lead *= 2
            at = max(late) + lead

    async def _stop_at(self, slot: int, round_: int) -> Done | Late:
        link = self.links[slot]
        order = StopAt(id=link.next_id(), epoch=self.epoch, round=round_)
        return await link.call(order, (Done, Late), deadline_s=self.config.commit_deadline_s)

    async def switch(self, view: View, round_: int) -> dict[int, Committed]:
        """Every rank has staged `view`, and those that serve have agreed on `round_`: have all take it over there and run on.
        On return they have. Raises as `each`, and ElasticError where two ranks end with different maps."""

        async def one(slot: int) -> Committed:
            link = self.links[slot]
            order = Switch(id=link.next_id(), epoch=view.epoch, round=round_)
            return await link.call(order, Committed, deadline_s=self.config.commit_deadline_s)

        done = await self.each({s: one(s) for s in view.live})
        _same(view, {slot: committed.placement_hash for slot, committed in done.items()})
        self._runs()
        return done

    # --- a commit of a group that stands ---------------------------------------------------------------------------------------------------

    async def commit(self, view: View, moves: Mapping[int, tuple[Move, ...]]) -> dict[int, Committed]:
        """All ranks of `view` stand. Give each the view and its moves; on return every rank has the same map.

        Raises as `each`, and ElasticError where two ranks end with different maps.
        """
        round_ = max((p.round for p in self.parked.values()), default=0)
        peers = {s: self.links[s].status.peer for s in view.live}
        self.unsettled = True

        async def one(slot: int) -> Committed:
            link = self.links[slot]
            order = Commit(
                id=link.next_id(),
                epoch=view.epoch,
                view=view,
                peers=tuple(p for s, p in peers.items() if s != slot),
                moves=moves.get(slot, ()),
                round=round_,
                base=_base(view),
            )
            return await link.call(order, Committed, deadline_s=self.config.commit_deadline_s)

        done = await self.each({s: one(s) for s in view.live})
        _same(view, {slot: committed.placement_hash for slot, committed in done.items()})
        return done

    async def resume(self) -> None:
        """All ranks have committed, or none was asked to switch: let them run."""

        async def one(slot: int) -> Done:
            link = self.links[slot]
            order = Resume(id=link.next_id(), epoch=self.epoch)
            return await link.call(order, Done, deadline_s=self.config.commit_deadline_s)

        await self.each({s: one(s) for s in self.live})
        self._runs()

    def _runs(self) -> None:
        self.parked = {}
        self.hastened.clear()
        self.unsettled = False
        self._misses.clear()

    def peer(self, slot: int) -> Peer:
        return self.links[slot].status.peer


def _base(view: View) -> int:
    return view.epoch << EPOCH_SHIFT


def _same(view: View, hashes: Mapping[int, str]) -> None:
    """Raises ElasticError naming the ranks whose map is another than that of the view."""
    if wrong := sorted(slot for slot, found in hashes.items() if found != view.hash):
        raise ElasticError(f"epoch {view.epoch}: slots {wrong} have another map than {view.hash}")


def moves_by_slot(*groups: tuple[Move, ...]) -> dict[int, tuple[Move, ...]]:
    """Moves by receiving slot, order kept."""
    result: dict[int, list[Move]] = {}
    for moves in groups:
        for move in moves:
            result.setdefault(move.slot, []).append(move)
    return {slot: tuple(moves) for slot, moves in result.items()}


def first_plan(placement: Placement) -> Plan:
    """The plan that fills `placement` from nothing."""
    moves = tuple(
        Move(layer, expert, placement.slot_of(p), p % placement.slots_per_rank)
        for layer, row in enumerate(placement.rows)
        for p, expert in enumerate(row)
        if expert != HOLE
    )
    return Plan(target=placement, vacated=placement, fills=moves, overwrites=())
