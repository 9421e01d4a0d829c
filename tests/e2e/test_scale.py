"""Planned growth and shrinking under traffic; refused targets."""

import asyncio
import random

import pytest

from elastic.client import Tokens, Traffic
from healer.deployment import Deployment
from tests.e2e.harness import assert_same, members

ANSWER = 64


async def scale(deployment: Deployment, body: dict[str, object]) -> list[int]:
    answer = await deployment.post("/scale", body)
    assert answer.status_code == 202, answer.text
    target: list[int] = answer.json()["target"]
    group = await deployment.settled()
    assert group["live"] == target
    return target


async def test_growing_and_shrinking_under_traffic_fails_no_request_and_changes_no_token(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    before, processes = await deployment.counters(), members(deployment)
    done = asyncio.Event()

    async def keep_asking(seed: int) -> int:
        order, asked = random.Random(seed).sample(range(len(prompts)), len(prompts)), 0
        while not done.is_set():
            traffic = Traffic(deployment.gateway(), [prompts[i] for i in order[:4]], ANSWER)
            assert_same(await traffic.run(), [expected[i] for i in order[:4]])
            asked += 4
            order = order[4:] + order[:4]
        return asked

    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(keep_asking(seed)) for seed in range(3)]
        assert await scale(deployment, {"ranks": 2}) == [0, 1]
        assert await scale(deployment, {"ranks": 6}) == [0, 1, 2, 3, 4, 5]
        assert await scale(deployment, {"ranks": 4}) == [0, 1, 2, 3]
        # any slots may go, the first one too
        assert await scale(deployment, {"slots": [1, 3, 4, 5]}) == [1, 3, 4, 5]
        done.set()
    assert sum(c.result() for c in clients) > 0
    after = await deployment.counters()
    assert members(deployment)[1] == processes[1]
    assert after[1]["captures"] == before[1]["captures"]
    assert after[1]["address_changes"] == 0


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"ranks": 1}, 409, "1 ranks x 8 slots hold fewer than 16 experts"),
        ({"ranks": 0}, 400, "Expected `int` >= 1"),
        ({"ranks": 7}, 409, "outside 1..6"),
        ({"slots": [0, 9]}, 409, "slots [9] are outside 0..5"),
        ({"ranks": "four"}, 400, "ranks"),
        ({"slot": [1]}, 400, "slot"),
    ],
)
async def test_a_target_that_cannot_be_is_refused_with_the_reason_and_nothing_changes(
    whole_group: Deployment, body: dict[str, object], status: int, reason: str
) -> None:
    before = (await whole_group.get("/status"))["group"]
    answer = await whole_group.post("/scale", body)
    assert answer.status_code == status
    assert reason in answer.text
    after = await whole_group.settled()
    assert (after["live"], after["epoch"], after["target"]) == (before["live"], before["epoch"], before["target"])
