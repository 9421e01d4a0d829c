"""The gateway's process dies: its clients see an error, the ranks see nothing, and the next gateway serves."""

import asyncio
import signal

from elastic import process
from elastic.client import Tokens, Traffic
from elastic.controller.state import GatewayProcess
from elastic.paths import gateway_path, read_json
from healer.deployment import Deployment, eventually
from tests.e2e.harness import assert_same, members, send

ANSWER = 64


async def kill_gateway(deployment: Deployment) -> str:
    """Returns the address of the next one."""
    path = gateway_path(deployment.run_dir)
    old = read_json(path, GatewayProcess)
    assert process.send_signal(old.pid, old.pid_start, signal.SIGKILL)

    async def back() -> str | None:
        now = read_json(path, GatewayProcess)
        return None if now.pid == old.pid else now.http

    return await eventually(back, "another gateway listens", 30)


async def test_a_killed_gateway_comes_back_and_no_rank_is_touched(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    before, processes = await deployment.counters(), members(deployment)
    traffic = Traffic(deployment.gateway(), prompts, ANSWER)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(200)
        gateway = await kill_gateway(deployment)
    for answer, want in zip(traffic.answers, expected, strict=True):
        # a client that got no end was told so, and what it got is right
        assert (answer.error is None) == (answer.finish is not None)
        assert answer.tokens == want[: len(answer.tokens)]
    assert_same(await Traffic(gateway, prompts, ANSWER).run(), expected)
    assert members(deployment) == processes
    after = await deployment.counters()
    assert {s: c["captures"] for s, c in after.items()} == {s: c["captures"] for s, c in before.items()}

    async def idle() -> bool | None:
        slots = (await deployment.settled())["slots"]
        return None if any(s["waiting"] or s["running"] for s in slots) else True

    await eventually(idle, "nothing of the lost requests is left on the ranks", 10)


async def test_a_rank_that_dies_with_the_gateway_is_healed(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    processes = members(deployment)
    traffic = Traffic(deployment.gateway(), prompts, ANSWER)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(200)
        send(deployment, [1], signal.SIGKILL)
        gateway = await kill_gateway(deployment)
    assert_same(await Traffic(gateway, prompts, ANSWER).run(), expected)
    await deployment.settled()
    now = members(deployment)
    assert {s: now[s] for s in (0, 2, 3)} == {s: processes[s] for s in (0, 2, 3)}
