"""A sample of the points at which a daemon may die, with real ranks, on one deployment that serves all the while."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic.client import Answer, Tokens, Traffic, random_prompts
from healer.deployment import Deployment, eventually
from healer.journal import incident_entries, open_readonly
from tests.durable.points import COUNTING, Points
from tests.durable.scenarios import sample
from tests.e2e.harness import assert_same, members, send

VOCAB, REQUESTS, ANSWER = 512, 8, 48
ROOT = Path(__file__).parents[2]
BASE = [0, 1, 2, 3]


class CrashingDeployment(Deployment):
    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.page = self.root / "points"
        self.points = Points(self.page)

    def spawn(self, *, write: bool = True) -> "subprocess.Popen[bytes]":
        if write:
            self.write_policy()
        with (self.root / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "tests.durable.real_daemon", "run", "--policy", str(self.policy)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
                env=os.environ | {"CRASH_POINTS": str(self.page), "PYTHONPATH": str(ROOT)},
            )
        return self.daemon

    @property
    def dead(self) -> bool:
        return self.daemon is not None and self.daemon.poll() is not None


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashingDeployment]:
    folder = tmp_path_factory.mktemp("model") / "tiny-moe"
    command = [sys.executable, "-m", "elastic.tools.make_checkpoint", str(folder), "--layers", "2"]
    subprocess.run([*command, "--vocab", str(VOCAB)], check=True, capture_output=True)
    made = CrashingDeployment(folder)
    yield made
    made.end()


@pytest.mark.slow
async def test_a_daemon_that_dies_among_real_ranks_leaves_work_that_the_next_one_finishes(
    deployment: CrashingDeployment,
) -> None:
    await campaign(deployment, losses=4, growths=1, shrinks=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_daemon_may_die_at_forty_points_among_real_ranks(deployment: CrashingDeployment) -> None:
    await campaign(deployment, losses=26, growths=7, shrinks=7)


async def campaign(deployment: CrashingDeployment, losses: int, growths: int, shrinks: int) -> None:
    deployment.points.arm(0)
    if deployment.daemon is None:
        await deployment.start()
    prompts = random_prompts(REQUESTS, VOCAB, seed=5)
    want = [a.tokens for a in await fault_free(deployment, prompts)]
    reached = 0
    points = await count_loss(deployment, prompts, want)
    for at in sample(points - 6, losses, "losses"):
        reached += await with_note(at, lose(deployment, at, prompts, want), deployment)
    for grow, shrink in zip(sample(90, max(growths, 2), "up"), sample(60, max(shrinks, 2), "down"), strict=True):
        reached += await with_note(grow, scale(deployment, grow, [*BASE, 4], prompts, want), deployment)
        reached += await with_note(shrink, scale(deployment, shrink, BASE, prompts, want), deployment)
    assert reached >= 0.8 * (losses + growths + shrinks), f"only {reached} points were reached"


async def with_note(at: int, work: Any, deployment: CrashingDeployment) -> bool:
    try:
        return bool(await work)
    except BaseException as error:
        error.add_note(f"point {at}: {deployment.points.label}; {deployment.log()[-3000:]}")
        raise


async def fault_free(deployment: Deployment, prompts: list[Tokens]) -> list[Answer]:
    answers = await Traffic(deployment.gateway(), prompts, ANSWER).run()
    assert [a.error for a in answers] == [None] * len(prompts)
    return answers


async def count_loss(deployment: CrashingDeployment, prompts: list[Tokens], want: list[Tokens]) -> int:
    await lose(deployment, COUNTING, prompts, want)
    return deployment.points.count


async def lose(deployment: CrashingDeployment, at: int, prompts: list[Tokens], want: list[Tokens]) -> bool:
    old, slot = members(deployment), at % 4
    traffic = Traffic(deployment.gateway(), prompts, ANSWER)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(60)
        deployment.points.arm(at)
        send(deployment, [slot], signal.SIGKILL)
        died = await restarted(deployment, lambda: members(deployment).get(slot) not in (None, old[slot]))
    assert_same(traffic.answers, want)
    await whole(deployment, BASE, old, {slot})
    return died


async def scale(
    deployment: CrashingDeployment, at: int, slots: list[int], prompts: list[Tokens], want: list[Tokens]
) -> bool:
    old = members(deployment)
    traffic = Traffic(deployment.gateway(), prompts, ANSWER)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(60)
        deployment.points.arm(at)
        await ask(deployment, slots)
        died = await restarted(deployment, lambda: sorted(members(deployment)) == slots)
        if died:
            await deployment.settled()
            await ask(deployment, slots)
    assert_same(traffic.answers, want)
    await whole(deployment, slots, old, set(old) ^ set(slots))
    return died


async def ask(deployment: Deployment, slots: list[int]) -> None:
    """The daemon may die while it answers; who asked asks again. One that has just begun may say that it is not ready yet."""

    async def taken() -> bool | None:
        try:
            answer = await deployment.post("/scale", {"slots": slots})
        except httpx.HTTPError:
            return True
        if answer.status_code == httpx.codes.CONFLICT and "starting" in answer.text:
            return None
        assert answer.is_success, answer.text
        return True

    await eventually(taken, f"slots {slots} are asked for", 30)


async def restarted(deployment: CrashingDeployment, done: Any) -> bool:
    """Wait until the daemon has died, and start the next one; False where it has done its work and lives."""
    end = time.monotonic() + 60

    async def probe() -> bool | None:
        if deployment.dead:
            return True
        with contextlib.suppress(httpx.HTTPError, OSError, ValueError):
            status = await deployment.get("/status")
            if status["state"] == "ok" and done() and not status["group"]["sequence"]:
                return False
        return None

    died = await eventually(probe, "the daemon dies or is done", end - time.monotonic())
    deployment.points.disarm()
    if died or deployment.dead:
        deployment.spawn(write=False)
        return True
    return False


async def whole(deployment: CrashingDeployment, slots: list[int], old: dict[int, Any], touched: set[int]) -> None:
    async def settled() -> bool | None:
        status = await deployment.get("/status")
        return True if status["state"] == "ok" and status["group"]["live"] == slots else None

    await eventually(settled, f"slots {slots} serve", 60)
    now = members(deployment)
    assert sorted(now) == slots
    for slot in set(slots) - touched:
        assert now[slot] == old[slot], f"healthy slot {slot} was replaced"
    running = {p.pid for p in deployment.processes() if "elastic.rank" in p.cmdline()}
    assert running == {m.pid for m in now.values()}, "a process of nobody is left"
    assert sum("elastic.gateway" in p.cmdline() for p in deployment.processes()) == 1
    with contextlib.closing(open_readonly(deployment.run_dir / "journal.db")) as journal:
        entries = incident_entries(journal, 1000)
    said: dict[str, set[str]] = {}
    for entry in entries:
        said.setdefault(entry.incident, set()).add(str(entry.body.get("event")))
    assert all("incident-closed" in events for events in said.values()), said
