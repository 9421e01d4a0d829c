"""Ranks see the death of a peer themselves: nobody needs to tell them, and no controller needs to be quick."""

import asyncio
import signal
from pathlib import Path

from elastic.client import Traffic, random_prompts
from elastic.launch.base import Launched
from tests.controller.test_executor import VOCAB, Owner, checkpoint, group, run_dir, until

__all__ = ["checkpoint", "run_dir"]


async def test_survivors_leave_the_step_that_waits_for_a_dead_peer_before_anybody_tells_them(
    checkpoint: Path, run_dir: Path
) -> None:
    async with group(checkpoint, run_dir) as owner:
        prompts = random_prompts(6, VOCAB, seed=31)
        want = await owner.answers(prompts)
        owner.heals = False
        traffic = Traffic(owner.executor.gateway_http, prompts, 32)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            await traffic.reached(30)
            links = owner.executor._group.links
            owner.signal(1, signal.SIGKILL)
            # the exchange itself would wait for 30 s
            await until(lambda: all(links[s].beat.phase == "parked" for s in (0, 2) if links[s].beat), 20)
            owner.heals = True
            owner.executor.lose([1], cause="death", detected=asyncio.get_running_loop().time())
        assert [a.tokens for a in traffic.answers] == want
        await owner.executor.settled(deadline_s=30)


async def test_a_joiner_that_dies_when_it_is_connected_stops_nobody(checkpoint: Path, run_dir: Path) -> None:
    """It is masked still; its death is no reason to discard a step."""
    async with group(checkpoint, run_dir) as owner:
        prompts = random_prompts(6, VOCAB, seed=32)
        want = await owner.answers(prompts)
        group_, agree = owner.executor._group, owner.executor._group.agree

        async def kill_first() -> int:
            group_.agree = agree  # type: ignore[method-assign]
            owner.executor._launcher.end(launched(owner, 3))
            await asyncio.sleep(0.2)
            return await agree()

        group_.agree = kill_first  # type: ignore[method-assign]
        owner.executor.scale(4, reason="test")
        assert await owner.answers(prompts) == want
        await owner.executor.settled(deadline_s=30)
        assert owner.member(3).incarnation == 2
        assert [r.kind for r in owner.reports if r.kind == "loss"] == []
        for slot in range(3):
            status = await group_.links[slot].refresh(deadline_s=5)
            assert status.counters.discarded_steps == 0


def launched(owner: Owner, slot: int) -> Launched:
    member = owner.executor._boots.ready[slot].member
    return Launched(member.pid, member.pid_start)
