"""SIGSTOP of a rank, noticed by the daemon's own rules: a rank that beats no more while its peers wait for it."""

import asyncio
import functools
import random
import time
from typing import Any

import msgspec

from chaos import inject
from chaos.gpu_bench import ranks
from chaos.gpu_bench.clients import Clients, Order
from chaos.gpu_bench.group import AFTER_S, BEFORE_S, REQUESTS, TOKENS, sample_of, with_answers
from chaos.gpu_bench.lab import VOCAB, Lab, Running
from elastic.client import random_prompts
from elastic.controller.records import SequenceReport
from elastic.errors import ElasticError
from elastic.view import Member
from healer import drill
from healer.deployment import Deployment

DEADLINE_S = 120.0
STALL_AFTER_S = 1.0


async def hang(lab: Lab, running: Running) -> None:
    checkpoint, sizes = await lab.checkpoint("narrow"), lab.model("narrow")
    backend = "shm" if lab.options.cpu else "nixl-ep"
    target = {"ranks": 2, "maxRanks": 2, "slotsPerRank": 8, "redundantExperts": 8, "epBackend": backend}
    deployment = Deployment(
        checkpoint,
        target=target | {"hostTier": False, "spares": 2 if lab.options.cpu else 12},
        detection={"stallAfter": f"{STALL_AFTER_S:g}s"},
    )
    running.config = target | {"stall_after_s": STALL_AFTER_S, "model": sizes.name, "moe_layers": sizes.layers}
    clients: Clients | None = None
    try:
        await deployment.start(DEADLINE_S)
        prompts = random_prompts(REQUESTS, VOCAB, lab.options.seed)
        clients = await Clients.start(Order(deployment.gateway(), prompts, TOKENS))
        await deployment.watched(_stops(deployment, running))
        told = await clients.stop()
        running.samples[:] = with_answers(running.samples, told)
        await deployment.stop()
    finally:
        if clients is not None:
            await clients.kill()
        await asyncio.to_thread(deployment.end)


async def _stops(deployment: Deployment, running: Running) -> None:
    draw = random.Random(running.name)
    for number in range(running.wanted):
        if running.spent:
            return
        await asyncio.sleep(draw.uniform(0.1, 0.4))
        slot = number % 2
        members = await _members(deployment)
        known = await drill.incidents(deployment)
        others = [m for s, m in members.items() if s != slot]
        before = await ranks.look_at_all("local", others, time.monotonic() - BEFORE_S)
        (fault,) = inject.stop(deployment.run_dir, [slot])
        healing = await drill.healed(deployment, known, fault.sent, DEADLINE_S, lambda _: None)
        await deployment.settled(DEADLINE_S)
        await asyncio.sleep(AFTER_S)
        after = await ranks.look_at_all("local", others, fault.sent - BEFORE_S)
        reports = await _reports(deployment, healing.incident)
        sample = sample_of("stop", (slot,), fault.sent, reports, before, after)
        # the sequence begins at the decision; what counts is the verdict's evidence
        running.samples.append(msgspec.structs.replace(sample, seen_s=healing.detect_s))


async def _members(deployment: Deployment) -> dict[int, Member]:
    group = (await deployment.get("/status"))["group"]
    found = {s["slot"]: s["member"] for s in group["slots"] if s["state"] == "live"}
    if not found:
        raise ElasticError("the daemon's group has no live rank")
    return {slot: msgspec.convert(member, Member) for slot, member in found.items()}


async def _reports(deployment: Deployment, incident: str) -> list[SequenceReport]:
    entries: list[dict[str, Any]] = (await deployment.get(f"/incidents/{incident}"))["entries"]
    return [
        msgspec.convert(e["body"]["report"], SequenceReport, str_keys=True) for e in entries if "report" in e["body"]
    ]


async def run_hang(lab: Lab) -> None:
    if lab.wants("stop"):
        running = Running("stop", "SIGSTOP, noticed by the daemon's stall rule", 95.0, lab.options.count(10))
        await lab.part(running, functools.partial(hang, lab))
