"""A group whose ranks have healer's plugin goes on inside, around whoever is dead, and its empty places are filled again.

Requests of survivors go on, so their incarnations stay: the router must not send these requests elsewhere.
"""

import asyncio
import time
from collections.abc import Collection, Sequence

import structlog

from elastic.errors import ElasticError
from elastic.vllm.driver import Refilled, RefillFailed, RefillLimits
from healer.targets.vllm import commands
from healer.targets.vllm.group import Group
from healer.targets.vllm.in_place import InPlace, why_not
from healer.targets.vllm.proof import Broken, NotStarted, canary, ready
from healer.targets.vllm.record import Record
from healer.targets.vllm.records import Role
from healer.targets.vllm.sequences import launch
from healer.targets.vllm.watch import RankWatch

log = structlog.get_logger("healer.vllm")

ORDER_S = 5.0
"""For one order to the survivors; 0.06 to 0.2 s were seen on two cores."""


class GroupRanks:
    """The group's processes by DP rank, as `elastic.vllm.driver.Ranks`."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def _of(self, number: int) -> RankWatch | None:
        return next((rank for rank in self._group.ranks.values() if rank.held.dp_rank == number), None)

    def alive(self, slot: int) -> bool:
        rank = self._of(slot)
        if rank is None or rank.gone is not None:
            return False
        return rank.held.role == Role.LIVE or not self._group.starter.ended(rank.held)

    async def fence(self, slots: Collection[int]) -> None:
        found = [rank.held for number in slots if (rank := self._of(number)) is not None]
        await _leave_out(self._group, [held.slot for held in found if held.role == Role.LIVE])
        await end(self._group, [held.slot for held in found if held.role != Role.LIVE])


async def end(group: Group, slots: Sequence[int]) -> None:
    """The ranks of these slots, for certain and without more ado. Raises ElasticError."""
    victims = [group.ranks[slot] for slot in slots if slot in group.ranks]
    for rank in victims:
        group.set_role(rank.held.slot, Role.RETIRING)
    group.publish()
    await group.starter.fence([rank.held for rank in victims])
    await group.drop([rank.held.slot for rank in victims])


async def look(group: Group) -> None:
    """Find out whether those who are left can go on by themselves: ask each, unless nothing calls for it."""
    left = [r for r in group.live() if r.held.slot not in group.lost and r.gone is None]
    if group.in_place is None or not group.coordinated:
        group.why_not_in_place = "the ranks of this launch do not have the plugin"
        return
    if not group.lost and not any(r.look is not None and r.look.unhealthy for r in left):
        return
    numbers = [r.held.dp_rank for r in left]
    group.in_place.know({r.held.dp_rank: r.held.url for r in left}, group.api_key)
    infos = await group.in_place.infos(numbers)
    sticky = [r.held.dp_rank for r in left if r.sticky]
    group.why_not_in_place = why_not(numbers, least=group.least_in_place(), infos=infos, sticky=sticky)
    if group.why_not_in_place:
        log.warning("in_place.cannot", why=group.why_not_in_place)


async def heal(group: Group, in_place: InPlace, slots: Sequence[int], record: Record) -> None:
    """Go on without the ranks of `slots`; with none, all together. Who dies meanwhile is left out too. Raises Broken,
    ElasticError."""
    record.phase("fence")
    if not slots:
        group.retries += 1
    await _leave_out(group, slots)
    record.phase("order")
    await _go_on(group, in_place)
    record.phase("verify")
    await _verify(group, group.live())


async def _go_on(group: Group, in_place: InPlace) -> None:
    """Those that are live, less whoever drops out. Raises Broken."""
    live = group.live()
    in_place.know({rank.held.dp_rank: rank.held.url for rank in live}, group.api_key)
    try:
        healed = await in_place.go_on([rank.held.dp_rank for rank in live], GroupRanks(group), timeout_s=ORDER_S)
    except ElasticError as error:
        raise Broken(f"the ranks cannot go on in place: {error}") from error
    finally:
        group.ordered = group.unbalanced = True
    log.info("in_place.healed", ranks=list(healed.survivors), took_s=round(healed.took_s, 3), rounds=healed.rounds)
    await _leave_out(group, [h.slot for h in group.held(Role.LIVE) if h.dp_rank not in healed.survivors])
    group.save()


async def _leave_out(group: Group, slots: Sequence[int]) -> None:
    """These live ranks are ended, and their places are empty."""
    places = {group.ranks[slot].held.dp_rank: slot for slot in slots if slot in group.ranks}
    await end(group, list(places.values()))
    group.holes |= places
    for slot in slots:
        group.lost.pop(slot, None)


async def _verify(group: Group, ranks: Sequence[RankWatch]) -> None:
    """All answer a canary. One that dies meanwhile is another loss, not a failure of this. Raises Broken."""
    until = time.monotonic() + group.config.deadlines.retry_s
    work = asyncio.create_task(_sound(group, ranks, until))
    try:
        while not work.done():
            if not all(rank.alive and rank.held.slot not in group.lost for rank in ranks):
                return
            await asyncio.wait([work], timeout=group.poll_s)
        await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _sound(group: Group, ranks: Sequence[RankWatch], until: float) -> None:
    answers = asyncio.gather(*(canary(group, rank, until) for rank in ranks))
    try:
        await group.after_poll(until)  # one that is under way may have begun before the order
        while any(rank.look is None or not rank.look.answers or rank.look.unhealthy for rank in ranks):
            await group.after_poll(until)
        sound = await answers
    except TimeoutError:
        raise Broken("the engines are not healthy in time after they went on") from None
    finally:
        answers.cancel()
    if bad := [rank.held.slot for rank, ok in zip(ranks, sound, strict=True) if not ok]:
        raise Broken(f"slots {bad} do not answer as they should after they went on")


async def fill(group: Group, in_place: InPlace, slot: int, record: Record) -> None:
    """A rank for an empty place, while the others serve. Raises NotStarted, ElasticError where the others serve as before,
    Broken where they cannot."""
    number, live = group.place_for(slot), group.live()
    size = len(live) + len(group.holes)
    limits = group.config.deadlines
    launched = False

    async def started(rpc_port: int) -> str:
        nonlocal launched
        launched, group.rpc_port = True, rpc_port
        await launch(group, {slot: number}, joins=True, fills=size)
        return commands.url_of(group.config, slot)

    record.phase("boot")
    in_place.know({rank.held.dp_rank: rank.held.url for rank in live}, group.api_key)
    work = asyncio.create_task(
        in_place.fill(
            [rank.held.dp_rank for rank in live],
            number,
            GroupRanks(group),
            started,
            api_key=group.api_key,
            limits=RefillLimits(commit_s=limits.commit_s, serve_s=limits.gate_s),
        )
    )
    try:
        await _while_sound(group, live, work)
        filled = work.result()
        group.ordered = True
        log.info("in_place.filled", slot=slot, rank=number, **filled.phases_s)
        record.phase("verify")
        await ready(group, [group.ranks[slot]], time.monotonic() + limits.retry_s)
    except BaseException as error:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await asyncio.shield(_take_back(group, slot))
        if not isinstance(error, ElasticError):
            raise
        if isinstance(error, RefillFailed) or not launched:
            raise _blame(slot, live, error) from error
        # they may stand between two groups, or in one with a rank that is gone
        await _go_on(group, in_place)
        raise _blame(slot, live, error) from error
    group.set_role(slot, Role.LIVE)
    group.attempts.pop(slot, None)
    del group.holes[number]
    if not group.holes:
        group.unbalanced = False
        for rank in group.live():
            # what was said of threads that the order had ended
            rank.eplb_stopped = False
    group.save()


async def _while_sound(group: Group, live: Sequence[RankWatch], work: "asyncio.Task[Refilled]") -> None:
    """Until the work is done. Raises ElasticError as soon as one of the others meets a fault, which comes first."""
    while not work.done():
        await asyncio.wait([work], timeout=group.poll_s)
        if not work.done() and (sick := [r.held.slot for r in live if r.look is not None and r.look.unhealthy]):
            raise ElasticError(f"slots {sick} met a fault meanwhile")


def _blame(slot: int, live: Sequence[RankWatch], error: ElasticError) -> ElasticError:
    """A start that failed is counted against the slot only where the others are sound."""
    if all(rank.alive and not (rank.look is not None and rank.look.unhealthy) for rank in live):
        return NotStarted({slot: str(error)})
    return ElasticError(str(error))


async def _take_back(group: Group, slot: int) -> None:
    await end(group, [slot])
    group.save()
