"""A rank is lost in every way that vLLM loses one: each client gets the undisturbed answer, or one explicit error."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.router_fakes import MODEL, Fault, chat_prompt, right_text, right_tokens
from tests.vllm.router_stand import Stand, Streamed, stream, streaming, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "a prompt of more than eight tokens"
IDS = list(PROMPT.encode())
MESSAGES = [{"role": "user", "content": "hello there"}]
COUNT = 60
LOSSES = ["abort", "error-event", "hangup", "reset", "short"]

each_loss = pytest.mark.parametrize("loss", LOSSES)


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    made = Stand(tmp_path)
    await made.start(2)
    yield made
    await made.aclose()


def break_all(stand: Stand, kind: str, after: int, times: int = 1) -> None:
    """The first rank that a request reaches fails it; the next one does not."""
    fault = Fault(kind, after, times)
    for rank in stand.ranks.values():
        rank.faults.append(fault)


def completion(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, **more}


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": COUNT, "temperature": 0, **more}


async def ask(stand: Stand, path: str, body: dict[str, Any]) -> Any:
    answer = await stand.client.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@each_loss
@pytest.mark.parametrize("after", [0, 1, 17, COUNT - 1])
async def test_a_stream_goes_on_over_a_lost_rank_as_if_nothing_had_been(stand: Stand, loss: str, after: int) -> None:
    break_all(stand, loss, after)
    got = await stream(stand.client, COMPLETIONS, completion())
    assert (got.text, got.finishes, got.done, got.error) == (right_text(IDS, COUNT), ["length"], True, None)
    assert len({(chunk["id"], chunk["created"]) for chunk in got.chunks}) == 1
    assert got.ids == []
    assert all(choice.get("prompt_token_ids") is None for choice in got.choices)


@each_loss
@pytest.mark.parametrize("after", [0, 1, 30])
async def test_a_chat_stream_goes_on_over_a_lost_rank(stand: Stand, loss: str, after: int) -> None:
    break_all(stand, loss, after)
    got = await stream(stand.client, CHAT, chat())
    assert (got.text, got.finishes, got.done) == (right_text(chat_prompt(MESSAGES), COUNT), ["length"], True)
    assert [choice["delta"].get("role") for choice in got.choices].count("assistant") == 1
    assert {chunk["object"] for chunk in got.chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in got.chunks}) == 1


@each_loss
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_whole_answer_goes_on_over_a_lost_rank_from_the_tokens_that_were_there(
    stand: Stand, loss: str, path: str
) -> None:
    break_all(stand, loss, 40)
    body, prompt = (completion(), IDS) if path == COMPLETIONS else (chat(), chat_prompt(MESSAGES))
    answer = await ask(stand, path, body)
    (choice,) = answer["choices"]
    assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == right_text(prompt, COUNT)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == COUNT
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    rest = [b for rank in stand.ranks.values() for b in rank.asked(COMPLETIONS) if isinstance(b["prompt"], list)]
    assert len(rest) == 1
    assert rest[0]["max_tokens"] <= COUNT - 40 + 3, "the rest only was generated again"


async def test_five_ranks_lost_one_after_another_lose_no_token(stand: Stand) -> None:
    fault = Fault("hangup", 10, times=5)
    for rank in stand.ranks.values():
        rank.faults.append(fault)
    got = await stream(stand.client, COMPLETIONS, completion(return_token_ids=True))
    assert (got.text, got.ids) == (right_text(IDS, COUNT), right_tokens(IDS, COUNT))
    assert await stand.metric('healer_router_replays_total{how="continued"}') == 5


async def test_a_request_that_kills_whoever_takes_it_is_ended_and_not_sent_for_ever(stand: Stand) -> None:
    break_all(stand, "reset", 0, times=99)
    got = await stream(stand.client, COMPLETIONS, completion())
    assert got.status == 500
    assert got.error is not None
    assert got.error["code"] == "ranks_lost"
    assert sum(len(rank.asked(COMPLETIONS)) for rank in stand.ranks.values()) == 5


async def test_engines_that_die_together_and_come_back_cost_nobody_an_answer(stand: Stand) -> None:
    """Their servers answer 500 for a quarter of a second."""
    break_all(stand, "refuse-500", 0, times=99)
    tasks = [asyncio.create_task(stream(stand.client, COMPLETIONS, completion())) for _ in range(4)]
    for rank in stand.ranks.values():
        asyncio.get_running_loop().call_later(0.25, rank.faults.clear)
    assert [got.text for got in await asyncio.gather(*tasks)] == [right_text(IDS, COUNT)] * 4


async def test_a_killed_rank_is_left_by_all_its_requests_at_once(stand: Stand) -> None:
    for rank in stand.ranks.values():
        rank.step_s = 0.005
    prompts = [f"prompt number {n} of the storm" for n in range(24)]
    tasks = [
        asyncio.create_task(stream(stand.client, COMPLETIONS, {"prompt": p, "max_tokens": COUNT, "temperature": 0}))
        for p in prompts
    ]
    await until(lambda: all(rank.active >= 10 for rank in stand.ranks.values()))
    await stand.ranks[1].kill()
    answers = await asyncio.gather(*tasks)
    assert [a.text for a in answers] == [right_text(p.encode(), COUNT) for p in prompts]
    assert all(a.done and a.error is None for a in answers)
    await until(lambda: stand.ranks[0].active == 0)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
@pytest.mark.parametrize("after", range(14, 40, 5))
async def test_no_character_is_lost_doubled_or_cut_wherever_the_rank_dies(stand: Stand, chunk: int, after: int) -> None:
    """Several tokens make one character, and several tokens come in one chunk."""
    for rank in stand.ranks.values():
        rank.chunk = chunk
    break_all(stand, "hangup", after)
    got = await stream(stand.client, COMPLETIONS, completion(return_token_ids=True))
    assert got.text == right_text(IDS, COUNT)
    assert got.ids == right_tokens(IDS, COUNT)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("after", [1, 8, 20, 30, 40, 45])
async def test_a_stop_string_that_spans_the_loss_still_stops(stand: Stand, after: int, shown: bool) -> None:
    stop = right_text(IDS, 90)[40:46]
    break_all(stand, "hangup", after)
    body = completion(stop=["no such words", stop], include_stop_str_in_output=shown, max_tokens=100)
    got = await stream(stand.client, COMPLETIONS, body)
    text = right_text(IDS, 100)
    assert got.text == text[: text.index(stop) + (len(stop) if shown else 0)]
    assert got.finishes == ["stop"]
    assert [c["stop_reason"] for c in got.choices if c["finish_reason"]] == [stop]


async def test_a_stop_string_delays_but_never_changes_an_undisturbed_stream(stand: Stand) -> None:
    got = await stream(stand.client, COMPLETIONS, completion(stop="never said by it", return_token_ids=True))
    assert (got.text, got.ids) == (right_text(IDS, COUNT), right_tokens(IDS, COUNT))


async def test_usage_counts_the_answer_once_whatever_it_took(stand: Stand) -> None:
    break_all(stand, "reset", 20, times=2)
    got = await stream(stand.client, COMPLETIONS, completion(stream_options={"include_usage": True}))
    usage = got.chunks[-1]["usage"]
    assert got.chunks[-1]["choices"] == []
    assert usage == {"prompt_tokens": len(IDS), "completion_tokens": COUNT, "total_tokens": len(IDS) + COUNT}


@pytest.mark.parametrize("loss", ["lose-finish", "lose-done"])
async def test_a_rank_that_dies_behind_the_last_token_changes_nothing(stand: Stand, loss: str) -> None:
    for rank in stand.ranks.values():
        rank.faults.append(Fault(loss, COUNT * 10))
    got = await stream(stand.client, COMPLETIONS, completion(stream_options={"include_usage": True}))
    assert (got.text, got.finishes, got.done) == (right_text(IDS, COUNT), ["length"], True)
    assert got.chunks[-1]["usage"]["completion_tokens"] == COUNT


async def test_a_chat_without_a_limit_continues_to_the_end_of_the_context(stand: Stand) -> None:
    break_all(stand, "reset", 5)
    body = chat()
    del body["max_tokens"]
    for rank in stand.ranks.values():
        rank.step_s = 0
    got = await stream(stand.client, CHAT, body)
    room = 2048 - len(chat_prompt(MESSAGES))
    assert got.text == right_text(chat_prompt(MESSAGES), room)


async def test_a_rank_that_the_file_drops_is_left_though_it_hangs_and_says_nothing(stand: Stand) -> None:
    for rank in stand.ranks.values():
        rank.faults.append(Fault("stall", 10))
    stand.ranks[1].faults.clear()
    stand.ranks[1].load = (50, 0)
    await until(lambda: _running(stand, 1, 50))
    task = asyncio.create_task(stream(stand.client, COMPLETIONS, completion()))
    await until(lambda: stand.ranks[0].active == 1)
    dead = stand.ranks.pop(0)
    stand.write()
    got = await task
    assert (got.text, got.done) == (right_text(IDS, COUNT), True)
    await until(lambda: dead.cancelled == 1)
    await dead.kill()


async def _running(stand: Stand, slot: int, count: int) -> bool:
    return any(rank["slot"] == slot and rank["running"] == count for rank in (await stand.status())["ranks"])


async def test_a_new_incarnation_at_the_same_address_gets_none_of_the_old_ones_requests(stand: Stand) -> None:
    for rank in stand.ranks.values():
        rank.faults.append(Fault("stall", 3))
    task = asyncio.create_task(stream(stand.client, COMPLETIONS, completion()))
    await until(lambda: any(rank.active for rank in stand.ranks.values()))
    for rank in stand.ranks.values():
        rank.faults.clear()
    stand.incarnations = {0: 2, 1: 2}
    stand.write()
    assert (await task).text == right_text(IDS, COUNT)


# --- what cannot be continued -------------------------------------------------------------------------------------------

OPAQUE = [
    {"n": 2},
    {"logprobs": 1},
    {"echo": True},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"presence_penalty": 0.5},
    {"bad_words": ["x"]},
    {"a_field_of_tomorrow": 1},
    {"prompt": ["one prompt of two", "and the second"]},
]


@pytest.mark.parametrize("more", OPAQUE, ids=lambda more: next(iter(more)))
async def test_a_stream_that_cannot_be_continued_ends_in_one_error_and_no_done(stand: Stand, more: Any) -> None:
    if "prompt" in more:
        more = {"n": 2}
    break_all(stand, "hangup", 20)
    got = await stream(stand.client, COMPLETIONS, completion(**more))
    assert got.error is not None
    assert got.error["code"] == "rank_lost"
    assert next(iter(more)) in got.error["message"]
    assert not got.done
    assert right_text(IDS, COUNT).startswith(got.text)


@pytest.mark.parametrize("more", [{"n": 2}, {"logprobs": 1}, {"presence_penalty": 0.5}], ids=str)
@pytest.mark.parametrize("loss", ["abort", "engine-dead", "reset"])
async def test_a_whole_answer_that_cannot_be_continued_is_asked_for_again(stand: Stand, more: Any, loss: str) -> None:
    break_all(stand, loss, 0)
    answer = await ask(stand, COMPLETIONS, completion(**more))
    assert [c["text"] for c in answer["choices"]] == [right_text(IDS, COUNT)] * more.get("n", 1)


@pytest.mark.parametrize("loss", ["abort", "error-event", "reset"])
async def test_a_stream_that_cannot_be_continued_starts_again_while_its_client_has_nothing(
    stand: Stand, loss: str
) -> None:
    break_all(stand, loss, 0)
    got = await stream(stand.client, COMPLETIONS, completion(logprobs=1))
    assert (got.text, got.done, got.error) == (right_text(IDS, COUNT), True, None)


async def test_a_chat_that_is_lost_within_its_reasoning_says_so(stand: Stand) -> None:
    for rank in stand.ranks.values():
        rank.reasoning = 25
    break_all(stand, "hangup", 20)
    got = await stream(stand.client, CHAT, chat())
    assert got.error is not None
    assert "reasoning" in got.error["message"]
    assert not got.done


async def test_a_chat_that_is_lost_behind_its_reasoning_goes_on(stand: Stand) -> None:
    for rank in stand.ranks.values():
        rank.reasoning = 10
    break_all(stand, "hangup", 30)
    got = await stream(stand.client, CHAT, chat())
    said = "".join(choice["delta"].get("reasoning") or "" for choice in got.choices) + got.text
    assert (said, got.done) == (right_text(chat_prompt(MESSAGES), COUNT), True)


async def test_a_whole_chat_that_is_lost_within_its_reasoning_is_asked_for_again(stand: Stand) -> None:
    for rank in stand.ranks.values():
        rank.reasoning = 25
    break_all(stand, "hangup", 20)
    answer = await ask(stand, CHAT, chat())
    message = answer["choices"][0]["message"]
    assert message["reasoning"] + message["content"] == right_text(chat_prompt(MESSAGES), COUNT)


async def test_a_chat_with_tools_or_pictures_is_passed_on_untouched(stand: Stand) -> None:
    picture = [{"type": "image_url", "image_url": {"url": "data:"}}]
    for more in ({"tools": [{"type": "function"}]}, {"messages": [{"role": "user", "content": picture}]}):
        body = {"model": MODEL, "stream": True, **chat(**more)}
        async with stand.client.stream("POST", CHAT, json=body) as response:
            await response.aread()
        sent = [b for rank in stand.ranks.values() for b in rank.asked(CHAT)]
        assert body in sent


async def test_ids_that_the_client_has_are_never_contradicted(stand: Stand) -> None:
    """A character needs two tokens; the first was shown, and the next rank draws another one."""
    at = next(n for n, token in enumerate(right_tokens(IDS, COUNT)) if token >= 0xC0 and n > 3)
    stand.ranks[0].faults.append(Fault("hangup", at + 1))
    stand.ranks[1].load = (90, 0)
    stand.ranks[1].bend = 1
    await until(lambda: _running(stand, 1, 90))
    got = await stream(stand.client, COMPLETIONS, completion(return_token_ids=True))
    assert got.error is not None
    assert "goes on differently" in got.error["message"]
    assert got.ids == right_tokens(IDS, at + 1)


async def test_a_whole_sampled_answer_with_a_seed_is_drawn_from_the_start_again(stand: Stand) -> None:
    break_all(stand, "hangup", 30)
    await ask(stand, COMPLETIONS, completion(seed=7, temperature=1.0))
    sent = [b for rank in stand.ranks.values() for b in rank.asked(COMPLETIONS)]
    assert [(b["prompt"], b["seed"]) for b in sent] == [(PROMPT, 7)] * 2


async def test_a_sampled_stream_with_a_seed_goes_on_with_other_numbers_than_it_began_with(stand: Stand) -> None:
    break_all(stand, "hangup", 30)
    await stream(stand.client, COMPLETIONS, completion(seed=7, temperature=1.0, min_tokens=35))
    first, rest = sorted(
        (b for rank in stand.ranks.values() for b in rank.asked(COMPLETIONS)),
        key=lambda b: b["max_tokens"],
        reverse=True,
    )
    given = len(rest["prompt"]) - len(IDS)
    assert (first["seed"], rest["seed"]) == (7, 7 + given)
    assert (rest["min_tokens"], rest["max_tokens"]) == (35 - given, COUNT - given)


async def test_a_request_of_the_client_that_fails_is_its_own_answer_and_not_tried_elsewhere(stand: Stand) -> None:
    break_all(stand, "bad", 0)
    answer = await stand.client.post(COMPLETIONS, json={"model": MODEL, **completion()})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no such thing")
    for rank in stand.ranks.values():
        rank.faults = [Fault("bad-event", 5)]
    got = await stream(stand.client, COMPLETIONS, completion())
    assert got.error is not None
    assert got.error["message"] == "mine"
    assert sum(len(rank.asked(COMPLETIONS)) for rank in stand.ranks.values()) == 2


async def test_a_body_that_is_no_json_gets_the_ranks_own_words(stand: Stand) -> None:
    answer = await stand.client.post(COMPLETIONS, content=b"{not json", headers={"content-type": "application/json"})
    assert answer.status_code == 400


async def test_an_undisturbed_stream_is_what_the_rank_said_but_for_ids_that_were_not_asked_for(stand: Stand) -> None:
    body = {"model": MODEL, "stream": True, **completion()}
    through = await stream(stand.client, COMPLETIONS, completion())
    direct = Streamed()
    async for _ in streaming(stand.client, stand.ranks[0].url + COMPLETIONS, body, direct):
        pass
    for chunk in [*through.chunks, *direct.chunks]:
        chunk["id"], chunk["created"] = "", 0
    assert through.chunks == direct.chunks
    assert json.dumps(through.chunks) == json.dumps(direct.chunks)
