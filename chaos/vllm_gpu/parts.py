"""The parts of the scenario: what is done, and what is waited for. Each leaves a group of two that serves."""

import asyncio
import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from chaos.vllm_gpu.faults import met, transient
from chaos.vllm_gpu.load import Load, LoadReport, reference
from chaos.vllm_gpu.records import Boot, Sequence
from chaos.vllm_gpu.scene import Scene
from elastic.errors import ElasticError
from healer.targets.vllm.endpoints import Endpoints

SETTLE_S = 2.0
"""Of load before an event, and after it is over."""
CLIENT_S = 400.0
VICTIM = 1
MET_S = 75.0
"""For a rank to meet the fault once the other goes on: it too waits for NIXL EP's timeout."""


@dataclass
class Running:
    """A part at work: what it has so far is what is written, however it ends."""

    scene: Scene
    began: float = field(default_factory=time.monotonic)
    event_at: float = 0.0
    """Monotonic; 0: not made yet."""
    load_began: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    load: LoadReport | None = None
    boots: tuple[Boot, ...] = ()
    problems: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def under_load(
        self, base: Callable[[int], str] | None = None, *, finish: bool = True, deadline_s: float = CLIENT_S
    ) -> AsyncIterator[Load]:
        """Clients at the router, or where `base` says; what they saw is kept even where the part fails."""
        scene = self.scene
        if not scene.want:
            raise ElasticError("no fault-free answers to compare with: the part `start` comes first")
        router = await scene.router() if base is None else ""
        load = Load(
            base or (lambda _: router), scene.prompts, scene.want, streams=scene.profile.streams, deadline_s=deadline_s
        )
        self.load_began = time.monotonic()
        try:
            async with load.running(finish=finish):
                await asyncio.sleep(SETTLE_S)
                yield load
                await asyncio.sleep(SETTLE_S)
        finally:
            self.load = load.report()

    def event(self) -> float:
        self.event_at = time.monotonic()
        return self.event_at

    def since_event(self, moment: float) -> float:
        return moment - self.event_at

    def sequences(self) -> tuple[Sequence, ...]:
        with contextlib.suppress(ElasticError, sqlite3.Error):
            return self.scene.sequences(self.began, self.event_at or self.began)
        return ()

    def must_be_flawless(self) -> None:
        if self.load is not None and (self.load.errors or self.load.wrong):
            self.problems.append(f"{self.load.errors} errors and {self.load.wrong} wrong answers at the clients")


Work = Callable[[Running], Awaitable[None]]


async def start(run: Running) -> None:
    """From nothing to two ranks that serve; the fault-free answers, and a load without a fault."""
    scene, profile = run.scene, run.scene.profile
    run.figures["model_s"] = await scene.write_model()
    run.event()
    await scene.deployment.start(profile.start_s + 60.0)
    began = time.monotonic()
    run.figures["ready_s"] = run.since_event(began)
    run.boots = await scene.boots(began)
    scene.want = await reference(await scene.router(), scene.prompts, profile.tokens, deadline_s=60.0)
    run.figures["reference_s"] = time.monotonic() - began
    run.figures["distinct_answers"] = len({tuple(answer) for answer in scene.want})
    async with run.under_load() as load:
        await load.answered(2 * len(scene.prompts), 60.0)
    run.must_be_flawless()


async def _scaled(run: Running, ranks: int) -> None:
    before = await run.scene.incarnations()
    async with run.under_load() as load:
        run.event()
        await run.scene.scale(ranks)
        done = await run.scene.until(
            lambda s: len(s["group"]["live"]) == ranks, f"{ranks} ranks", run.scene.profile.start_s
        )
        run.figures["scaled_s"] = run.since_event(done)
        await load.answered(len(run.scene.prompts), 60.0)
    now = await run.scene.incarnations()
    if changed := [slot for slot in before.keys() & now.keys() if before[slot] != now[slot]]:
        run.problems.append(f"slots {changed} were restarted")
    run.boots = await run.scene.boots(done, tuple(sorted(now.keys() - before.keys())))
    run.must_be_flawless()


async def grow(run: Running) -> None:
    """Two ranks to three under load."""
    await _scaled(run, 3)


async def shrink(run: Running) -> None:
    """Three ranks to two under load."""
    await _scaled(run, 2)


async def kill(run: Running) -> None:
    """SIGKILL of a rank's engine and workers under load: the group is restarted."""
    scene = run.scene
    before = await scene.incarnations()
    async with run.under_load() as load:
        pids = await scene.engines(VICTIM)
        run.event()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        done = await scene.until_anew(before, scene.profile.start_s + 30.0)
        run.figures |= {"killed": len(pids), "healed_s": run.since_event(done)}
        await load.answered(len(scene.prompts), 60.0)
    run.boots = await scene.boots(done)
    run.must_be_flawless()


async def retry(run: Running) -> None:
    """A rank stands still for longer than its peer waits for it, and goes on: all are told to retry."""
    scene = run.scene
    before, pids = await scene.incarnations(), {slot: await scene.engines(slot) for slot in (0, 1)}
    async with run.under_load() as load:
        run.event()
        run.figures |= await transient(scene.profile, pids[VICTIM], 0)
        run.figures["resumed_s"] = run.since_event(time.monotonic())
        served = load.right + 2 * scene.profile.streams
        faulty = await met([scene.url(0), scene.url(1)], lambda: load.right >= served, MET_S)
        if faulty or await scene.incarnations() != before:
            run.figures["met_s"] = run.since_event(time.monotonic())
            limit_s = 2 * scene.profile.settle_s + scene.profile.start_s
            run.figures["healed_s"] = run.since_event(await scene.until_anew(before, limit_s))
        else:
            run.problems.append("no engine met a fault: nothing to retry")
        await load.answered(len(scene.prompts), 60.0)
    if {slot: await scene.engines(slot) for slot in (0, 1)} != pids:
        run.problems.append("the engines were restarted")
    run.must_be_flawless()


async def stock(run: Running) -> None:
    """The same kill without healer: its daemon is gone, clients ask the ranks' own servers, half of them each. Watches for
    a while; what ends it is a start by hand, which takes what the part `start` took."""
    scene = run.scene
    pids, members = await scene.engines(VICTIM), await scene.members()
    scene.deployment.kill_daemon()
    async with run.under_load(lambda number: scene.url(number % 2), finish=False, deadline_s=30.0) as load:
        run.event()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.5)  # what was on its way is judged
        served, said, watched_s = load.right, dict[str, float](), scene.profile.stock_s
        while run.since_event(time.monotonic()) < watched_s:
            for word in await _says(scene, members):
                said.setdefault(word, round(run.since_event(time.monotonic()), 2))
            await asyncio.sleep(0.5)
        run.figures |= {"watched_s": watched_s, "served_after_half_a_second": load.right - served, "first_seen_s": said}


async def _says(scene: Scene, members: dict[int, dict[str, Any]]) -> list[str]:
    """What the servers say of themselves now."""
    found = []
    for slot, member in sorted(members.items()):
        if not psutil.pid_exists(member["pid"]) or psutil.Process(member["pid"]).status() == psutil.STATUS_ZOMBIE:
            found.append(f"slot {slot}: its server has ended")
            continue
        server = Endpoints(scene.url(slot))
        try:
            healthy = await server.health(deadline_s=2.0)
            found.append(f"slot {slot}: /health {200 if healthy else 503}")
            status = await server.fault_status(deadline_s=2.0)
            found += [f"slot {slot}: {engine.status}" for engine in status.engines] if status else []
        except ElasticError as error:
            found.append(f"slot {slot}: {type(error).__name__}")
        finally:
            await server.aclose()
    return found


PARTS: dict[str, tuple[str, Work]] = {
    "start": ("two ranks from nothing", start),
    "grow": ("2 to 3 ranks under load", grow),
    "shrink": ("3 to 2 ranks under load", shrink),
    "kill": ("SIGKILL of a rank's engine under load", kill),
    "retry": ("a rank stands still beyond NIXL EP's timeout, and goes on", retry),
    "stock": ("SIGKILL of a rank's engine under load, without healer", stock),
}
"""In their order: vLLM cannot retry once it has scaled, so `retry` follows the restart."""
