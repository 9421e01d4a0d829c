"""What the daemon's sensors make of real faults, and of what looks like faults, on one real GPU.

    python -m chaos.gpu_sensors --out docs/results

Two ranks share GPU 0 under traffic. In turn: nothing; a neighbour that takes nearly all GPU memory; one that keeps the GPU
busy; processes that start CUDA one after the other; a rank whose kernel writes to an illegal address; SIGKILL of a rank. The
first four must open no incident, the last two exactly one each, with XID 31 and the process's death as the cause. Also the
cost of the NVML sensor at the default rates. Writes gpu-sensors.json and the daemon's trace; exit code 1 if anything is
otherwise.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from chaos import inject
from chaos.machine import machine, versions
from elastic.client import Traffic, random_prompts
from healer.deployment import Deployment, eventually
from healer.interrupt import run_to_its_end

VOCAB, SECONDS = 1024, 10.0
MODEL = {"layers": 8, "experts": 8, "hidden": 2048, "expert-intermediate": 128, "heads": 16, "kv-heads": 4}
HOG = """
import time, torch
free = torch.cuda.mem_get_info()[0]
kept = torch.empty(int(free * 0.9), dtype=torch.uint8, device="cuda").fill_(1)
torch.cuda.synchronize(); print("ready", flush=True); time.sleep(60)
"""
BUSY = """
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16); print("ready", flush=True)
while True:
    for _ in range(20): b = a @ a
    torch.cuda.synchronize()
"""
STARTS = """
import subprocess, sys
print("ready", flush=True)
while True: subprocess.run([sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"], check=True)
"""


class Step(msgspec.Struct, frozen=True):
    name: str
    expected: str
    """The root cause of the one incident that it must open; empty: none may be opened."""
    incidents: tuple[dict[str, Any], ...]
    seconds: float
    detail: str

    @property
    def ok(self) -> bool:
        if not self.expected:
            return not self.incidents
        return len(self.incidents) == 1 and self.incidents[0]["causes"][:1] == [self.expected]


async def make_checkpoint(folder: Path) -> Path:
    sizes = MODEL | {"head-dim": 64, "vocab": VOCAB}
    arguments = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "elastic.tools.make_checkpoint", str(folder), *arguments]
    maker = await asyncio.create_subprocess_exec(*command)
    if await maker.wait():
        raise SystemExit("the checkpoint could not be made")
    return folder


@contextlib.asynccontextmanager
async def neighbour(code: str) -> AsyncIterator[None]:
    """A process that does this to the GPU, from its word "ready" to the end of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            if (await process.stdout.readline()).strip() != b"ready":
                raise SystemExit("the neighbour could not start")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class Run:
    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.steps: list[Step] = []

    async def step(self, name: str, expected: str, act: contextlib.AbstractAsyncContextManager[Any]) -> None:
        before, began = len(await self._incidents()), time.monotonic()
        running = asyncio.create_task(self._traffic())
        try:
            async with act:
                if expected:
                    await self._healed(before)
                else:
                    await asyncio.sleep(SECONDS)
        finally:
            running.cancel()
            await asyncio.wait([running])
        new = (await self._incidents())[before:]
        sentence = new[-1]["sentence"] if new else "no incident"
        self.steps.append(Step(name, expected, tuple(new), time.monotonic() - began, sentence))
        print(f"{'ok  ' if self.steps[-1].ok else 'FAIL'} {name}: {[i['causes'] for i in new]} {sentence}", flush=True)

    async def _traffic(self) -> None:
        prompts = random_prompts(8, VOCAB, seed=3)
        while True:
            await Traffic(self._deployment.gateway(), prompts, 64).run()

    async def _incidents(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._deployment.get("/incidents")
        return found

    async def _healed(self, before: int) -> None:
        async def closed() -> bool | None:
            found = (await self._incidents())[before:]
            return True if found and all(i["closed_wall"] is not None for i in found) else None

        await eventually(closed, "the incident is closed", 120)
        # the driver's word on an XID comes later than the death of the process
        await asyncio.sleep(3)


@contextlib.asynccontextmanager
async def fault(deployment: Deployment, name: inject.FaultName, slot: int) -> AsyncIterator[None]:
    await asyncio.sleep(1)
    inject.within(name, deployment.run_dir, [slot])
    yield


@contextlib.asynccontextmanager
async def kill(deployment: Deployment, slot: int) -> AsyncIterator[None]:
    await asyncio.sleep(1)
    inject.kill(deployment.run_dir, [slot])
    yield


async def nvml_cost(deployment: Deployment, seconds: float) -> dict[str, Any]:
    """CPU of the NVML sensor, child process included, as a share of a core."""

    async def reading() -> dict[str, Any]:
        status = await deployment.get("/status")
        return next(s for s in status["sensors"] if s["name"] == "nvml")

    before, began = await reading(), time.monotonic()
    await asyncio.sleep(seconds)
    after, took = await reading(), time.monotonic() - began
    spent = after["cost"]["cpu_s"] - before["cost"]["cpu_s"]
    return {
        "state": after["state"],
        "why": after["why"],
        "readings_per_s": (after["readings"] - before["readings"]) / took,
        "core_share": spent / took,
        "mean_s": after["cost"]["mean_s"],
        "max_s": after["cost"]["max_s"],
    }


async def run(options: argparse.Namespace) -> int:
    work = Path(tempfile.mkdtemp(prefix="gpu-sensors-"))
    deployment = Deployment(
        await make_checkpoint(work / "moe"),
        target={
            "ranks": 2,
            "maxRanks": 2,
            "epBackend": "nixl-ep",
            "gpus": [0],
            "faultInjection": True,
            "hostTier": False,
        },
        spec={"healing": {"deadlines": {"prepare": "120s"}}},
    )
    try:
        deployment.spawn("--record", str(options.out / "gpu-sensors-trace.jsonl"))
        await deployment.settled(180)
        cost = await nvml_cost(deployment, SECONDS)
        print(f"nvml: {cost}", flush=True)
        found = Run(deployment)
        await found.step("nothing happens", "", contextlib.AsyncExitStack())
        await found.step("a neighbour takes the GPU's memory", "", neighbour(HOG))
        await found.step("a neighbour keeps the GPU busy", "", neighbour(BUSY))
        await found.step("processes start CUDA one after the other", "", neighbour(STARTS))
        await found.step("an illegal address in a kernel of a rank", "xid", fault(deployment, "illegal-address", 1))
        await found.step("SIGKILL of a rank", "process-death", kill(deployment, 0))
        gpus = (await deployment.get("/status"))["gpus"]
        await deployment.stop()
    finally:
        (options.out / "gpu-sensors-daemon.log").write_text(deployment.log())
        deployment.end()
    results = {
        "machine": machine(),
        "versions": versions(),
        "nvml": cost,
        "steps": found.steps,
        "ok": [step.ok for step in found.steps],
        "gpus_at_the_end": gpus,
    }
    path = options.out / "gpu-sensors.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    return 0 if all(step.ok for step in found.steps) else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.gpu_sensors", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return run_to_its_end(run(options))


if __name__ == "__main__":
    sys.exit(main())
