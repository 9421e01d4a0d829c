"""The daemon may die at any time: serving goes on, and the next daemon takes the running group over."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from elastic.client import Tokens, Traffic
from elastic.paths import state_path
from healer.deployment import Deployment, eventually
from tests.e2e.harness import assert_same, members, send

ANSWER = 64
SLOW = pytest.mark.slow


async def test_serving_goes_on_without_the_daemon_and_the_next_one_restarts_nothing(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    processes, gateway = members(deployment), deployment.gateway()
    traffic = Traffic(gateway, prompts, ANSWER)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(100)
        deployment.kill_daemon()
        await traffic.reached(600)
        deployment.spawn()
    assert_same(traffic.answers, expected)
    await deployment.settled()
    assert members(deployment) == processes
    assert deployment.gateway() == gateway
    # and it heals as before
    send(deployment, [2], signal.SIGKILL)
    assert_same(await Traffic(gateway, prompts, ANSWER).run(), expected)
    await deployment.settled()


async def test_a_rank_that_dies_while_no_daemon_watches_is_healed_by_the_next_daemon(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    processes = members(deployment)
    traffic = Traffic(deployment.gateway(), prompts, ANSWER)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(100)
        deployment.kill_daemon()
        send(deployment, [0], signal.SIGKILL)
        deployment.spawn()
    assert_same(traffic.answers, expected)
    await deployment.settled()
    now = members(deployment)
    assert now[0] != processes[0]
    assert {s: now[s] for s in (1, 2, 3)} == {s: processes[s] for s in (1, 2, 3)}


async def test_the_daemon_all_ranks_and_the_state_file_are_lost_and_every_request_ends(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    processes = members(deployment)
    send(deployment, processes, signal.SIGKILL)

    async def second_incarnations() -> bool | None:
        now = members(deployment)
        return True if all(slot in now and now[slot] != old for slot, old in processes.items()) else None

    await eventually(second_incarnations, "every slot has a new process", 30)
    await deployment.settled()
    traffic = Traffic(deployment.gateway(), prompts, ANSWER)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(100)
        deployment.kill_daemon()
        send(deployment, processes, signal.SIGKILL)
        state_path(deployment.run_dir).unlink()
        deployment.spawn()
    assert_same(traffic.answers, expected)
    await deployment.settled()


@pytest.mark.parametrize(
    "delay_s",
    [
        0.0,
        pytest.param(0.002, marks=SLOW),
        pytest.param(0.005, marks=SLOW),
        pytest.param(0.01, marks=SLOW),
        pytest.param(0.02, marks=SLOW),
        0.05,
    ],
)
async def test_a_daemon_that_dies_in_the_middle_of_healing_is_finished_by_the_next(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens], delay_s: float
) -> None:
    """The delays fall before, into and behind the loss sequence, which takes about 20 ms; wherever the daemon dies, the
    outcome is the same."""
    await deployment.start()
    processes = members(deployment)
    traffic = Traffic(deployment.gateway(), prompts, ANSWER)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(100)
        send(deployment, [1], signal.SIGKILL)
        await asyncio.sleep(delay_s)
        deployment.kill_daemon()
        deployment.spawn()
    assert_same(traffic.answers, expected)
    await deployment.settled()
    now = members(deployment)
    assert now[1] != processes[1]
    assert {s: now[s] for s in (0, 2, 3)} == {s: processes[s] for s in (0, 2, 3)}


async def test_a_daemon_that_dies_while_a_replacement_boots(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    processes = members(deployment)
    send(deployment, [3], signal.SIGKILL)

    async def boots() -> bool | None:
        now = members(deployment)
        return True if 3 in now and now[3] != processes[3] else None

    await eventually(boots, "the replacement has a process", 30)
    deployment.kill_daemon()
    deployment.spawn()
    await deployment.settled()
    assert_same(await Traffic(deployment.gateway(), prompts, ANSWER).run(), expected)
    running = [p for p in deployment.processes() if "elastic.rank" in p.cmdline()]
    assert len(running) == 4, "an orphan of the first boot is left"


async def test_a_second_daemon_is_refused_and_changes_nothing(deployment: Deployment) -> None:
    await deployment.start()
    processes, first = members(deployment), deployment.daemon
    second = deployment.spawn()
    assert await asyncio.to_thread(second.wait, 30) == 1
    deployment.daemon = first
    assert "another" in deployment.log()
    await deployment.settled()
    assert members(deployment) == processes


async def test_the_daemon_ends_on_sigterm_and_leaves_serving_alone(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    processes = members(deployment)
    traffic = Traffic(deployment.gateway(), prompts, ANSWER)
    assert deployment.daemon is not None
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(100)
        deployment.daemon.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(deployment.daemon.wait, 30) == 0
    assert_same(traffic.answers, expected)
    deployment.spawn()
    await deployment.settled()
    assert members(deployment) == processes


async def test_a_group_without_a_daemon_can_be_stopped(deployment: Deployment) -> None:
    await deployment.start()
    deployment.kill_daemon()
    command = [sys.executable, "-m", "healer.cli", "stop", "--run-dir", str(deployment.run_dir)]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "ended 5 processes" in ended.stdout
    await eventually(lambda: nothing_left(deployment), "no process is left", 10)


async def test_a_dry_run_that_starts_beside_a_crippled_group_touches_nothing(checkpoint: Path) -> None:
    deployment = Deployment(checkpoint)
    try:
        await deployment.start()
        deployment.kill_daemon()
        processes = members(deployment)
        send(deployment, [1], signal.SIGKILL)
        deployment.change(dryRun=True)
        deployment.spawn()

        async def seen() -> bool | None:
            address = json.loads((deployment.run_dir / "dry-run" / "healer.json").read_text())
            async with httpx.AsyncClient(trust_env=False) as client:
                status = (await client.get(address["http"] + "/status", timeout=10)).json()
            return True if status["dry_run"] and status["state"] == "degraded" else None

        await eventually(seen, "the dry run sees that something is wrong", 30)
        assert {s: m.pid for s, m in members(deployment).items()} == {s: m.pid for s, m in processes.items()}
    finally:
        deployment.end()


async def nothing_left(deployment: Deployment) -> bool | None:
    return True if not deployment.processes() else None
