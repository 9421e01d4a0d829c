"""Where the weights of a lost rank come from."""

import asyncio
import signal
from pathlib import Path
from typing import Any

from elastic.client import Tokens, Traffic
from healer.deployment import Deployment, eventually
from tests.e2e.harness import assert_same, members, send

LAYERS, EXPERTS = 4, 16


async def heal(deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]) -> dict[str, dict[str, Any]]:
    """Kill slot 1 under traffic; returns the reports of the incident's sequences by kind."""
    await deployment.start()
    traffic = Traffic(deployment.gateway(), prompts, 64)
    processes = members(deployment)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(200)
        send(deployment, [1], signal.SIGKILL)
    assert_same(traffic.answers, expected)

    async def healed() -> dict[str, Any] | None:
        history = await deployment.get("/incidents")
        closed = history and history[0]["outcome"] == "healed" and members(deployment)[1] != processes[1]
        return history[0] if closed else None

    incident = await eventually(healed, "the incident is closed", 60)
    entries = (await deployment.get(f"/incidents/{incident['id']}"))["entries"]
    reports = [e["body"]["report"] for e in entries if "report" in e["body"]]
    return {r["kind"]: r for r in reports}


def moved(report: dict[str, Any], source: str) -> int:
    return sum(loaded[source]["tensors"] for loaded in report["loaded"].values())


async def test_without_redundancy_all_lost_experts_come_from_host_memory(
    checkpoint: Path, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    deployment = Deployment(checkpoint, target={"redundantExperts": 0})
    try:
        reports = await heal(deployment, prompts, expected)
    finally:
        deployment.end()
    assert moved(reports["loss"], "host") == LAYERS * EXPERTS // 4
    assert moved(reports["loss"], "peer") == moved(reports["loss"], "disk") == 0


async def test_with_the_redundancy_of_one_rank_most_weights_come_from_peers(
    checkpoint: Path, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    deployment = Deployment(checkpoint, target={"redundantExperts": 8})
    try:
        reports = await heal(deployment, prompts, expected)
    finally:
        deployment.end()
    host = moved(reports["loss"], "host") + moved(reports["join"], "host")
    peers = moved(reports["loss"], "peer") + moved(reports["join"], "peer")
    # only experts that no survivor holds need another source
    assert 0 < host <= LAYERS * EXPERTS // 8
    assert peers > 3 * host


async def test_with_two_copies_of_each_expert_a_loss_moves_no_bytes(
    checkpoint: Path, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    deployment = Deployment(checkpoint, target={"redundantExperts": 16})
    try:
        reports = await heal(deployment, prompts, expected)
        group = (await deployment.get("/status"))["group"]
        assert group["losses_without_load"] == 1, "and of the healed group one more rank may go"
    finally:
        deployment.end()
    assert reports["loss"]["loaded"] == {}


async def test_without_host_memory_tier_the_checkpoint_on_disk_serves(
    checkpoint: Path, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    deployment = Deployment(checkpoint, target={"redundantExperts": 0, "hostTier": False})
    try:
        reports = await heal(deployment, prompts, expected)
    finally:
        deployment.end()
    assert moved(reports["loss"], "disk") == LAYERS * EXPERTS // 4
    assert moved(reports["loss"], "host") == 0
