"""What is done after a fault, in place: tell every engine to retry, or to go on without ranks that are dead. Both end with proof,
or in a restart."""

import asyncio
import time
import uuid
from collections.abc import Sequence

from healer.targets.vllm import commands
from healer.targets.vllm.endpoints import Engine, Removal
from healer.targets.vllm.group import Group
from healer.targets.vllm.processes import free_port
from healer.targets.vllm.proof import Broken, canary, trust_again
from healer.targets.vllm.record import Record
from healer.targets.vllm.records import Role
from healer.targets.vllm.watch import RankWatch


async def retry(group: Group, record: Record) -> None:
    """Every process lives and every engine says that it met a fault: tell all to retry, in one round. Raises Broken."""
    ranks = group.live()
    until = time.monotonic() + group.config.deadlines.retry_s
    group.retries += 1
    group.publish()
    record.phase("retry")
    left, name = group.config.deadlines.retry_s, uuid.uuid4().hex
    told = await asyncio.gather(*(r.endpoints.retry(name, deadline_s=left) for r in ranks), return_exceptions=True)
    if refused := [str(error) for error in told if isinstance(error, BaseException)]:
        raise Broken("; ".join(refused))
    while any(r.look is None or not r.look.answers or r.look.unhealthy for r in ranks):
        if dead := [r.held.slot for r in ranks if not r.alive]:
            raise Broken(f"slots {dead} died during the retry")
        try:
            await group.after_poll(until)
        except TimeoutError:
            raise Broken("the engines did not become healthy in time after the retry") from None
    record.phase("verify")
    await trust_again(group, ranks, until, alone=False)


async def remove(group: Group, slots: Sequence[int], record: Record) -> None:
    """End the ranks of `slots` for certain, let the others meet the fault, tell them all at once to go on without. By the rules
    of vLLM pull request 46370: no survivor takes the instruction before it is unhealthy, all must get the same one, and what
    fails once it is under way is final. Raises Broken, ElasticError."""
    limits = group.config.deadlines
    victims = [group.ranks[slot] for slot in slots if slot in group.ranks]
    numbers = tuple(sorted(rank.held.dp_rank for rank in victims))
    record.phase("fence")
    group.removing = True
    group.save()
    for rank in victims:
        group.set_role(rank.held.slot, Role.RETIRING)
    group.publish()
    await group.starter.fence([rank.held for rank in victims])
    await group.drop([rank.held.slot for rank in victims])
    survivors = group.live()
    record.phase("detect")
    await _all_unhealthy(group, survivors, time.monotonic() + limits.stall_s)
    record.phase("remove")
    master = (commands.HOST, free_port()) if 0 in numbers else None
    removal = Removal(uuid.uuid4().hex, numbers, master)
    until = time.monotonic() + limits.commit_s
    told = await asyncio.gather(
        *(r.endpoints.remove(removal, deadline_s=limits.retry_s) for r in survivors), return_exceptions=True
    )
    if refused := [str(error) for error in told if isinstance(error, BaseException)]:
        raise Broken("; ".join(refused))
    await _carried_out(group, survivors, removal.request_id, until)
    record.phase("verify")
    await trust_again(group, survivors, time.monotonic() + limits.retry_s, alone=True)
    group.removed, group.removing = (*group.removed, *numbers), False
    for slot in slots:
        group.lost.pop(slot, None)
    group.save()


async def _all_unhealthy(group: Group, ranks: Sequence[RankWatch], until: float) -> None:
    """Engines notice a dead peer only when they run a step: where no client has them do so, canaries must."""
    while healthy := [rank for rank in ranks if rank.look is None or not rank.look.unhealthy]:
        _still_there(ranks)
        calls = [asyncio.create_task(canary(group, rank, until)) for rank in healthy]
        try:
            while any(rank.look is None or not rank.look.unhealthy for rank in healthy):
                _still_there(ranks)
                if all(call.done() for call in calls):
                    break
                await group.after_poll(until)
        except TimeoutError:
            names = [rank.held.slot for rank in ranks if rank.look is None or not rank.look.unhealthy]
            raise Broken(f"slots {names} did not meet the fault in time, and take no instruction before") from None
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


async def _carried_out(group: Group, ranks: Sequence[RankWatch], request_id: str, until: float) -> None:
    while True:
        _still_there(ranks)
        engines = {rank.held.slot: _engine(rank) for rank in ranks}
        for slot, one in engines.items():
            if one is not None and one.last_ft_request_id == request_id and one.ft_error:
                raise Broken(f"slot {slot} cannot go on without the dead ranks: {one.ft_error}")
        if all(one is not None and one.status == "healthy" for one in engines.values()):
            return
        try:
            await group.after_poll(until)
        except TimeoutError:
            slots = [slot for slot, one in engines.items() if one is None or one.status != "healthy"]
            raise Broken(f"slots {slots} did not go on without the dead ranks in time") from None


def _engine(rank: RankWatch) -> Engine | None:
    fault = rank.look.fault if rank.look is not None else None
    return fault.engines[0] if fault is not None and fault.engines else None


def _still_there(ranks: Sequence[RankWatch]) -> None:
    if dead := [rank.held.slot for rank in ranks if not rank.alive or (rank.look is not None and rank.look.dead)]:
        raise Broken(f"slots {dead} were lost too")
