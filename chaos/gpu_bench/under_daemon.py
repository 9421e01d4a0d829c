"""Faults of a group that the daemon heals, its journal on: SIGKILL, and SIGSTOP noticed by its own rule (a rank that beats
no more while its peers wait for it)."""

import asyncio
import functools
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
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
from healer.deployment import Deployment, eventually

DEADLINE_S = 120.0
QUIET_S = 0.3
"""After a fault nobody asks the daemon anything: a survivor's first step does not wait for a status page."""
RULES = (
    {"name": "dead", "match": {"cause": ["process-death", "agent-lost", "executor"]}, "backoff": "100ms"},
    {"name": "hung", "match": {"cause": ["stopped", "hang", "stuck", "silent"]}, "backoff": "100ms"},
)
"""Faults on purpose, one after the other: no slot rests in between."""
PROBATION = {"repeated": 1000}
"""Nor has a slot a history, for which each rank that starts there would prove its device first: 3.6 s on an H200."""
STALL_AFTER_S = 1.0


Inject = Callable[[Path, Iterable[int]], tuple[inject.Injection, ...]]
PARTS: tuple[tuple[str, str, float, int, str, Inject], ...] = (
    ("daemon", "SIGKILL, healed by the daemon with its journal on", 50.0, 15, "kill", inject.kill),
    ("stop", "SIGSTOP, noticed by the daemon's stall rule", 60.0, 10, "stop", inject.stop),
)
"""Name, title, budget, samples, and the fault."""


async def run_under_daemon(lab: Lab) -> None:
    """Both parts, one after the other, on one group. The clients' answers are known when it ends."""
    plans = [
        (Running(name, title, budget_s, lab.options.count(samples)), what, hurt)
        for name, title, budget_s, samples, what, hurt in PARTS
        if lab.wants(name)
    ]
    if not plans:
        return
    deployment, clients, began = None, None, ""
    try:
        try:
            sizes = lab.model("narrow")
            target = {
                **{"ranks": 2, "maxRanks": 2, "slotsPerRank": 8, "redundantExperts": 8, "hostTier": False},
                "epBackend": "shm" if lab.options.cpu else "nixl-ep",
                "spares": 2 if lab.options.cpu else sum(wanted.wanted for wanted, _, _ in plans) + 1,
                "pinCores": lab.options.pin_cores,
            }
            deployment = Deployment(
                await lab.checkpoint("narrow"),
                target=target,
                detection={"stallAfter": f"{STALL_AFTER_S:g}s"},
                spec={
                    "healing": {
                        "rules": [rule | {"actions": ["replace"], "maxAttempts": 100} for rule in RULES],
                        "probation": PROBATION,
                    }
                },
            )
            described = target | {"stallAfter": STALL_AFTER_S, "model": sizes.name, "moe_layers": sizes.layers}
            for running, _, _ in plans:
                running.config = described
            await deployment.start(min(DEADLINE_S, max(1.0, lab.left_s)))
            await eventually(functools.partial(_spares_ready, deployment), "all spares stand by", DEADLINE_S)
            prompts = random_prompts(REQUESTS, VOCAB, lab.options.seed)
            clients = await Clients.start(Order(deployment.gateway(), prompts, TOKENS))
        except Exception as error:
            began = f"the group could not be formed: {type(error).__name__}: {error}"
        for running, what, hurt in plans:
            if began or deployment is None:
                lab.add(running.record(began))
                continue
            await lab.part(running, functools.partial(_watched, deployment, what=what, hurt=hurt))
        if clients is not None:
            told = await clients.stop()
            for running, _, _ in plans:
                lab.judge(running.name, with_answers(running.samples, told), ())
    finally:
        if clients is not None:
            await clients.kill()
        if deployment is not None:
            await asyncio.to_thread(deployment.end)


async def _watched(deployment: Deployment, running: Running, *, what: str, hurt: Inject) -> None:
    await deployment.watched(_faults(deployment, running, what, hurt))


async def _faults(deployment: Deployment, running: Running, what: str, hurt: Inject) -> None:
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
        (fault,) = hurt(deployment.run_dir, [slot])
        await asyncio.sleep(QUIET_S)
        healing = await drill.healed(deployment, known, fault.sent, DEADLINE_S, lambda _: None)
        await deployment.settled(DEADLINE_S)
        await asyncio.sleep(AFTER_S)
        after = await ranks.look_at_all("local", others, fault.sent - BEFORE_S)
        reports = await _reports(deployment, healing.incident)
        sample = sample_of(what, (slot,), fault.sent, reports, before, after)
        # the sequence begins at the decision; what counts is the verdict's evidence
        running.samples.append(msgspec.structs.replace(sample, seen_s=healing.detect_s))


async def _spares_ready(deployment: Deployment) -> bool | None:
    spares = (await deployment.get("/status"))["group"]["spares"]
    return True if spares and all(spare["state"] in ("ready", "given-up") for spare in spares) else None


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
