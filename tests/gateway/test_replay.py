"""Ranks die, drain, stutter and repeat themselves: the client sees one right answer."""

import asyncio
import random
import signal
import subprocess
import sys

from elastic.protocol import Emitted
from tests.gateway import gateway_fakes as fakes
from tests.gateway.gateway_fakes import right_answer, until

PROMPT = [1, 2, 3]


async def test_rank_killed_mid_stream_is_invisible_to_the_client(gateway):
    """A real process and a real SIGKILL."""
    group = await gateway()
    address = str(group.root / "r0.1")
    group.ranks[0], group.incarnations[0] = fakes.FakeRank(address), 1
    await group.rank(1)
    process = await asyncio.create_subprocess_exec(
        sys.executable, fakes.__file__, address, fakes.GROUP, "0.002", stdout=subprocess.PIPE, env=fakes.ENVIRONMENT
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        await group.route(0, 1)
        async with group.stream(max_tokens=200) as stream:
            await stream.take(20)
            process.send_signal(signal.SIGKILL)
            await stream.rest()
        assert stream.tokens == right_answer(PROMPT, 200)
        assert (stream.done, stream.finish, stream.error) == (True, "length", None)
        assert stream.text == "".join(fakes.ALPHABET[token] for token in stream.tokens)
        assert (await group.status()).replayed == 1
        assert group.ranks[1].submits[0].attempt == 2
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_two_deaths_in_a_row_lose_no_token(gateway):
    group = await gateway(3)
    for rank in group.ranks.values():
        rank.step_s = 0.001
    async with group.stream(max_tokens=120) as stream:
        for taken in (10, 40):
            await stream.take(taken)
            holder = next(slot for slot, count in (await group.status()).per_slot.items() if count)
            await group.ranks[holder].die()
        await stream.rest()
    assert stream.tokens == right_answer(PROMPT, 120)
    assert (await group.status()).replayed == 2


async def test_last_rank_dies_and_its_replacement_finishes_the_answer(gateway):
    group = await gateway(1)
    group.ranks[0].step_s = 0.001
    async with group.stream(max_tokens=100) as stream:
        await stream.take(10)
        await group.ranks[0].die()
        late = asyncio.create_task(group.complete(max_tokens=3))
        await group.until_queued(2)
        await group.rank(0)
        await group.route(0)
        await stream.rest()
        assert (await late).json()["choices"][0]["token_ids"] == right_answer(PROMPT, 3)
    assert stream.tokens == right_answer(PROMPT, 100)


async def test_replay_tells_the_new_rank_exactly_what_the_client_has(gateway):
    group = await gateway(2)
    group.ranks[0].step_s = 0.001
    async with group.stream(max_tokens=60, temperature=0.7, top_p=0.9) as stream:
        await stream.take(10)
        await group.ranks[0].die()
        await stream.rest()
    (first,), (second,) = group.ranks[0].submits, group.ranks[1].submits
    have = len(second.tokens) - second.prompt_len
    assert list(second.tokens) == PROMPT + right_answer(PROMPT, have)
    assert 10 <= have < 60
    assert (first.attempt, second.attempt) == (1, 2)
    # the seed was drawn once, so that a sampled answer goes on as it began
    assert first.sampling == second.sampling
    assert first.sampling.temperature == 0.7
    assert (first.max_tokens, second.max_tokens) == (60, 60)


async def test_draining_rank_hands_its_requests_over_without_a_gap(gateway):
    group = await gateway(2)
    group.ranks[0].step_s = 0.001
    async with group.stream(max_tokens=80) as stream:
        await stream.take(10)
        await group.route(0, 1, draining=[0])
        await until(lambda: group.ranks[0].cancels, "the draining rank is told to forget the request")
        await stream.rest()
    assert stream.tokens == right_answer(PROMPT, 80)
    assert group.ranks[1].submits[0].attempt == 2
    assert (await group.status()).per_slot == {0: 0, 1: 0}


async def test_only_rank_drains_and_still_finishes_what_it_has(gateway):
    group = await gateway(1)
    group.ranks[0].gate.clear()
    asking = asyncio.create_task(group.complete(max_tokens=10))
    await until(lambda: group.ranks[0].submits, "the request is on the rank")
    await group.route(0, draining=[0])
    group.ranks[0].gate.set()
    assert (await asking).json()["choices"][0]["token_ids"] == right_answer(PROMPT, 10)
    assert not group.ranks[0].cancels


async def test_rank_that_leaves_the_routes_hands_over(gateway):
    group = await gateway(2)
    group.ranks[0].step_s = 0.001
    async with group.stream(max_tokens=80) as stream:
        await stream.take(10)
        status = await group.route(1)
        assert set(status.per_slot) == {1}
        await stream.rest()
    assert stream.tokens == right_answer(PROMPT, 80)
    await until(lambda: group.ranks[0].cancels, "the rank that is out is told to forget the request")


async def test_new_incarnation_in_the_same_slot_takes_over(gateway):
    group = await gateway(1)
    old = group.ranks[0]
    old.step_s = 0.001
    async with group.stream(max_tokens=80) as stream:
        await stream.take(10)
        await group.rank(0)
        await group.route(0)
        await stream.rest()
    assert stream.tokens == right_answer(PROMPT, 80)
    await old.die()


async def test_tokens_of_a_stale_attempt_never_reach_the_client(gateway):
    group = await gateway(2)
    group.ranks[0].step_s = 0.001
    async with group.stream(max_tokens=50) as stream:
        await stream.take(5)
        await group.route(0, 1, draining=[0])
        await until(lambda: group.ranks[1].submits, "handed over")
        request = group.ranks[1].submits[0].request
        for attempt in (1, 2, 3):
            for start in range(50):
                poison = Emitted(request=request, attempt=attempt, start=start, tokens=(42,), finish="stop")
                group.ranks[0].tell(poison)
        await stream.rest()
    assert stream.tokens == right_answer(PROMPT, 50)


async def test_doubled_emissions_are_shown_once(gateway):
    group = await gateway(1)
    group.ranks[0].mangle = lambda emitted: [emitted, emitted]
    async with group.stream(max_tokens=30) as stream:
        await stream.rest()
    assert stream.tokens == right_answer(PROMPT, 30)
    assert (await group.status()).replayed == 0


async def test_rank_that_skips_a_token_does_not_hang_the_client(gateway):
    group = await gateway(2)
    group.ranks[0].mangle = lambda emitted: [] if emitted.start == 4 else [emitted]
    async with group.stream(max_tokens=30) as stream:
        await stream.rest()
    assert stream.tokens == right_answer(PROMPT, 30)
    assert group.ranks[1].submits[0].tokens[3:] == tuple(right_answer(PROMPT, 4))


async def test_rank_that_closes_the_connection_and_lives_is_used_again(gateway):
    group = await gateway(1)
    group.ranks[0].step_s = 0.001
    async with group.stream(max_tokens=60) as stream:
        await stream.take(10)
        group.ranks[0].hang_up()
        await stream.rest()
    assert stream.tokens == right_answer(PROMPT, 60)


async def test_request_that_kills_every_rank_ends_in_one_error(gateway):
    group = await gateway(1)

    def kill(_: Emitted) -> list:
        group.ranks[0].hang_up()
        return []

    group.ranks[0].mangle = kill
    response = await group.complete(max_tokens=4)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "ranks_lost"
    assert (await group.status()).in_flight == 0


async def test_many_streams_survive_a_storm_of_deaths(gateway):
    """Invariant: nothing lost, nothing doubled, for any order of deaths, drains and refills."""
    group = await gateway(4)
    dice = random.Random(7)
    for rank in group.ranks.values():
        rank.step_s = 0.001
    prompts = [[i, i + 1] for i in range(12)]

    async def ask(prompt: list[int]) -> fakes.Stream:
        async with group.stream(prompt=prompt, max_tokens=120) as stream:
            return await stream.rest()

    asking = [asyncio.create_task(ask(prompt)) for prompt in prompts]
    await until(lambda: group.ranks[3].submits, "all ranks work")
    for _ in range(8):
        slot = dice.randrange(4)
        if dice.random() < 0.7:
            await group.ranks[slot].die()
            await group.rank(slot)
            group.ranks[slot].step_s = 0.001
        drained = [dice.randrange(4)] if dice.random() < 0.5 else []
        await group.route(0, 1, 2, 3, draining=drained)
    for prompt, stream in zip(prompts, await asyncio.gather(*asking), strict=True):
        assert stream.tokens == right_answer(prompt, 120)
        assert stream.done
    status = await group.status()
    assert (status.accepted, status.completed, status.failed, status.in_flight) == (12, 12, 0, 0)
    assert status.replayed > 0
