"""vLLM 0.33's own servers heal around dead ranks, without a restart, with every token as in an undisturbed run."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from elastic.vllm.client import RankClient
from elastic.vllm.driver import CommitFailed, Healed, HealFailed, Refilled, RefillFailed, RefillLimits
from elastic.vllm.records import CoordinationInfo, Phase, Refusal, ShrinkOrder, ShrinkResult
from healer.targets.vllm.records import Part
from tests.vllm.inplace_group import InPlaceGroup, Load, in_place_group

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not os.environ.get("VLLM_CPU"), reason="VLLM_CPU names no environment"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(2400),
]

ALL = (Part.ENGINE, Part.WORKER, Part.API, Part.OTHER)
PARTS = {"engine": (Part.ENGINE,), "worker": (Part.WORKER,), "api": (Part.API,), "all": ALL}
REFILL = RefillLimits(hello_s=400, prepare_s=280, commit_s=60, serve_s=120)
PROMPT = [9, 8, 7, 6, 5]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[InPlaceGroup]:
    async with in_place_group(tmp_path_factory.mktemp("group") / "g", 3) as group:
        yield group


@pytest_asyncio.fixture(loop_scope="module")
async def group(shared: InPlaceGroup) -> InPlaceGroup:
    """All slots live and idle."""
    await full(shared)
    return shared


@pytest.fixture
def fault(shared: InPlaceGroup) -> Iterator[Path]:
    yield shared.faults
    for path in shared.faults.iterdir():
        path.unlink()


async def full(group: InPlaceGroup) -> None:
    """Fill what an earlier test has left empty."""
    for slot in range(group.size):
        if not (slot in group.servers and group.alive(slot)) or slot not in await group.live():
            await group.fence([slot])
            say(f"slot {slot} again", None, await group.refill(slot, REFILL))
            assert await group.ask(slot, PROMPT, 5)


def others(group: InPlaceGroup, *gone: int) -> tuple[int, ...]:
    return tuple(slot for slot in range(group.size) if slot not in gone)


def say(what: str, healed: Healed | None, filled: Refilled | None = None) -> None:
    """Figures for a reader of the log (pytest -s)."""
    parts = [f"order to healthy {healed.took_s:.3f} s"] if healed else []
    if filled:
        phases = ", ".join(f"{name} {took:.2f} s" for name, took in filled.phases_s.items())
        pauses = ", ".join(f"{took:.2f} s" for took in filled.pauses_s.values())
        parts.append(f"refill: {phases}; pauses {pauses}")
    print(f"\n{what}: {'; '.join(parts)}")


async def case(group: InPlaceGroup, victim: int, parts: tuple[Part, ...], *, load: bool) -> None:
    left = others(group, victim)
    streams = Load(group, range(group.size), tokens=60)
    async with streams.running() if load else contextlib.nullcontext():
        if load:
            await streams.served(range(group.size), more=1, limit_s=120)
        pids = {slot: group.servers[slot].pid for slot in left}
        group.kill(victim, *parts)
        await group.fence([victim])  # what a daemon does with the rest of a rank that lost a part
        healed = await group.heal(left)
        assert healed.survivors == left
        say(f"without slot {victim}", healed)
        if load:
            await streams.served(left, more=2, limit_s=120)
    for slot in left:
        assert await group.ask(slot, PROMPT, 20)
        assert group.servers[slot].pid == pids[slot]
        assert (await group.engine(slot)).live == left
    assert streams.wrong == []
    assert all(streams.failed[slot] == 0 for slot in left), streams.failed


async def test_a_killed_rank_costs_the_others_no_request_and_no_token(group: InPlaceGroup) -> None:
    """Under load, then rank 0 while nobody asks for anything: what vLLM itself never notices."""
    await case(group, 1, ALL, load=True)
    group.kill(0, Part.ENGINE, Part.WORKER)
    await group.fence([0])
    healed = await group.heal([2])
    assert (healed.survivors, healed.rounds) == ((2,), 1)
    assert await group.ask(2, PROMPT, 20)


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("load", [True, False], ids=["load", "idle"])
@pytest.mark.parametrize("victim", [2, 1, 0])
async def test_any_part_of_any_rank_may_die(group: InPlaceGroup, victim: int, load: bool, parts: str) -> None:
    await case(group, victim, PARTS[parts], load=load)


@pytest.mark.slow
async def test_two_ranks_die_at_once(group: InPlaceGroup) -> None:
    streams = Load(group, [0])
    async with streams.running():
        await streams.served([0], more=1, limit_s=60)
        for slot in (1, 2):
            group.kill(slot, *ALL)
        assert (await group.heal([0])).survivors == (0,)
        await streams.served([0])
    assert (streams.wrong, streams.failed[0]) == ([], 0)


@pytest.mark.slow
async def test_a_second_rank_dies_during_the_shrink(group: InPlaceGroup, fault: Path) -> None:
    streams = Load(group, [0])
    async with streams.running():
        await streams.served([0], more=1, limit_s=60)
        (fault / "hang_healer_shrink_rank2").touch()
        group.kill(1, *ALL)
        healing = asyncio.create_task(group.heal([0, 2], timeout_s=4))
        await until(lambda: phase(group, 0), Phase.WORKERS)
        group.kill(2, *ALL)
        healed = await healing
        assert healed.survivors == (0,)
        assert healed.rounds > 1
        await streams.served([0])
    assert (streams.wrong, streams.failed[0]) == ([], 0)


@pytest.mark.slow
async def test_a_survivor_whose_worker_fails_is_left_out(group: InPlaceGroup, fault: Path) -> None:
    (fault / "raise_healer_shrink_rank2").touch()
    group.kill(1, *ALL)
    healed = await group.heal([0, 2], timeout_s=6)
    assert healed.survivors == (0,)
    assert "injected" in healed.left_out[2] or "failed" in healed.left_out[2]
    assert not group.processes(2)
    assert await group.ask(0, PROMPT, 20)


async def phase(group: InPlaceGroup, slot: int) -> Phase | None:
    return (await group.engine(slot)).phase


async def until(look: object, wanted: object, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while await look() != wanted:  # type: ignore[operator]
        assert time.monotonic() < end, f"not in {limit_s} s: {wanted}"
        await asyncio.sleep(0.02)


async def order(group: InPlaceGroup, slots: list[int], told: ShrinkOrder) -> dict[int, ShrinkResult]:
    calls = (group.clients[slot].shrink(told, deadline_s=told.timeout_s + 5) for slot in slots)
    return dict(zip(slots, await asyncio.gather(*calls), strict=True))


@pytest.mark.slow
async def test_partial_repeated_stale_and_conflicting_orders(group: InPlaceGroup) -> None:
    """From a sound group, over all of its slots: an order that nobody had to die for."""
    info = await group.coordination.info(deadline_s=5)

    def told(epoch: int, survivors: tuple[int, ...] = (0, 1, 2), timeout_s: float = 3.0) -> ShrinkOrder:
        return ShrinkOrder(epoch, survivors, info.host, info.store_port, timeout_s)

    streams = Load(group, [0, 1, 2])
    async with streams.running():
        await streams.served([0, 1, 2], more=1, limit_s=60)
        first = group.next_epoch()
        alone = (await order(group, [0], told(first)))[0]
        assert (alone.serves, alone.phase) == (False, Phase.MEET)
        assert "did not come" in alone.detail
        second = told(group.next_epoch(), timeout_s=8.0)
        found = await order(group, [0, 1, 2], second)
        assert all(result.serves for result in found.values()), found
        await streams.served([0, 1, 2])
        again = await order(group, [0, 1, 2], second)
        assert again == found
        stale = (await order(group, [1], told(first)))[1]
        assert (stale.serves, stale.refused) == (False, Refusal.STALE)
        conflict = (await order(group, [2], told(second.epoch, (0, 2))))[2]
        assert conflict.refused == Refusal.CONFLICT
        foreign = (await order(group, [2], told(group.next_epoch(), (0, 1))))[2]
        assert foreign.refused == Refusal.NOT_MEMBER
        await streams.served([0, 1, 2])
    assert streams.wrong == []
    assert set(streams.failed.values()) == {0}


@pytest.mark.slow
async def test_a_rank_that_hangs_is_ended_and_the_others_go_on(group: InPlaceGroup) -> None:
    streams = Load(group, [0, 1])
    async with streams.running():
        await streams.served([0, 1], more=1, limit_s=60)
        group.kill(2, Part.ENGINE, Part.WORKER, signum=signal.SIGSTOP)
        await asyncio.sleep(2)  # they stand in the step that waits for it
        await group.fence([2])
        assert (await group.heal([0, 1])).survivors == (0, 1)
        await streams.served([0, 1])
    assert (streams.wrong, streams.failed[0], streams.failed[1]) == ([], 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before hello", "in prepare", "when ready"])
async def test_a_joiner_that_dies_costs_the_others_nothing(group: InPlaceGroup, fault: Path, moment: str) -> None:
    group.kill(1, *ALL)
    await group.heal([0, 2])
    streams = Load(group, [0, 2])
    async with streams.running():
        await streams.served([0, 2], more=1, limit_s=60)
        if moment == "in prepare":
            (fault / "hang_healer_join_receive_rank1").touch()
        if moment == "when ready":
            (fault / "raise_healer_join_commit_rank1").touch()
        killer = asyncio.create_task(kill_joiner(group, moment))
        with pytest.raises((RefillFailed, CommitFailed)) as caught:
            await group.refill(1, REFILL)
        await killer
        await group.fence([1])
        if caught.type is CommitFailed:
            await group.heal([0, 2])
        await streams.served([0, 2], limit_s=60)
        assert await group.live() == (0, 2)
    assert (streams.wrong, streams.failed[0], streams.failed[2]) == ([], 0, 0)
    for path in fault.iterdir():
        path.unlink()
    await full(group)


async def kill_joiner(group: InPlaceGroup, moment: str) -> None:
    if moment == "when ready":
        return  # its worker fails by itself
    joins = asyncio.get_running_loop().time()

    def there(info: CoordinationInfo) -> bool:
        return info.refill is not None and (moment == "before hello" or 1 in info.answered)

    while not there(await group.coordination.info(deadline_s=5)):
        assert asyncio.get_running_loop().time() - joins < 400
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    group.kill(1, *ALL)


@pytest.mark.slow
async def test_the_coordinator_dies_alone_and_idle_ranks_still_wake_each_other(group: InPlaceGroup) -> None:
    before = await group.coordination.info(deadline_s=5)
    os.kill(before.coordinator_pid, signal.SIGKILL)
    for slot in (2, 0, 1):
        assert await group.ask(slot, PROMPT, 10, deadline_s=90)
        await asyncio.sleep(1)  # the group becomes idle
    after = await group.coordination.info(deadline_s=5)
    assert after.coordinator_starts == before.coordinator_starts + 1


@pytest.mark.slow
async def test_the_coordination_process_dies_and_orders_go_on_at_the_same_addresses(group: InPlaceGroup) -> None:
    before = await group.coordination.info(deadline_s=5)
    os.kill(before.pid, signal.SIGKILL)
    group.start_coordination()
    after = await group.coordination_up()
    assert (after.store_port, after.coordinator_addresses) == (before.store_port, before.coordinator_addresses)
    await group.coordination.live(3, deadline_s=5)
    for slot in (1, 0, 2):
        assert await group.ask(slot, PROMPT, 10, deadline_s=90)
        await asyncio.sleep(1)
    group.kill(2, *ALL)
    assert (await group.heal([0, 1])).survivors == (0, 1)


@pytest.mark.slow
async def test_stock_orders_are_refused_while_a_slot_is_empty_and_scaling_works_again_when_it_is_filled(
    group: InPlaceGroup,
) -> None:
    group.kill(0, *ALL)
    await group.heal([1, 2])
    refused = await post(group, 1, "/scale_elastic_ep", {"new_data_parallel_size": 2})
    assert (refused.status_code, "slots [0] are empty" in refused.text) == (400, True)
    await post(group, 1, "/fault_tolerance/apply", {"instruction": "retry"})
    assert await group.ask(1, PROMPT, 10)
    await full(group)
    scaled = await asyncio.gather(
        *(post(group, slot, "/scale_elastic_ep", {"new_data_parallel_size": 2}) for slot in (0, 1, 2))
    )
    assert [answer.status_code for answer in scaled] == [200, 200, 200], [answer.text for answer in scaled]
    for slot in (0, 1):
        assert await group.ask(slot, PROMPT, 10)
        assert (await group.engine(slot)).live == (0, 1)


async def post(group: InPlaceGroup, slot: int, path: str, body: dict[str, object]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=group.url(slot), timeout=120, trust_env=False) as client:
        return await client.post(path, json=body)


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_twenty_kills_and_refills_change_no_token(tmp_path: Path) -> None:
    async with in_place_group(tmp_path / "g", 3) as group:
        streams = Load(group, range(3))
        async with streams.running():
            for cycle in range(20):
                victim = cycle * 2 % 3
                left = others(group, victim)
                group.kill(victim, *ALL)
                healed = await group.heal(left)
                assert healed.survivors == left
                await streams.served(left)
                filled = await group.refill(victim, REFILL)
                await streams.served(range(3), limit_s=60)
                say(f"cycle {cycle + 1}, slot {victim}", healed, filled)
        assert streams.wrong == []
        assert await group.live() == (0, 1, 2)


@pytest.mark.slow
async def test_from_four_ranks_down_to_one_and_back(tmp_path: Path) -> None:
    async with in_place_group(tmp_path / "g", 4) as group:
        streams = Load(group, [3])
        async with streams.running():
            await streams.served([3], more=1, limit_s=60)
            for victim in (1, 0, 2):
                left = [slot for slot in await group.live() if slot != victim]
                group.kill(victim, *ALL)
                healed = await group.heal(left)
                assert healed.survivors == tuple(left)
                say(f"without slot {victim}", healed)
                await streams.served([3])
            for victim in (2, 0, 1):
                say(f"slot {victim} again", None, await group.refill(victim, REFILL))
                await streams.served([3], limit_s=60)
                assert await group.ask(victim, PROMPT, 10)
        assert (streams.wrong, streams.failed[3]) == ([], 0)
        assert await group.live() == (0, 1, 2, 3)


@pytest.mark.slow
async def test_nobody_is_left_to_heal(shared: InPlaceGroup) -> None:
    """Last of the file: nothing can be filled after it. Whoever is there by then, after the tests before it."""
    await shared.fence([0, 1, 2])
    with pytest.raises(HealFailed):
        await shared.heal([0, 1], timeout_s=1)
    async with RankClient(shared.url(0)) as client:
        assert not await client.healthy(deadline_s=1)
