"""Load rules on a real group under traffic."""

import asyncio
from typing import Any

import pytest

from elastic.client import Tokens, Traffic
from healer.deployment import Deployment, eventually
from tests.e2e.harness import assert_same, members

ANSWER = 64
LOAD: dict[str, Any] = {
    "interval": "200ms",
    "cooldown": "1s",
    "signals": {"kvUse": {"metric": "kvUse", "scope": "rank", "aggregate": "mean"}},
    "rules": [{"kind": "targetTracking", "name": "sequences", "signal": "kvUse", "target": 0.6}],
    "behavior": {
        "scaleUp": {"policies": [{"type": "ranks", "value": 4, "period": "1s"}]},
        "scaleDown": {"stabilizationWindow": "2s", "policies": [{"type": "ranks", "value": 4, "period": "1s"}]},
    },
}


@pytest.mark.slow
async def test_load_grows_the_group_and_its_end_shrinks_it_and_no_token_changes(
    checkpoint: Any, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    target = {"ranks": 2, "maxRanks": 4, "redundantExperts": 0, "maxSeqs": 4}
    deployment = Deployment(checkpoint, target=target, spec={"load": LOAD, "bounds": {"minRanks": 2}})
    try:
        await deployment.start()
        processes, done = members(deployment), asyncio.Event()

        async def keep_asking() -> int:
            asked = 0
            while not done.is_set():
                assert_same(await Traffic(deployment.gateway(), prompts, ANSWER).run(), expected)
                asked += len(prompts)
            return asked

        async def live(count: int) -> bool | None:
            return True if len((await deployment.get("/status"))["group"]["live"]) == count else None

        async with asyncio.TaskGroup() as tasks:
            client = tasks.create_task(keep_asking())
            await eventually(lambda: live(4), "the group has grown to four ranks", 90)
            done.set()
        assert client.result() > 0
        await eventually(lambda: live(2), "the group is small again", 60)
        status = await deployment.get("/status")
        assert status["scaling"]["signals"]["kvUse"] == 0.0
        kept = members(deployment)
        assert len(kept) == 2
        assert all(processes[slot] == kept[slot] for slot in kept if slot in processes)
    finally:
        deployment.end()
