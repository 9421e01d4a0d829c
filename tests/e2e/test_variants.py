"""The same promise for sampled answers and for the back end that also runs between hosts."""

import asyncio
import signal
from pathlib import Path

import pytest

from elastic.client import Tokens, Traffic
from healer.deployment import Deployment
from tests.e2e.harness import assert_same, members, send

ANSWER = 64


async def test_a_sampled_answer_continues_after_a_death_as_it_would_have(
    deployment: Deployment, prompts: list[Tokens]
) -> None:
    await deployment.start()

    def traffic() -> Traffic:
        sampling = {"temperature": 0.9, "top_p": 0.95}
        return Traffic(deployment.gateway(), prompts, ANSWER, options=lambda i: sampling | {"seed": i})

    undisturbed = [a.tokens for a in await traffic().run()]
    assert len({tuple(tokens) for tokens in undisturbed}) == len(prompts)
    disturbed = traffic()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(disturbed.run())
        await disturbed.reached(300)
        send(deployment, [2], signal.SIGKILL)
    assert_same(disturbed.answers, undisturbed)


@pytest.mark.slow
async def test_the_nixl_back_end_keeps_the_same_promise(
    checkpoint: Path, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    deployment = Deployment(checkpoint, target={"epBackend": "nixl", "ranks": 3, "maxRanks": 4})
    try:
        await deployment.start()
        for slot, signum in ((0, signal.SIGKILL), (2, signal.SIGSTOP)):
            processes = members(deployment)
            traffic = Traffic(deployment.gateway(), prompts, ANSWER)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(traffic.run())
                await traffic.reached(200)
                send(deployment, [slot], signum)
            assert_same(traffic.answers, expected)
            await deployment.settled()
            assert members(deployment)[slot] != processes[slot]
    finally:
        deployment.end()
