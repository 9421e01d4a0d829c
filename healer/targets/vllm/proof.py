"""What counts as success of an action, and how it fails: every rank has answered a canary. What vLLM says of itself does not
count: "healthy" has been seen to be followed by answers that are one step late."""

import asyncio
import time
from collections.abc import Sequence

import structlog

from elastic.errors import ElasticError
from healer.targets.vllm.endpoints import Gate
from healer.targets.vllm.group import Group
from healer.targets.vllm.records import Held
from healer.targets.vllm.watch import RankWatch

log = structlog.get_logger("healer.vllm")

PROBE_S = 5.0


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
            await asyncio.gather(*(canary(group, rank, until) for rank in ranks))
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


async def canary(group: Group, rank: RankWatch, until: float) -> bool:
    config = group.config.canary
    deadline_s = max(1.0, min(config.deadline_s, until - time.monotonic()))
    reference = group.reference if config.compare else ()
    found = await rank.sing(group.model, config.prompt, config.tokens, deadline_s=deadline_s, reference=reference)
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


async def probe(group: Group) -> None:
    """Ask the live ranks, which are healthy now, whether they know how to go on without a dead one. No answer counts as no."""
    ranks = group.live()
    if not group.arguments.flag("enable-fault-tolerance") and "fault-tolerance-config" not in group.arguments.options:
        return
    found = await asyncio.gather(*(r.endpoints.can_remove(deadline_s=PROBE_S) for r in ranks), return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException) and not isinstance(error, ElasticError):
            raise error
    group.can_remove = bool(found) and all(one is True for one in found)
    log.info("removal.probed", can_remove=group.can_remove)


async def trust_again(group: Group, ranks: Sequence[RankWatch], until: float, *, alone: bool) -> None:
    """After a fault that these ranks say they have got over: reset their caches, take two canaries of each, and count them as
    new, since their requests were aborted. `alone`: the second ones one after another, so that each rank must wake the others
    from idleness, which the coordinator did that may be gone. Raises Broken."""
    await _reset_caches(group, ranks)
    bad = await _silent(group, ranks, until)
    for some in [[rank] for rank in ranks] if alone else [ranks]:
        bad = bad or await _silent(group, some, until)
    if bad:
        raise Broken(f"after the fault slots {bad} do not answer as they should")
    for rank in ranks:
        old = rank.held
        incarnation = group.next_incarnation(old.slot)
        rank.trusted_again(Held(old.slot, incarnation, old.dp_rank, old.pid, old.pid_start, old.url, old.role))
    group.save()


async def _silent(group: Group, ranks: Sequence[RankWatch], until: float) -> list[int]:
    """Slots whose canary failed."""
    sound = await asyncio.gather(*(canary(group, rank, until) for rank in ranks))
    return [rank.held.slot for rank, ok in zip(ranks, sound, strict=True) if not ok]


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
