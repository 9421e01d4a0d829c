"""What runs already when a daemon starts: ranks of an earlier daemon, found by pid and start time, or servers that answer."""

import time

import structlog

from elastic import process
from elastic.errors import ElasticError
from healer.targets.vllm import commands, processes, proof, spares
from healer.targets.vllm import state as files
from healer.targets.vllm.endpoints import Endpoints, Phase
from healer.targets.vllm.group import Group
from healer.targets.vllm.processes import Processes
from healer.targets.vllm.records import Held, Part, Process, Role

log = structlog.get_logger("healer.vllm")

ASK_S = 5.0


async def adopt(group: Group) -> bool:
    """Take over what runs, if it is a group that serves or did. False: nothing does, or what was left of a start that was
    cut off, which is ended."""
    known = files.load(group.run_dir, group.name, set_aside=group.owns_files)
    if known is not None:
        group.epoch, group.target = known.epoch, known.target
        group.incarnations |= known.incarnations
    if group.config.mode == "attach":
        return await _attach(group)
    if known is None:
        return False
    if known.removing:
        # the survivors wait for an instruction, or are half through it: nobody can tell
        await group.starter.fence(known.ranks)
        return False
    group.redundant, group.removed = known.redundant, known.removed
    group.holes, group.coordinated = dict(known.holes), known.coordinated
    group.ordered, group.unbalanced = known.ordered, known.unbalanced
    group.rpc_port, group.scaled, group.reference = known.rpc_port, known.scaled, known.reference
    group.launch_size = known.launch_size or max(1, sum(h.role == Role.LIVE for h in known.ranks))
    living = [h for h in known.ranks if process.is_alive(h.pid, h.pid_start)]
    if not any(h.role == Role.LIVE for h in living):
        # sessions without their leader too
        await group.starter.fence(known.ranks)
        return False
    for held in known.ranks:
        group.add(held)
    group.pending = known.pending
    await _finish_scaling(group)
    found = group.starter.processes(group.held())
    for held in group.held(Role.LIVE):
        group.set_role(held.slot, Role.LIVE)
        parts = {one.part for one in found[held.slot] if processes.alive(one)}
        if not {Part.API, Part.ENGINE} <= parts:
            # it died while nobody watched
            group.ranks[held.slot].gone = Process(held.pid, held.pid_start, "X", Part.API)
            group.on_gone(group.ranks[held.slot])
    return True


async def follow(group: Group) -> None:
    """Of a dry run: look at the ranks that the acting daemon has by now."""
    known = files.load(group.run_dir, group.name, set_aside=False)
    if known is None or (known.epoch == group.epoch and known.ranks == tuple(group.held())):
        return
    group.epoch, group.target = known.epoch, known.target
    group.holes, group.removed, group.pending = dict(known.holes), known.removed, known.pending
    wanted = {held.slot: held for held in known.ranks}
    others = [s for s, r in group.ranks.items() if s not in wanted or wanted[s].process != r.held.process]
    await group.drop(others)
    for held in known.ranks:
        rank = group.ranks.get(held.slot) or group.add(held)
        rank.held = held
        group.set_role(held.slot, held.role)


async def end_spares(group: Group, processes: Processes) -> None:
    """Those of an earlier daemon: nobody can give them an order any more."""
    known = files.load(group.run_dir, group.name)
    await spares.end_left(group.run_dir, processes, [held.process for held in known.ranks] if known else ())


async def _finish_scaling(group: Group) -> None:
    """A daemon may have died between the request to scale and its end; vLLM has gone on."""
    pending, others = group.pending, [h for h in group.held() if h.role != Role.LIVE]
    if pending is not None:
        phase = await _outcome(group)
        log.info("scaling.found", size=pending.size, phase=phase.value if phase else None)
        if phase == Phase.COMPLETED:
            group.scaled = True
            for slot in pending.joiners:
                if slot in group.ranks:
                    group.set_role(slot, Role.LIVE)
            others = [group.ranks[s].held for s in pending.leavers if s in group.ranks]
            others += [h for h in group.held() if h.role != Role.LIVE]
    group.pending = None
    if others:
        await group.starter.fence(others)
        await group.drop([h.slot for h in others])
    group.save()


async def _outcome(group: Group) -> Phase | None:
    """How the scaling ended, waiting for it as long as it may take."""
    until = time.monotonic() + group.config.deadlines.scale_s
    server = group.ranks[group.held(Role.LIVE)[0].slot].endpoints
    while True:
        try:
            found = await server.scaling(deadline_s=ASK_S)
        except ElasticError:
            return None
        if found.phase not in (Phase.PREPARING, Phase.COMMITTING) or time.monotonic() > until:
            return found.phase
        await group.after_poll(until)


async def _attach(group: Group) -> bool:
    """Servers that answer at the URLs of the first slots."""
    answering = []
    for slot in range(group.config.max_ranks):
        url = commands.url_of(group.config, slot)
        server = Endpoints(url)
        try:
            if await server.health(deadline_s=ASK_S):
                answering.append(slot)
        except ElasticError:
            pass
        finally:
            await server.aclose()
    if len(answering) < _least(group):
        return False
    group.target = tuple(answering)
    for number, slot in enumerate(answering):
        incarnation = group.incarnations.get(slot, 0)
        group.add(Held(slot, incarnation, number, 0, 0, commands.url_of(group.config, slot), Role.LIVE))
    group.launch_size = len(answering)
    return True


def _least(group: Group) -> int:
    return min(group.config.ranks, len(group.target))


async def prove(group: Group) -> None:
    """After an adoption: record vLLM's epoch, and canaries where the ranks give them. A rank that does not is judged later,
    as any that falls silent."""
    until = time.monotonic() + group.config.canary.deadline_s
    try:
        await group.after_poll(until)
        await group.after_poll(until)
    except TimeoutError:
        log.warning("adopted.silent", why="the ranks were not asked in time")
    epochs = {r.look.scaling.epoch for r in group.live() if r.look and r.look.scaling and r.look.scaling.epoch}
    group.vllm_epoch = next(iter(epochs), None) if len(epochs) <= 1 else None
    try:
        await proof.ready(group, [r for r in group.live() if r.alive], until)
        if not group.reference:
            proof.take_reference(group)
        await proof.probe(group)
    except proof.NotStarted as error:
        log.warning("adopted.unproven", why=str(error))
