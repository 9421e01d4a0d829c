"""What brings joiners as far as the round of their first step, while the group serves: loading, connecting, staging.

A joiner that fails, hangs or cannot be reached costs the others nothing, and each method says which did.
"""

import asyncio
import time
from collections.abc import Collection, Coroutine, Mapping
from typing import Any, TypeVar

from elastic import process
from elastic.config import GroupConfig
from elastic.controller.boots import Boots
from elastic.controller.group import Group
from elastic.controller.link import RankLink
from elastic.controller.recorder import Recorder
from elastic.controller.records import Joiner
from elastic.errors import ElasticError, Retryable, Unreachable
from elastic.placement import Move
from elastic.placement.maps import HOLE
from elastic.protocol import Done, Link, Peer, Prepare, Prepared
from elastic.view import View

T = TypeVar("T")

MUTE_SHARE = 1 / 6
"""Of the time for a prepare: a joiner that has not beaten for so long is given up."""
FROZEN_END_S = 1.2
"""Beyond its deadline a joiner that is frozen in its connect has ended itself (after 1 s: `elastic.rank.comm.nixl_ep`), or is stopped.
Those that wait for it have more time before they end (`GroupConfig.link_deadline_s`)."""
BEATS_LOOK_S = 0.2
STOPPED, STOPPED_LOOKS = frozenset("Tt"), 4
"""States of a process (proc(5)), and how many looks in a row must find it so."""


class Joining:
    """Used by the sequences, one at a time."""

    def __init__(self, config: GroupConfig, group: Group, boots: Boots) -> None:
        self._config, self._group, self._boots = config, group, boots

    async def prepare(
        self, rec: Recorder, joiners: dict[int, RankLink], present: Collection[int], moves: dict[int, tuple[Move, ...]]
    ) -> dict[int, str]:
        """Connect and load on all sides while the group serves; nobody reaches for the memory of whoever holds nothing that it
        needs, since that holds a rank up for tens of ms. Returns why each failed joiner failed: by its own word or silence, or
        because others could not reach it. Any other failure of a present rank is raised.

        The ranks keep to the deadline; the wait for their answers is longer, so that a rank that was kept waiting can
        say by whom."""
        group = self._group
        deadline_s = self._config.prepare_deadline_s + self._config.commit_deadline_s

        async def joiner(slot: int, link: RankLink, order_: int) -> Prepared:
            source = tuple(present)[order_ % len(present)] if present else -1
            order = Prepare(
                id=link.next_id(),
                epoch=group.epoch,
                peers=self._sources(slot, moves.get(slot, ()), source),
                moves=moves.get(slot, ()),
                dense_from=source,
                capture=True,
                members={},
            )
            limit_s = self._config.prepare_deadline_s * MUTE_SHARE
            return await self._while_it_beats(link, link.call(order, Prepared, deadline_s=deadline_s), limit_s)

        async def survivor(slot: int) -> Prepared:
            link = group.links[slot]
            order = self.loading(slot, moves.get(slot, ()))
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

    def loading(self, slot: int, moves: tuple[Move, ...]) -> Prepare:
        """What a rank of the view is told to load."""
        group = self._group
        peers, members = self._sources(slot, moves), group.incarnations()
        return Prepare(id=group.links[slot].next_id(), epoch=group.epoch, peers=peers, moves=moves, members=members)

    def _sources(self, slot: int, moves: tuple[Move, ...], dense: int = HOLE) -> tuple[Peer, ...]:
        """The ranks of the view that weights come from, by these moves to `slot` and in slot `dense`."""
        found = {dense, *(move.source_slot for move in moves)} & self._group.links.keys() - {slot}
        return tuple(self._group.peer(source) for source in sorted(found))

    async def _while_it_beats(self, link: RankLink, call: Coroutine[Any, Any, T], limit_s: float) -> T:
        """The outcome of the call; Retryable where the rank is stopped, or has not beaten for so long that it hangs. Others may wait
        for it: the first must be known before they are missed themselves."""
        link.beat_at = max(link.beat_at, time.monotonic() - limit_s / 2)
        calling = asyncio.create_task(call)
        member, stopped = link.member, 0
        try:
            while not calling.done():
                began = time.monotonic()
                await asyncio.wait([calling], timeout=min(limit_s / 4, BEATS_LOOK_S))
                now = time.monotonic()
                # beats that came while this process stood still lie unread
                stood_still = now - began > limit_s / 2
                stopped = stopped + 1 if process.state(member.pid, member.pid_start) in STOPPED else 0
                if not calling.done() and stopped >= STOPPED_LOOKS:
                    raise Retryable(f"{member}: it is stopped")
                if not calling.done() and not stood_still and now - link.beat_at > limit_s:
                    raise Retryable(f"{member}: it has not beaten for {limit_s:g} s")
            return calling.result()
        finally:
            calling.cancel()

    async def link(self, joiners: dict[int, RankLink], present: Collection[int]) -> dict[int, str]:
        """Connect the EP back ends, joiners first: see `Link`. Returns failures as `prepare`.

        Ranks may stand in a connect to a joiner, and answer nobody, until it comes or is dead (NIXL EP). So a joiner whose
        connect has failed is ended at once; not beside a dead joiner, which has freed them all, since each connects to both in one
        call."""
        group = self._group
        deadline_s = self._config.prepare_deadline_s + self._config.commit_deadline_s
        new = {s: link.status.peer for s, link in joiners.items()}
        old = {s: group.peer(s) for s in present}
        met: set[int] = set()
        """Joiners that are connected to all."""

        async def joiner(slot: int, link: RankLink, wait: bool) -> Done:
            peers = (*old.values(), *(p for s, p in new.items() if s != slot))
            order = Link(id=link.next_id(), epoch=group.epoch, peers=peers, wait=wait)
            try:
                limit_s = self._config.link_deadline_s(joins=True) + FROZEN_END_S
                done = await self._while_it_beats(link, link.call(order, Done, deadline_s=deadline_s), limit_s)
                if wait:
                    met.add(slot)
                return done
            except ElasticError as error:
                if wait and present and _all_live(joiners):
                    self._boots.failed(link, str(error))
                raise

        async def survivor(slot: int) -> Done:
            link = group.links[slot]
            order = Link(id=link.next_id(), epoch=group.epoch, peers=tuple(new.values()), wait=True)
            return await link.call(order, Done, deadline_s=deadline_s)

        _, _, failed = await self._both({s: joiner(s, link, False) for s, link in joiners.items()}, {})
        if not failed:
            waits = {s: joiner(s, link, True) for s, link in joiners.items()}
            try:
                _, _, failed = await self._both(waits, {s: survivor(s) for s in present})
            except asyncio.CancelledError:
                # a rank died: those that stand in a connect must be free to hear of it
                if _all_live(joiners):
                    for slot in joiners.keys() - met:
                        self._boots.failed(joiners[slot], "the group changed while it connected")
                raise
        return failed

    async def stage(self, view: View, joiners: dict[int, RankLink], present: Collection[int]) -> dict[int, str]:
        """Lay the next view down on all sides. Returns failures as `prepare`."""
        calls = self._group.staging(view, joiners)
        _, _, failed = await self._both({s: calls[s] for s in joiners}, {s: calls[s] for s in present})
        return failed

    async def _both(
        self, joiners: dict[int, Coroutine[Any, Any, T]], present: dict[int, Coroutine[Any, Any, T]]
    ) -> tuple[dict[int, T], dict[int, T], dict[int, str]]:
        """Run calls to joiners and to present ranks at once. Returns the answers of both, and why each failed joiner
        failed; a failure of a present rank that is no joiner's fault is raised."""
        async with asyncio.TaskGroup() as tasks:
            ups = {s: tasks.create_task(outcome_of(call)) for s, call in joiners.items()}
            old = await outcome_of(self._group.each(present))
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


def _all_live(joiners: Mapping[int, RankLink]) -> bool:
    """Asked of the kernel: what the events say may be behind."""
    return all(process.is_alive(link.member.pid, link.member.pid_start) for link in joiners.values())


def _accused(error: ElasticError, joiners: Collection[int]) -> dict[int, str]:
    """The joiners that others could not reach, with their words."""
    return {s: str(error) for s in error.slots if s in joiners} if isinstance(error, Unreachable) else {}


async def outcome_of(call: Coroutine[Any, Any, T]) -> T | ElasticError:
    """The result of a call, or the ElasticError that it raised."""
    try:
        return await call
    except ElasticError as error:
        return error
