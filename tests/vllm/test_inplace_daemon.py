"""`healer run` over vLLM 0.33's own servers with the plugin: ranks are killed under load, the others go on in the same processes,
the slots are filled again, and no client gets an error or a wrong token."""

import asyncio
import json
import os
import time
from contextlib import AbstractContextManager
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


def group(folder: Path) -> AbstractContextManager[Deployment]:
    """Three ranks with the plugin."""
    return deployed(
        folder,
        ranks=3,
        worker="vllm_in_place_worker.InPlaceStubWorker",
        path=(distribution(folder / "site"), ROOT, PLUGINS / "in_place_worker", STUB),
        threads=1,
    )


async def test_a_group_goes_on_without_any_rank_and_gets_it_back_and_no_client_sees_it(tmp_path: Path) -> None:
    with group(tmp_path) as found:
        router = json.loads((tmp_path / "run/router.json").read_text())["http"]
        async with Clients(router).running() as clients:
            for slot in (1, 0):
                rest = [each for each in (0, 1, 2) if each != slot]

                def alone(status: dict[str, Any], rest: list[int] = rest) -> bool:
                    return bool(status["group"]["live"] == rest)

                before, pids = found.incarnations(), [found.pid(each, Part.ENGINE) for each in rest]
                await asyncio.sleep(2.0)
                began, answered = time.monotonic(), clients.right
                found.kill(slot, Part.ENGINE)
                await asyncio.to_thread(found.until, alone, 120.0)
                while clients.right < answered + 8:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                print(f"slot {slot}: 8 answers more {time.monotonic() - began:.2f} s after the signal")
                await asyncio.to_thread(found.healthy, 3)
                print(f"slot {slot}: filled after {time.monotonic() - began:.1f} s")
                after = found.incarnations()
                assert [after[each] for each in rest] == [before[each] for each in rest]
                assert after[slot] == before[slot] + 1
                assert [found.pid(each, Part.ENGINE) for each in rest] == pids
        assert clients.right > 20
        assert (clients.wrong, clients.errors) == ([], [])
        print(f"longest wait of a client {clients.longest_s:.2f} s")
