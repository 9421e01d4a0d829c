"""Orders over HTTP and the coordination socket: whatever the other end does, the daemon gets a record or one clear error in time."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.vllm import driver
from elastic.vllm.client import Coordination, NoAnswer, NotInForce, RankClient
from elastic.vllm.driver import CommitFailed, HealFailed, RefillFailed, RefillLimits
from elastic.vllm.records import CoordinationInfo, Phase, Refusal, ShrinkOrder, ShrinkResult
from tests.vllm.inplace_fakes import FakeCoordination, FakeRanks, client, fixed

ORDER = ShrinkOrder(3, (0, 1), "127.0.0.1", 5, 2.0)


async def test_a_dying_rank_that_accepts_an_order_and_never_answers_holds_nobody_up() -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(3600)
        raise AssertionError

    async with client(never) as rank:
        began = time.monotonic()
        with pytest.raises(NoAnswer, match="no answer within"):
            await rank.shrink(ORDER, deadline_s=0.05)
        assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, '{"detail":"Not Found"}', NotInForce),
        (503, '{"error":{"message":"not in force: --enable-fault-tolerance is off"}}', NotInForce),
        (503, '{"error":"The model is currently scaling. Please try again later."}', NoAnswer),
        (401, '{"error":"Unauthorized"}', NoAnswer),
        (400, '{"error":{"message":"survivors: expected different ones"}}', NoAnswer),
        (504, '{"error":{"message":"the engine did not answer in time"}}', NoAnswer),
        (200, "", NoAnswer),
        (200, "[]", NoAnswer),
        (200, '{"epoch": 3}', NoAnswer),
        (200, b"\xff\xfe", NoAnswer),
        (302, "", NoAnswer),
    ],
)
async def test_an_answer_that_is_none_is_an_error_that_says_what_came(
    status: int, body: bytes | str, error: type[Exception]
) -> None:
    async with client(fixed(status, body)) as rank:
        with pytest.raises(error, match="rank-0"):
            await rank.shrink(ORDER, deadline_s=1)


@given(st.integers(200, 599), st.binary(max_size=200))
async def test_no_answer_gets_through_as_a_record_that_it_is_not(status: int, body: bytes) -> None:
    async with client(fixed(status, body)) as rank:
        with pytest.raises((NoAnswer, NotInForce)):
            await rank.info(deadline_s=1)


async def test_an_endless_answer_is_cut_off() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536

    async def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=endless())

    async with client(answer) as rank:
        with pytest.raises(NoAnswer, match="more than"):
            await rank.info(deadline_s=5)


async def test_a_refused_order_is_a_result_and_not_an_error() -> None:
    refused = ShrinkResult(3, 0, False, Phase.PARK, "epoch 3 is over, 4 was seen", Refusal.STALE)
    async with client(fixed(409, msgspec.json.encode(refused))) as rank:
        assert await rank.shrink(ORDER, deadline_s=1) == refused


async def test_the_key_is_sent_with_every_order() -> None:
    seen = []

    async def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("Authorization"))
        return httpx.Response(401, content="{}")

    async with RankClient("http://rank", api_key="secret", transport=httpx.MockTransport(answer)) as rank:
        with pytest.raises(NoAnswer):
            await rank.shrink(ORDER, deadline_s=1)
    assert seen == ["Bearer secret"]


# --- sequences over several ranks --------------------------------------------------------------------------------------------------


async def heal(ranks: FakeRanks, survivors: Collection[int], epoch: int = 1) -> driver.Healed:
    return await driver.heal(ranks.clients, ranks, survivors, ("127.0.0.1", 5), epoch=epoch, timeout_s=0.05)


async def test_a_second_death_during_a_shrink_is_healed_with_a_smaller_set_and_a_higher_epoch() -> None:
    ranks = FakeRanks([0, 1, 2, 3])
    ranks.dead |= {1, 3}
    found = await heal(ranks, [0, 2, 3])
    assert (found.survivors, found.rounds, ranks.fenced) == ((0, 2), 2, [])
    assert found.epoch > 1


async def test_a_rank_that_is_alive_and_mute_is_ended_first() -> None:
    ranks = FakeRanks([0, 1, 2])
    ranks.mute.add(2)
    found = await heal(ranks, [0, 1, 2])
    assert (found.survivors, ranks.fenced) == ((0, 1), [2])


async def test_a_rank_whose_worker_votes_no_is_ended_and_the_rest_goes_on() -> None:
    ranks = FakeRanks([0, 1, 2])
    ranks.no.add(0)
    found = await heal(ranks, [0, 1, 2])
    assert (found.survivors, ranks.fenced) == ((1, 2), [0])
    assert "sticky" in found.left_out[0]


async def test_a_controller_that_was_left_behind_takes_a_higher_epoch() -> None:
    ranks = FakeRanks([0, 1])
    ranks.epoch = {0: 41, 1: 41}
    assert (await heal(ranks, [0, 1])).epoch == 42


async def test_nobody_left_is_an_error_and_not_a_wait() -> None:
    ranks = FakeRanks([0, 1])
    ranks.mute |= {0, 1}
    with pytest.raises(HealFailed, match="nobody"):
        await heal(ranks, [0, 1])


LIMITS = RefillLimits(hello_s=0.2, prepare_s=0.4, commit_s=1.0, serve_s=1.0)


async def fill(ranks: FakeRanks, coordination: FakeCoordination, limits: RefillLimits = LIMITS) -> driver.Refilled:
    async def launch(info: CoordinationInfo) -> RankClient:
        return client(fixed(200, ""), 1)

    return await driver.refill(ranks.clients, ranks, coordination, [0, 2], 1, launch, epoch=1, limits=limits)


async def test_a_refill_touches_the_survivors_after_the_joiners_first_word_only(tmp_path: Path) -> None:
    ranks = FakeRanks([0, 2])
    async with FakeCoordination(tmp_path, "nothing").listening() as coordination:
        with pytest.raises(RefillFailed, match="said nothing"):
            await fill(ranks, coordination)
    assert not [told for told in ranks.told if told[0] == "refill/prepare"]
    assert coordination.did[-1] == "end False"


async def test_a_refill_ends_with_the_joiner_serving(tmp_path: Path) -> None:
    ranks = FakeRanks([0, 2])
    async with FakeCoordination(tmp_path, "ready").listening() as coordination:
        found = await fill(ranks, coordination)
    assert list(found.phases_s) == ["hello", "prepare", "commit", "serve"]
    assert coordination.did == ["refill", "answer", "end True", "live"]


@pytest.mark.parametrize("reaches", ["hello", "trouble"])
async def test_a_joiner_that_does_not_come_up_is_forgotten_on_every_survivor(tmp_path: Path, reaches: str) -> None:
    ranks = FakeRanks([0, 2])
    async with FakeCoordination(tmp_path, reaches).listening() as coordination:
        with pytest.raises(RefillFailed):
            await fill(ranks, coordination)
    assert {slot for what, slot in ranks.told if what == "refill/abort"} == {0, 2}


async def test_a_survivor_that_dropped_the_preparation_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LOOK_S", 0.05)
    ranks = FakeRanks([0, 2])
    ranks.refill_error = "NotMet: slots [1] did not come in time"
    async with FakeCoordination(tmp_path, "hello").listening() as coordination:
        with pytest.raises(RefillFailed, match="did not come in time"):
            await fill(ranks, coordination)


async def test_a_survivor_that_is_too_busy_to_answer_does_not_cost_the_joiner_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LOOK_S", 0.05)
    ranks = FakeRanks([0, 2])
    ranks.mute_once_prepared = {2}
    async with FakeCoordination(tmp_path, "hello").listening() as coordination:
        with pytest.raises(RefillFailed, match="the joiner did not prepare in time"):
            await fill(ranks, coordination)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_second_death_ends_a_refill_before_the_others_have_left_the_step_in_which_they_wait_for_the_dead(
    tmp_path: Path, cancelled: bool
) -> None:
    ranks = FakeRanks([0, 2])
    ranks.stands_in_a_step.set()
    async with FakeCoordination(tmp_path, "hello").listening() as coordination:
        work = asyncio.create_task(fill(ranks, coordination, RefillLimits(5.0, 60.0, 1.0, 1.0)))
        await asyncio.wait_for(ranks.prepares.wait(), 30)
        began = time.monotonic()
        if cancelled:
            work.cancel()
        else:
            ranks.dead.add(2)
        with pytest.raises(asyncio.CancelledError if cancelled else RefillFailed):
            await work
        assert time.monotonic() - began < driver.COORDINATION_S / 2
    assert ("refill/abort", 0) in ranks.told


async def test_a_commit_that_fails_on_one_rank_is_told_apart_from_a_refill_that_changed_nothing(tmp_path: Path) -> None:
    ranks = FakeRanks([0, 2])
    ranks.commit_fails = True
    async with FakeCoordination(tmp_path, "ready").listening() as coordination:
        with pytest.raises(CommitFailed, match="paused"):
            await fill(ranks, coordination)


async def test_no_coordination_process_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(NoAnswer, match="coordination, info"):
        await Coordination(tmp_path).info(deadline_s=1)
