"""Growing and shrinking a vLLM group that serves. vLLM has no way back: what fails after it was asked ends in a restart.

In a task that may be cancelled between any two steps: what it leaves is ended by the restart that follows.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence

from elastic.errors import Infeasible
from healer.targets.vllm.endpoints import Phase as Scale
from healer.targets.vllm.endpoints import Refused
from healer.targets.vllm.group import Group
from healer.targets.vllm.machine import State
from healer.targets.vllm.plan import not_highest, not_with_holes
from healer.targets.vllm.proof import Broken, NotStarted, Yielded, ready
from healer.targets.vllm.record import Record
from healer.targets.vllm.records import Held, Part, Process, Role
from healer.targets.vllm.sequences import launch
from healer.targets.vllm.state import Pending
from healer.targets.vllm.watch import RankWatch

HEAD_START_S = 240.0
"""For a joiner to come as far as its engine: it waits 300 s for the request to scale, and the request 300 s for it."""
LEAVE_S = 15.0
"""Between the end of an engine that leaves and the answer that says so; after that it has died, and the others wait for it."""
BAD_REQUEST = 400


def wanted(group: Group, target: int | Iterable[int]) -> tuple[int, ...]:
    """The slots that a size, or slots, ask for. Raises Infeasible."""
    if group.machine.state == State.YIELDED:
        raise Infeasible(f"another controller is at work on this group: {group.machine.why}; restart healer to take it")
    slots = _choose(group, target) if isinstance(target, int) else tuple(sorted(set(target)))
    most, least = group.config.max_ranks, group.least_ranks()
    if outside := [s for s in slots if not 0 <= s < most]:
        raise Infeasible(f"slots {outside} are outside 0..{most - 1}")
    if len(slots) > most:
        raise Infeasible(f"{len(slots)} ranks are above spec.target.maxRanks {most}")
    if len(slots) < least:
        raise Infeasible(f"{len(slots)} ranks are too few: vLLM needs {least} for this model and its redundancy")
    live = [h.slot for h in group.held(Role.LIVE)]
    leaving = tuple(s for s in live if s not in slots)
    if leaving and group.holes:
        raise Infeasible(not_with_holes(leaving))
    highest = group.removed or set(live[len(live) - len(leaving) :]) == set(leaving)
    if group.machine.state == State.SERVING and not highest:
        raise Infeasible(not_highest(live, leaving))
    return slots


def _choose(group: Group, size: int) -> tuple[int, ...]:
    """The ranks that vLLM can keep, then the lowest free slots."""
    kept = [h.slot for h in group.held(Role.LIVE) if h.slot in group.target][: max(0, size)]
    free = [s for s in range(max(group.config.max_ranks, size)) if s not in kept]
    free.sort(key=lambda s: (s not in group.target, s in group.unstartable, s))
    return tuple(sorted([*kept, *free[: max(0, size) - len(kept)]]))


async def grow(group: Group, slots: Sequence[int], record: Record) -> None:
    """Raises NotStarted where nothing was asked of vLLM yet, Refused where it did nothing, else Broken, Yielded."""
    old, first = group.live(), len(group.live())
    record.phase("boot")
    numbers = {slot: first + number for number, slot in enumerate(sorted(slots))}
    size = first + len(numbers)
    deadline = time.monotonic() + group.config.deadlines.scale_s
    try:
        await launch(group, numbers, joins=True)
        joiners = [group.ranks[slot] for slot in numbers]
        await _head_start(group, joiners)
        record.phase("prepare")
        await scale(group, old, size, joiners, Pending(size, tuple(numbers), ()), deadline)
    except (NotStarted, Refused):
        await _end_joiners(group, list(numbers))
        raise
    record.phase("verify")
    try:
        await ready(group, [*old, *joiners], deadline)
    except NotStarted as error:
        raise Broken(f"after the commit: {error}") from None
    for slot in numbers:
        group.set_role(slot, Role.LIVE)
        group.attempts.pop(slot, None)
    await _settled(group)


async def _end_joiners(group: Group, slots: list[int]) -> None:
    await group.starter.fence([group.ranks[s].held for s in slots if s in group.ranks])
    await group.drop(slots)
    group.pending = None
    group.save()


async def _head_start(group: Group, joiners: Sequence[RankWatch]) -> None:
    """Until each has an engine that waits for the group: a joiner that dies before that has cost the others nothing."""
    until = time.monotonic() + HEAD_START_S
    while True:
        found = group.starter.processes([r.held for r in joiners])
        failed = {r.held.slot: group.starter.last_words(r.held) for r in joiners if group.starter.ended(r.held)}
        if failed:
            raise NotStarted(failed)
        slow = [r.held.slot for r in joiners if found and not _has_engine(found.get(r.held.slot, []))]
        if not slow:
            return
        try:
            await group.after_poll(until)
        except TimeoutError:
            raise NotStarted(dict.fromkeys(slow, f"no engine within {HEAD_START_S:g} s")) from None


def _has_engine(found: Collection[Process]) -> bool:
    return any(one.part == Part.ENGINE for one in found)


async def scale(
    group: Group, old: Sequence[RankWatch], size: int, joiners: Sequence[RankWatch], pending: Pending, deadline: float
) -> None:
    """The same request to every rank that there is, at once: one that got none would leave the others waiting for it, and shut.

    Raises Refused where all refused it and nothing changed; Broken; Yielded."""
    group.pending = pending
    group.save()
    for rank in (*old, *joiners):
        rank.faulted = False
    shut_since: float | None = None
    posts = {
        rank: asyncio.create_task(rank.endpoints.scale(size, deadline_s=max(1.0, deadline - time.monotonic())))
        for rank in old
    }
    try:
        while not all(post.done() for post in posts.values()):
            _check(group, old, joiners, size, [rank for rank, post in posts.items() if _agreed(post)])
            commits = any(r.look and r.look.scaling and r.look.scaling.phase == Scale.COMMITTING for r in old)
            shut_since = (shut_since or time.monotonic()) if commits else None
            if shut_since is not None and time.monotonic() - shut_since > group.config.deadlines.commit_s:
                raise Broken(f"the commit of {size} ranks was not done within {group.config.deadlines.commit_s:g} s")
            try:
                await group.after_poll(deadline)
            except TimeoutError:
                raise Broken(f"the scaling to {size} was not done within its deadline") from None
        _judge(posts, size)
    finally:
        for post in posts.values():
            post.cancel()
        await asyncio.gather(*posts.values(), return_exceptions=True)


def _agreed(post: "asyncio.Task[str]") -> bool:
    return post.done() and post.exception() is None


def _check(
    group: Group,
    old: Sequence[RankWatch],
    joiners: Sequence[RankWatch],
    size: int,
    agreed: Collection[RankWatch],
) -> None:
    """`agreed`: those whose answer says that the scaling is done."""
    for rank in joiners:
        if group.starter.ended(rank.held):
            words = group.starter.last_words(rank.held)
            raise Broken(f"the joiner in slot {rank.held.slot} has ended, and the others wait for it: {words}")
    for rank in (*old, *joiners):
        if rank.faulted:
            raise Broken(f"slot {rank.held.slot} met a fault while the group scaled: its part never ends")
    for rank in old:
        left = group.may_end(rank) and (rank in agreed or time.monotonic() - rank.gone_at < LEAVE_S)
        if not rank.alive and not left:
            raise Broken(f"slot {rank.held.slot} died while the group scaled")
        scaling = rank.look.scaling if rank.look else None
        if scaling is None:
            continue
        if scaling.phase == Scale.FAILED and scaling.epoch != group.vllm_epoch:
            raise Broken(f"slot {rank.held.slot}: the scaling has failed: {scaling.error or 'no reason given'}")
        asked = scaling.requested_data_parallel_size
        if scaling.is_scaling_elastic_ep and asked not in (None, size):
            raise Yielded(f"somebody asked for {asked} ranks while healer asked for {size}")


def _judge(posts: "dict[RankWatch, asyncio.Task[str]]", size: int) -> None:
    errors = {rank.held.slot: post.exception() for rank, post in posts.items() if post.exception() is not None}
    if not errors:
        return
    shown = "; ".join(f"slot {slot}: {error}" for slot, error in sorted(errors.items()))
    refusals = [e for e in errors.values() if isinstance(e, Refused) and e.status == BAD_REQUEST]
    if len(refusals) == len(posts):
        raise Refused(f"vLLM refused {size} ranks: {shown}", BAD_REQUEST)
    raise Broken(f"the scaling to {size} ranks has failed, and vLLM never undoes it: {shown}")


async def _settled(group: Group) -> None:
    """After a scaling that is proven: take over vLLM's epoch, from looks that are younger than it."""
    group.scaled, group.pending, group.leaving = True, None, frozenset()
    until = time.monotonic() + group.config.deadlines.gate_s
    try:
        for _ in range(2):  # the one that is under way may have begun before
            await group.after_poll(until)
    except TimeoutError:
        raise Broken("the ranks do not answer after the scaling") from None
    epochs = {r.look.scaling.epoch for r in group.live() if r.look is not None and r.look.scaling is not None}
    if len(epochs - {None}) > 1:
        raise Yielded(f"the ranks name different scalings: {sorted(map(str, epochs))}")
    group.vllm_epoch = next(iter(epochs - {None}), group.vllm_epoch)
    group.save()


async def shrink(group: Group, slots: Sequence[int], record: Record) -> None:
    """`slots`: those with the highest DP ranks. Raises Refused, Broken, Yielded."""
    old = group.live()
    staying = [r for r in old if r.held.slot not in slots]
    leaving = [r for r in old if r.held.slot in slots]
    deadline = time.monotonic() + group.config.deadlines.scale_s
    record.phase("drain")
    group.leaving = frozenset(slots)
    group.publish()
    try:
        await _drained(group, leaving)
        record.phase("commit")
        await scale(group, old, len(staying), (), Pending(len(staying), (), tuple(slots)), deadline)
    except Refused:
        group.leaving, group.pending = frozenset(), None
        group.publish()
        for rank in leaving:
            if rank.gone is not None:  # it was no part of a scaling
                group.on_gone(rank)
        raise
    for rank in leaving:
        group.set_role(rank.held.slot, Role.RETIRING)
    record.phase("verify")
    try:
        await ready(group, staying, deadline)
    except NotStarted as error:
        raise Broken(f"after the commit: {error}") from None
    record.phase("retire")
    await retire(group, [r.held for r in leaving])
    await _settled(group)


async def _drained(group: Group, ranks: Sequence[RankWatch]) -> None:
    """At the deadline what still runs there is aborted; the router continues it elsewhere."""
    until = time.monotonic() + group.config.deadlines.drain_s
    empty = 0
    while empty < 2 and time.monotonic() < until:
        try:
            await group.after_poll(until)
        except TimeoutError:
            return
        empty = empty + 1 if all(rank.idle for rank in ranks) else 0


async def retire(group: Group, held: Sequence[Held]) -> None:
    """A retired API server stays, with /health 200 and 503 for all else, until it is ended."""
    await group.starter.end(held, deadline_s=group.config.deadlines.end_s)
    await group.drop([one.slot for one in held])
    group.save()
