"""What is done to a vLLM group, step by step: start it, start it anew, retry. (`scaling`: grow and shrink.) Each ends with canaries: nothing
that vLLM says of itself counts as success.

One at a time, in a task that may be cancelled between any two steps: what it leaves is ended by the restart that follows.
"""

import asyncio
import time
from collections.abc import Sequence

import structlog

from elastic.controller.records import (
    BootFailed,
)
from elastic.errors import ElasticError
from healer.targets.vllm import commands
from healer.targets.vllm.endpoints import Gate
from healer.targets.vllm.group import Group
from healer.targets.vllm.processes import free_port
from healer.targets.vllm.record import Record
from healer.targets.vllm.records import Held, Role
from healer.targets.vllm.starters import Launch
from healer.targets.vllm.watch import RankWatch

log = structlog.get_logger("healer.vllm")

RETRY_CANARIES = 2


class Broken(ElasticError):
    """The group is left in a state that only a restart of all ranks ends."""


class NotStarted(ElasticError):
    """Ranks did not come up."""

    def __init__(self, failed: dict[int, str]) -> None:
        """Why, by slot."""
        super().__init__("; ".join(f"slot {slot}: {why}" for slot, why in sorted(failed.items())))
        self.failed = failed


class Yielded(ElasticError):
    """Somebody else scales this group at the same time."""


# --- start and restart ------------------------------------------------------------------------------------------------


async def fence_all(group: Group) -> None:
    """End every rank that is known, in whatever state. Raises ElasticError where that cannot be done."""
    held = group.held()
    for rank in group.ranks.values():
        rank.unwatch()  # what we end ourselves is no loss
    await group.starter.fence(held)
    await group.drop([h.slot for h in held])
    group.pending, group.leaving = None, frozenset()
    group.save()


async def launch_all(group: Group, slots: Sequence[int]) -> None:
    """Launch one rank for each slot, together; lowest slot first in DP rank. Raises ElasticError."""
    slots = sorted(slots)
    group.rpc_port = free_port()
    group.scaled, group.reference, group.vllm_epoch = False, (), None
    group.launch_size = len(slots)
    wanted = commands.redundancy(group.experts, group.asked_redundant, len(slots) * group.tensor)
    group.redundant = None if wanted == group.asked_redundant else wanted
    await launch(group, {slot: number for number, slot in enumerate(slots)}, joins=False)


async def launch(group: Group, numbers: dict[int, int], *, joins: bool) -> None:
    incarnations = {slot: group.next_incarnation(slot) for slot in numbers}
    group.save()
    size = max(numbers.values()) + 1
    shared = Launch(numbers, incarnations, size=size, rpc_port=group.rpc_port, joins=joins, redundant=group.redundant)
    started = await group.starter.start(sorted(numbers), shared)
    for slot, one in started.items():
        url = commands.url_of(group.config, slot)
        held = Held(slot, incarnations[slot], numbers[slot], one.pid, one.pid_start, url, Role.BOOTING)
        group.add(held)
    group.save()
    log.info("ranks.launched", slots=sorted(numbers), size=size, joins=joins)


async def ready(group: Group, ranks: Sequence[RankWatch], until: float) -> None:
    """Wait until each answers a canary. Raises NotStarted as soon as one has ended or met a fault, or at `until`, naming those
    at fault."""
    while True:
        ended = {r.held.slot: group.starter.last_words(r.held) for r in ranks if group.starter.ended(r.held)}
        if ended:
            raise NotStarted(ended)
        faulty = {r.held.slot: f"met a fault: {_fault(r)}" for r in ranks if r.look is not None and r.look.unhealthy}
        if faulty:
            raise NotStarted(faulty)
        waiting = [r for r in ranks if r.look is None or r.look.health is not True or r.look.gate != Gate.OPEN]
        if not waiting:
            await asyncio.gather(*(_canary(group, rank, until) for rank in ranks))
            waiting = [r for r in ranks if r.canary is None or not r.canary.ok]
            if not waiting:
                return
        if time.monotonic() > until:
            raise NotStarted({r.held.slot: _why(r) for r in waiting})
        try:
            await group.after_poll(until)
        except TimeoutError:
            raise NotStarted({r.held.slot: _why(r) for r in waiting}) from None


def _fault(rank: RankWatch) -> str:
    engines = rank.look.fault.engines if rank.look is not None and rank.look.fault is not None else ()
    return ", ".join(one.fault_info for one in engines if one.fault_info) or "its engine says unhealthy"


def _why(rank: RankWatch) -> str:
    if rank.canary is not None and not rank.canary.ok:
        return f"no canary in time: {rank.canary.why}"
    return f"not ready in time: {rank.look.why if rank.look else 'nothing answers'}"


async def _canary(group: Group, rank: RankWatch, until: float) -> bool:
    canary = group.config.canary
    deadline_s = max(1.0, min(canary.deadline_s, until - time.monotonic()))
    reference = group.reference if canary.compare else ()
    found = await rank.sing(group.model, canary.prompt, canary.tokens, deadline_s=deadline_s, reference=reference)
    if not found.ok:
        log.warning("canary.failed", slot=rank.held.slot, why=found.why)
    return found.ok


def take_reference(group: Group) -> None:
    """The first launch's canaries are what later ones are compared with. Raises NotStarted where the ranks differ."""
    if not group.config.canary.compare:
        return
    answers = {r.held.slot: r.canary.tokens for r in group.ranks.values() if r.canary is not None}
    if len(set(answers.values())) > 1:
        raise NotStarted({slot: f"its canary is {list(tokens)}, others differ" for slot, tokens in answers.items()})
    group.reference = next(iter(answers.values()), ())


async def form(group: Group, slots: Sequence[int], record: Record) -> None:
    """From nothing to a group that serves. Raises NotStarted, ElasticError; then nothing of it is left running."""
    try:
        record.phase("boot")
        await launch_all(group, slots)
        await finish_start(group, record)
    except ElasticError:
        await fence_all(group)
        raise


async def finish_start(group: Group, record: Record) -> None:
    """Of ranks that are launched."""
    record.phase("verify")
    ranks = [group.ranks[h.slot] for h in group.held()]
    await ready(group, ranks, time.monotonic() + group.config.deadlines.start_s)
    take_reference(group)
    for rank in ranks:
        group.set_role(rank.held.slot, Role.LIVE)
        group.attempts.pop(rank.held.slot, None)
    group.retries = 0
    group.save()


# --- retry ----------------------------------------------------------------------------------------------------------------


async def retry(group: Group, record: Record) -> None:
    """Every process lives and every engine says that it met a fault: tell all to retry, in one round. Raises Broken."""
    ranks = group.live()
    until = time.monotonic() + group.config.deadlines.retry_s
    group.retries += 1
    group.publish()
    record.phase("retry")
    left = group.config.deadlines.retry_s
    told = await asyncio.gather(*(r.endpoints.retry(deadline_s=left) for r in ranks), return_exceptions=True)
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
    await _reset_caches(group, ranks)
    for _ in range(RETRY_CANARIES):
        # "healthy" alone has been seen to be followed by answers that are one step late
        sound = await asyncio.gather(*(_canary(group, r, until) for r in ranks))
        if not all(sound):
            bad = [r.held.slot for r, ok in zip(ranks, sound, strict=True) if not ok]
            raise Broken(f"after the retry slots {bad} do not answer as they should")
    for rank in ranks:
        slot = rank.held.slot
        held = rank.held
        rank.trusted_again(
            Held(slot, group.next_incarnation(slot), held.dp_rank, held.pid, held.pid_start, held.url, held.role)
        )
    group.save()


async def _reset_caches(group: Group, ranks: Sequence[RankWatch]) -> None:
    """Blocks are hashed when they are allocated: those of the failed step were never written, and a later request may hit
    them."""
    if not group.arguments.flag("enable-prefix-caching", True):
        return
    deadline_s = group.config.canary.deadline_s
    done = await asyncio.gather(
        *(r.endpoints.reset_prefix_cache(deadline_s=deadline_s) for r in ranks), return_exceptions=True
    )
    if bad := [r.held.slot for r, ok in zip(ranks, done, strict=True) if ok is not True]:
        raise Broken(f"the prefix caches of slots {bad} were not reset")


def boot_failures(group: Group, error: NotStarted) -> list[BootFailed]:
    """Count the failed starts and tell of them."""
    found = []
    for slot, why in sorted(error.failed.items()):
        group.attempts[slot] = group.attempts.get(slot, 0) + 1
        gave_up = group.attempts[slot] >= group.config.start_attempts
        incarnation = group.incarnations.get(slot, 0)
        found.append(BootFailed(slot, incarnation, why, group.attempts[slot], gave_up, time.monotonic()))
    return found
