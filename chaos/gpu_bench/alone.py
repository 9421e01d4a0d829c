"""The parts that need no group: capturing again, what the agent costs, witnesses of a death, the ceiling of copies."""

import asyncio
import contextlib
import functools
import os
import select
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from chaos.gpu_bench.lab import FULL_TOKENS, Lab, Running, describe, forget
from elastic import lifeline, process
from elastic.channel import Channel
from elastic.config import GroupConfig
from elastic.errors import ElasticError
from elastic.paths import config_path, socket_path, write_json
from elastic.protocol import Hello, encode

ANSWER_S = 120.0
NOTICE_S = 2.0
"""A witness that has not spoken by then is given up."""
POLL_S = 0.0002
VICTIMS_AT_ONCE = 4
BLOCKS = 6
"""Pairs of blocks without and with the agent."""


class Solo:
    """One `chaos.gpu_bench.solo` process."""

    def __init__(self, running: asyncio.subprocess.Process, errors: Path) -> None:
        self._process, self._errors = running, errors

    async def line(self) -> dict[str, Any]:
        """The next line of JSON that it says; others are NIXL's. Raises ElasticError with its last words."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                while line := await self._process.stdout.readline():
                    if line.startswith(b"{"):
                        found: dict[str, Any] = msgspec.json.decode(line)
                        return found
        except TimeoutError:
            raise ElasticError(f"no answer within {ANSWER_S:g} s") from None
        raise ElasticError(f"it ended: {self._errors.read_text()[-500:].strip()}")


@contextlib.asynccontextmanager
async def solo(mode: str, config: GroupConfig, *arguments: str, gpu: int = 0) -> AsyncIterator[Solo]:
    config = msgspec.structs.replace(config, gpus=(gpu,))
    config.root.mkdir(parents=True, exist_ok=True)
    write_json(config_path(config.root), config)
    errors = config.root / "solo.log"
    with errors.open("wb") as log:
        running = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "chaos.gpu_bench.solo", mode, config.run_dir, *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    try:
        yield Solo(running, errors)
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()
        forget(config)


async def recapture(lab: Lab, running: Running) -> None:
    """Warming up and capturing the same sizes, on one GPU."""
    config = lab.group(await lab.checkpoint("narrow"), max_tokens=FULL_TOKENS)
    running.config = describe(config, lab.model("narrow"))
    async with solo("recapture", config) as one:
        running.figures["narrow"] = await one.line()


async def agent(lab: Lab, running: Running) -> None:
    """Decode steps of one rank with and without its agent, in turn."""
    config = lab.group(await lab.checkpoint("narrow"), max_model_len=1024)
    running.config = describe(config, lab.model("narrow"))
    async with solo("agent", config, "--blocks", str(BLOCKS)) as one:
        blocks: list[dict[str, Any]] = []
        while len(blocks) < 2 * BLOCKS:
            said = await one.line()
            if "agent" in said:
                blocks.append(said)
                if len(blocks) % 2 == 0:
                    running.figures |= overhead(blocks)
                continue
            async with _controller(config):
                # until the block is over
                await one.line()


def overhead(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """From blocks with and without the agent, in turn: each pair gives one ratio; their median is the overhead, half of
    the distance between their quartiles is its noise."""
    pairs = list(zip(blocks[::2], blocks[1::2], strict=True))
    found: dict[str, Any] = {"blocks": blocks}
    for name in ("round_s", "step_s"):
        ratios = [100 * (with_[name] / without[name] - 1) for without, with_ in pairs]
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        found[name] = {
            "without_agent_s": statistics.median(without[name] for without, _ in pairs),
            "with_agent_s": statistics.median(with_[name] for _, with_ in pairs),
            "overhead_percent": statistics.median(ratios),
            "noise_percent": (quartiles[2] - quartiles[0]) / 2,
        }
    return found


@contextlib.asynccontextmanager
async def _controller(config: GroupConfig) -> AsyncIterator[None]:
    """Be connected as a controller is, and take what comes."""
    hello = Hello(role="controller", group=config.name)
    channel = await Channel.open(socket_path(config.root, 0, 1), hello, "solo", deadline_s=5.0)
    channel.start()
    try:
        yield
    finally:
        await channel.aclose()


async def copy(lab: Lab, running: Running) -> None:
    """What a loaded expert cannot be faster than."""
    config = lab.group(await lab.checkpoint("short"))
    running.config = {"within": "memory"} if lab.options.cpu else {"from": "pinned host memory", "to": "GPU 0"}
    async with solo("copy", config) as one:
        said = await one.line()
    running.figures |= said | {"ceiling_bytes_per_s": max(said["bytes_per_s"])}


async def witnesses(lab: Lab, running: Running) -> None:
    """SIGKILL to the moment at which each witness says so, side by side, of ranks that step."""
    checkpoint = await lab.checkpoint("narrow")
    seen: list[dict[str, float]] = []
    running.figures["notices_s"] = seen
    while len(seen) < running.wanted and not running.spent:
        async with contextlib.AsyncExitStack() as stack:
            count = min(VICTIMS_AT_ONCE, running.wanted - len(seen))
            gpus = 1 if lab.options.cpu else max(1, len(lab.results.gpus))
            configs = [lab.group(checkpoint) for _ in range(count)]
            running.config = describe(configs[0], lab.model("narrow"))
            victims = [
                await stack.enter_async_context(solo("serve", config, gpu=number % gpus))
                for number, config in enumerate(configs)
            ]
            for facts in [await victim.line() for victim in victims]:
                await asyncio.sleep(0.3)
                seen.append(await asyncio.to_thread(_notices, facts))


def _notices(facts: dict[str, Any]) -> dict[str, float]:
    """Kill one process; seconds until each of lifeline, socket, pidfd and /proc says that it is gone."""
    pid, start = facts["pid"], facts["pid_start"]
    at: dict[str, float] = {}
    all_seen = threading.Event()
    lock = threading.Lock()

    def notice(name: str) -> None:
        now = time.monotonic()
        with lock:
            at.setdefault(name, now)
            if len(at) == 4:
                all_seen.set()

    def hang_up() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(facts["address"])
            connection.sendall(encode(Hello(role="controller", group="bench")))
            connected.set()
            with contextlib.suppress(OSError):
                while connection.recv(65536):
                    pass
            notice("socket")

    def poll_pidfd() -> None:
        fd = os.pidfd_open(pid)
        waiter = select.poll()
        waiter.register(fd, select.POLLIN)
        waiter.poll()
        os.close(fd)
        notice("pidfd")

    def poll_proc() -> None:
        while process.is_alive(pid, start):
            time.sleep(POLL_S)
        notice("proc")

    connected = threading.Event()
    watchers: tuple[Callable[[], None], ...] = (hang_up, poll_pidfd, poll_proc)
    threads = [threading.Thread(target=watcher, daemon=True) for watcher in watchers]
    if not lifeline.watch(facts["lifeline"], lambda: notice("lifeline")):
        raise ElasticError("the lifeline cannot be watched here")
    for thread in threads:
        thread.start()
    connected.wait(NOTICE_S)
    time.sleep(0.25)
    sent = time.monotonic()
    process.send_signal(pid, start, signal.SIGKILL)
    all_seen.wait(NOTICE_S)
    with lock:
        return {name: moment - sent for name, moment in sorted(at.items())}


PLANS: dict[str, tuple[str, float, int, Callable[[Lab, Running], Awaitable[None]]]] = {
    "copy": ("Ceiling of copies from host memory", 15.0, 1, copy),
    "recapture": ("Baseline: graphs captured again", 40.0, 1, recapture),
    "agent": ("Decode steps with and without the agent", 50.0, 1, agent),
    "witnesses": ("SIGKILL to the notice of each witness", 35.0, 8, witnesses),
}


async def run_alone(lab: Lab, *names: str) -> None:
    for name in names:
        title, budget_s, samples, work = PLANS[name]
        if lab.wants(name):
            running = Running(name, title, budget_s, lab.options.count(samples))
            await lab.part(running, functools.partial(work, lab))
