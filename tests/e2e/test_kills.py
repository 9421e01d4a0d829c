"""A rank dies while clients read: nobody notices. Real processes, real signals, tokens compared with transformers."""

import asyncio
import random
import signal

import pytest

from elastic.client import Tokens, Traffic
from healer.deployment import Deployment, eventually
from tests.e2e.harness import assert_same, members, send

ANSWER = 64


async def fault_under_traffic(
    deployment: Deployment,
    prompts: list[Tokens],
    expected: list[Tokens],
    slots: list[int],
    signum: signal.Signals,
    at_tokens: int,
) -> None:
    """Signal `slots` when the clients have seen `at_tokens`; every answer is right and the group is whole again, with not
    one capture or moved address on the survivors."""
    before, processes = await deployment.counters(), members(deployment)
    traffic = Traffic(deployment.gateway(), prompts, ANSWER)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(at_tokens)
        send(deployment, slots, signum)
    assert_same(traffic.answers, expected)
    await replaced(deployment, slots, processes)
    after = await deployment.counters()
    for slot in before.keys() - set(slots):
        assert after[slot]["captures"] == before[slot]["captures"], f"slot {slot} captured again"
        assert after[slot]["address_changes"] == 0
    assert members(deployment).keys() == processes.keys()
    for slot in before.keys() - set(slots):
        assert members(deployment)[slot] == processes[slot], f"healthy slot {slot} was replaced"


async def replaced(deployment: Deployment, slots: list[int], old: dict) -> None:  # type: ignore[type-arg]
    """Until the slots are held by new processes and the group is settled."""

    async def probe() -> bool | None:
        now = members(deployment)
        return True if all(s in now and now[s] != old[s] for s in slots) else None

    await eventually(probe, f"slots {slots} have new processes", 60)
    await deployment.settled()


@pytest.mark.slow
async def test_twenty_kills_of_any_slot_change_no_token(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    draw = random.Random(2)
    for kill in range(20):
        at = draw.randrange(1, len(prompts) * ANSWER * 3 // 4)
        await fault_under_traffic(deployment, prompts, expected, [kill % 4], signal.SIGKILL, at)


@pytest.mark.slow
async def test_a_hung_rank_is_fenced_and_its_requests_go_on(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    for slot in range(4):
        await fault_under_traffic(deployment, prompts, expected, [slot], signal.SIGSTOP, 200)


@pytest.mark.parametrize("slots", [pytest.param([0, 1], marks=pytest.mark.slow), [1, 3]])
async def test_two_ranks_at_once(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens], slots: list[int]
) -> None:
    await deployment.start()
    await fault_under_traffic(deployment, prompts, expected, slots, signal.SIGKILL, 300)


async def test_too_many_at_once_waits_for_refill_and_still_loses_nothing(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    # one rank cannot hold all experts: the survivor stands until replacements are there
    await fault_under_traffic(deployment, prompts, expected, [0, 1, 2], signal.SIGKILL, 300)


async def test_all_ranks_at_once_are_formed_anew_and_every_request_ends(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    await fault_under_traffic(deployment, prompts, expected, [0, 1, 2, 3], signal.SIGKILL, 300)


async def test_a_kill_during_the_refill_of_another(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    processes = members(deployment)
    traffic = Traffic(deployment.gateway(), prompts * 3, ANSWER)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(100)
        send(deployment, [1], signal.SIGKILL)
        await eventually(lambda: slot_state(deployment, 1, "booting"), "slot 1 boots", 30)
        send(deployment, [2], signal.SIGKILL)
    assert_same(traffic.answers, expected * 3)
    await replaced(deployment, [1, 2], processes)


async def test_a_replacement_that_dies_while_it_boots_is_replaced_itself(deployment: Deployment) -> None:
    await deployment.start()
    processes = members(deployment)
    send(deployment, [1], signal.SIGKILL)
    await eventually(lambda: slot_state(deployment, 1, "booting"), "slot 1 boots", 30)
    first = await eventually(lambda: new_process(deployment, 1, processes), "the replacement has a pid", 30)
    send(deployment, [1], signal.SIGKILL)
    await replaced(deployment, [1], {1: first})


@pytest.mark.slow
async def test_a_kill_of_the_idle_group_is_healed_before_anybody_asks(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    for slot in (0, 2):
        processes = members(deployment)
        send(deployment, [slot], signal.SIGKILL)
        await replaced(deployment, [slot], processes)
        traffic = Traffic(deployment.gateway(), prompts, ANSWER)
        assert_same(await traffic.run(), expected)


async def test_a_request_that_comes_right_after_a_death_in_the_idle_group(
    deployment: Deployment, prompts: list[Tokens], expected: list[Tokens]
) -> None:
    await deployment.start()
    send(deployment, [3], signal.SIGKILL)
    assert_same(await Traffic(deployment.gateway(), prompts, ANSWER).run(), expected)
    await deployment.settled()


async def slot_state(deployment: Deployment, slot: int, state: str) -> bool | None:
    group = (await deployment.get("/status"))["group"]
    return True if group["slots"][slot]["state"] == state else None


async def new_process(deployment: Deployment, slot: int, old: dict):  # type: ignore[type-arg, no-untyped-def]
    now = members(deployment)
    return now[slot] if slot in now and now[slot] != old[slot] else None
