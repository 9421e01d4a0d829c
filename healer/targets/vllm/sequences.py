"""A vLLM group is started, or started anew, step by step. (`recovery`: what is done after a fault in place; `scaling`: grow and
shrink; `proof`: what counts as success.)

One at a time, in a task that may be cancelled between any two steps: what it leaves is ended by the restart that follows.
"""

import time
from collections.abc import Sequence

import structlog

from elastic.controller.records import BootFailed
from elastic.errors import ElasticError
from healer.targets.vllm import commands, in_place
from healer.targets.vllm.group import Group
from healer.targets.vllm.processes import free_port
from healer.targets.vllm.proof import NotStarted, probe, ready, take_reference
from healer.targets.vllm.record import Record
from healer.targets.vllm.records import Held, Role
from healer.targets.vllm.starters import Launch

log = structlog.get_logger("healer.vllm")


async def fence_all(group: Group) -> None:
    """End every rank that is known, in whatever state. Raises ElasticError where that cannot be done."""
    held = group.held()
    for rank in group.ranks.values():
        rank.unwatch()  # what we end ourselves is no loss
    await group.starter.fence(held)
    await group.drop([h.slot for h in held])
    group.pending, group.leaving, group.removing = None, frozenset(), False
    group.save()


async def launch_all(group: Group, slots: Sequence[int]) -> None:
    """Launch one rank for each slot, together; lowest slot first in DP rank. Raises ElasticError."""
    slots = sorted(slots)
    group.rpc_port = await _rpc_port(group, len(slots))
    group.holes, group.ordered, group.unbalanced = {}, False, False
    group.scaled, group.reference, group.vllm_epoch = False, (), None
    group.can_remove, group.removed = False, ()
    group.launch_size = len(slots)
    wanted = commands.redundancy(group.experts, group.asked_redundant, len(slots) * group.tensor)
    group.redundant = None if wanted == group.asked_redundant else wanted
    await launch(group, {slot: number for number, slot in enumerate(slots)}, joins=False)


async def _rpc_port(group: Group, size: int) -> int:
    """Of healer's coordination process, where ranks are to have the plugin. Where it does not come up the group runs stock: to
    serve is worth more."""
    if group.coordinated and group.in_place is None:
        await in_place.quit(group.run_dir)
    group.coordinated = False
    if group.in_place is not None:
        try:
            port = await group.in_place.begin(range(size))
        except ElasticError as error:
            log.error("in_place.off", why=str(error))
        else:
            group.coordinated = True
            return port
    return free_port()


async def launch(group: Group, numbers: dict[int, int], *, joins: bool, fills: int = 0) -> None:
    """`fills`: the size of the group in which the ranks take empty places; 0: they take none."""
    incarnations = {slot: group.next_incarnation(slot) for slot in numbers}
    group.save()
    size = fills or max(numbers.values()) + 1
    shared = Launch(
        numbers,
        incarnations,
        size=size,
        rpc_port=group.rpc_port,
        joins=joins,
        redundant=group.redundant,
        variables=group.variables(fills=bool(fills)),
        # a start that failed may have failed because it was a spare's
        spares=not group.attempts.keys() & numbers.keys(),
    )
    started = await group.starter.start(sorted(numbers), shared)
    for slot, one in started.items():
        url = commands.url_of(group.config, slot)
        held = Held(slot, incarnations[slot], numbers[slot], one.pid, one.pid_start, url, Role.BOOTING)
        group.add(held)
    group.save()
    log.info("ranks.launched", slots=sorted(numbers), size=size, joins=joins)


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
    await probe(group)
    group.save()


def boot_failures(group: Group, error: NotStarted) -> list[BootFailed]:
    """Count the failed starts and tell of them."""
    found = []
    for slot, why in sorted(error.failed.items()):
        group.attempts[slot] = group.attempts.get(slot, 0) + 1
        gave_up = group.attempts[slot] >= group.config.start_attempts
        incarnation = group.incarnations.get(slot, 0)
        found.append(BootFailed(slot, incarnation, why, group.attempts[slot], gave_up, time.monotonic()))
    return found
