"""Faults that a rank commits itself: nothing ends its process, and no signal shows in its state."""

import asyncio
from pathlib import Path

import pytest

from chaos import inject
from elastic.client import Tokens, Traffic
from elastic.errors import ElasticError
from healer.deployment import Deployment, eventually
from tests.e2e.harness import assert_same, members


async def test_a_rank_whose_loop_is_stuck_while_it_still_beats_is_replaced_and_no_token_is_lost(
    checkpoint: Path, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    deployment = Deployment(
        checkpoint,
        target={"faultInjection": True},
        detection={"stallAfter": "1s", "silentAfter": "2s"},
    )
    try:
        await deployment.start()
        before = members(deployment)
        traffic = Traffic(deployment.gateway(), prompts, 64)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            await traffic.reached(100)
            inject.within("stuck", deployment.run_dir, [2])
        assert_same(traffic.answers, expected)

        async def closed() -> dict[str, object] | None:
            found: list[dict[str, object]] = await deployment.get("/incidents")
            return found[-1] if found and found[-1]["closed_wall"] else None

        incident = await eventually(closed, "the incident is closed", 60)
        assert incident["causes"] == ["stuck"]
        now = members(deployment)
        assert now[2] != before[2]
        assert {s: now[s] for s in (0, 1, 3)} == {s: before[s] for s in (0, 1, 3)}
    finally:
        deployment.end()


async def test_a_group_that_does_not_allow_it_commits_no_faults(whole_group: Deployment) -> None:
    with pytest.raises(ElasticError, match="faultInjection"):
        inject.within("stuck", whole_group.run_dir, [1])
    await whole_group.settled()
