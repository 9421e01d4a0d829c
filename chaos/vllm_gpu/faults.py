"""A fault that passes: the engine of one rank stands still for longer than its peers wait for it, and goes on.

On GPUs it must stand still where its peer waits in the exchange, on the GPU, which gives up after 30 s; one that stands before
that is waited for on the CPU, for half an hour and without a fault. What the peer's GPU does tells which it is.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from chaos.vllm_gpu.profile import Profile
from elastic.errors import ElasticError
from healer.targets.vllm.endpoints import Endpoints

LOOK_S = 1.5
"""The driver's figure of a GPU's use is up to a second old."""
BUSY_PERCENT = 60
TRIES = 20
ARRIVE_S = 30.0


@contextlib.asynccontextmanager
async def _stopped(pids: Sequence[int]) -> AsyncIterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def transient(profile: Profile, pids: Sequence[int], peer_gpu: int) -> dict[str, Any]:
    """Make the fault; returns how. Raises ElasticError where it cannot be made."""
    return await (_injected(profile, pids) if profile.faults else _exchange(profile, pids, peer_gpu))


async def _injected(profile: Profile, pids: Sequence[int]) -> dict[str, Any]:
    """With stub workers, which exchange nothing: a stop, and then the exception of a failed exchange in every rank."""
    assert profile.faults is not None
    began = time.monotonic()
    async with _stopped(pids):
        await asyncio.sleep(profile.stop_s)
    took = time.monotonic() - began
    armed = profile.faults / "raise_step_together"
    for arrived in profile.faults.glob("arrived_*"):
        arrived.unlink()
    armed.touch()
    until = time.monotonic() + ARRIVE_S
    try:
        while not all((profile.faults / f"arrived_{rank}").exists() for rank in (0, 1)):
            if time.monotonic() > until:
                raise ElasticError("the stub workers did not take the fault")
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # for all to see that all have come
    finally:
        armed.unlink()
    return {"stopped_s": took, "tries": 1}


async def _exchange(profile: Profile, pids: Sequence[int], peer_gpu: int) -> dict[str, Any]:
    import pynvml

    draw = random.Random(1)
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(peer_gpu)
        for number in range(1, TRIES + 1):
            began = time.monotonic()
            async with _stopped(pids):
                await asyncio.sleep(LOOK_S)
                used = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
                if used >= BUSY_PERCENT:
                    await asyncio.sleep(began + profile.stop_s - time.monotonic())
                    return {"stopped_s": time.monotonic() - began, "tries": number, "peer_gpu_percent": used}
            await asyncio.sleep(0.3 + draw.random() / 5)
    finally:
        pynvml.nvmlShutdown()
    raise ElasticError(f"the engine was stopped {TRIES} times, and its peer never waited in the exchange")


async def met(urls: Sequence[str], over: Callable[[], bool], deadline_s: float) -> bool:
    """Whether an engine says that it met a fault, before `over` is true or the deadline has passed."""
    servers, until = [Endpoints(url) for url in urls], time.monotonic() + deadline_s
    try:
        while time.monotonic() < until and not over():
            for server in servers:
                with contextlib.suppress(ElasticError):
                    found = await server.fault_status(deadline_s=2.0)
                    if found is not None and any(engine.status == "unhealthy" for engine in found.engines):
                        return True
            await asyncio.sleep(0.1)
        return False
    finally:
        for server in servers:
            await server.aclose()
