"""What a client sees over HTTP: answers, refusals, and what happens when it walks away."""

import asyncio
import json

import pytest

from elastic.gateway.text import load_tokenizer
from tests.gateway import gateway_fakes as fakes
from tests.gateway.gateway_fakes import MODEL, right_answer, until

PROMPT = [1, 2, 3]


def text_of(tokens: list[int]) -> str:
    return "".join(fakes.ALPHABET[token] for token in tokens)


async def test_whole_answer_has_the_openai_form(gateway):
    group = await gateway(1)
    response = await group.complete(max_tokens=8, return_token_ids=False)
    assert response.status_code == 200
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {"index": 0, "text": text_of(right_answer(PROMPT, 8)), "logprobs": None, "finish_reason": "length"}
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11},
    }


async def test_streamed_answer_parses_as_openai_clients_parse_it(gateway):
    group = await gateway(1)
    async with group.stream(max_tokens=8, stream_options={"include_usage": True}) as stream:
        await stream.rest()
        assert stream.response.headers["content-type"].startswith("text/event-stream")
    assert stream.done
    assert len({chunk["id"] for chunk in stream.chunks}) == 1
    assert {chunk["object"] for chunk in stream.chunks} == {"text_completion"}
    assert (stream.tokens, stream.text) == (right_answer(PROMPT, 8), text_of(right_answer(PROMPT, 8)))
    assert [choice["finish_reason"] for choice in stream.choices] == [None] * (len(stream.choices) - 1) + ["length"]
    assert stream.choices[0]["prompt_token_ids"] == PROMPT
    *texts, last = stream.chunks
    assert all(chunk["usage"] is None for chunk in texts)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}


async def test_text_and_token_prompts_are_the_same_request(gateway):
    group = await gateway(1)
    ids = [fakes.ALPHABET.index(char) for char in "abc"]
    for prompt in ("abc", ["abc"], ids, [ids]):
        choice = (await group.complete(prompt=prompt, max_tokens=5)).json()["choices"][0]
        assert choice["prompt_token_ids"] == ids
        assert choice["token_ids"] == right_answer(ids, 5)


async def test_stop_string_ends_the_answer_and_frees_the_rank(gateway):
    group = await gateway(1)
    group.ranks[0].step_s = 0.001
    whole = text_of(right_answer(PROMPT, 40))
    stop = whole[9:12]
    cut = whole[: whole.index(stop)]
    response = await group.complete(max_tokens=400, stop=[stop, "~"])
    choice = response.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (cut, "stop")
    assert choice["token_ids"] == right_answer(PROMPT, len(cut) + 3)
    await until(lambda: group.ranks[0].cancels, "the rank is told to stop")
    async with group.stream(max_tokens=400, stop=stop) as stream:
        await stream.rest()
    assert (stream.text, stream.finish, stream.done) == (cut, "stop", True)
    assert stream.tokens == choice["token_ids"]


async def test_end_token_stops_unless_ignored(gateway):
    group = await gateway(1)
    group.ranks[0].token = lambda prompt, at: fakes.EOS if at == 4 else fakes.right_token(prompt, at)
    response = await group.complete(max_tokens=8)
    choice = response.json()["choices"][0]
    assert choice["token_ids"] == [*right_answer(PROMPT, 4), fakes.EOS]
    assert (choice["text"], choice["finish_reason"]) == (text_of(right_answer(PROMPT, 4)), "stop")
    response = await group.complete(max_tokens=8, ignore_eos=True)
    choice = response.json()["choices"][0]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (8, "length")


async def test_streamed_text_never_shows_half_a_character(gateway):
    group = await gateway(1)
    ids = [fakes.ALPHABET.index(char) for char in ("Ã", "©", "â", "Ĥ", "¬", "z")]  # é € z, byte by byte
    group.ranks[0].token = lambda _, at: ids[at]
    async with group.stream(max_tokens=6) as stream:
        await stream.rest()
    assert stream.text == "é€z"
    assert not any("\ufffd" in choice["text"] for choice in stream.choices)
    assert stream.tokens == ids


async def test_line_ends_in_an_answer_do_not_break_its_events(gateway):
    group = await gateway(1)
    said = "a\n\r\u0085\u2028\u2029\x0b\x0c\x1c\\"
    ids = load_tokenizer(group.checkpoint).encode(said).ids
    group.ranks[0].token = lambda _, at: ids[at]
    async with group.stream(max_tokens=len(ids)) as stream:
        await stream.rest()
    assert stream.text == said
    assert stream.done


async def test_sampled_request_without_a_seed_gets_one_and_a_given_one_is_kept(gateway):
    group = await gateway(1)
    for body in ({}, {}, {"seed": 5}, {"seed": -1}):
        assert (await group.complete(temperature=1.0, max_tokens=1, **body)).status_code == 200
    first, second, given, negative = (submit.sampling.seed for submit in group.ranks[0].submits)
    assert first != second
    assert given == 5
    assert negative >= 0


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_goes_away_frees_its_rank(gateway, stream):
    group = await gateway(1)
    group.ranks[0].step_s = 0.002
    asking = asyncio.create_task(group.complete(max_tokens=500, stream=stream))
    await until(lambda: group.ranks[0].emitted > 3, "the rank works on it")
    asking.cancel()
    await until(lambda: group.ranks[0].cancels, "the rank is told to forget it")
    assert group.ranks[0].cancels[0].request == group.ranks[0].submits[0].request
    status = await group.status()
    assert (status.in_flight, status.failed) == (0, 0)


async def test_full_gateway_says_429_and_when_to_come_back(gateway):
    group = await gateway(1, max_queued=2)
    group.ranks[0].gate.clear()
    held = [asyncio.create_task(group.complete(max_tokens=2)) for _ in range(2)]
    await until(lambda: len(group.ranks[0].submits) == 2, "the gateway is full")
    response = await group.complete()
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "queue_full"
    group.ranks[0].gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]


async def test_gateway_that_never_heard_of_a_rank_says_503(gateway):
    group = await gateway()
    response = await group.complete()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
    assert int(response.headers["retry-after"]) >= 1
    health = await group.client.get("/health")
    assert (health.status_code, health.json()["ranks"]) == (503, 0)


async def test_nobody_heals_in_time_and_the_client_gets_one_503(gateway):
    group = await gateway(1, request_timeout_s=0.4)
    await group.ranks[0].die()
    response = await group.complete()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_ranks")
    assert "retry-after" in response.headers
    assert (await group.status()).failed == 1


async def test_rank_that_falls_silent_ends_a_stream_with_an_error_event(gateway):
    group = await gateway(1, request_timeout_s=0.4)
    group.ranks[0].mangle = lambda emitted: [emitted] if emitted.start < 3 else []
    async with group.stream(max_tokens=10) as stream:
        await stream.rest()
    assert stream.tokens == right_answer(PROMPT, 3)
    assert stream.error is not None
    assert (stream.error["code"], stream.error["type"]) == ("timeout", "server_error")
    assert not stream.done, "a part must not look like the whole"


async def test_prompt_that_no_rank_can_hold_is_refused_with_the_ranks_words(gateway):
    group = await gateway(1)
    group.ranks[0].refuse = "prompt and answer need 900 positions, 256 is the limit"
    for stream in (False, True):
        response = await group.complete(stream=stream)
        assert response.status_code == 400
        assert response.json()["error"] == {
            "message": group.ranks[0].refuse,
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "rejected",
        }


BAD = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [fakes.VOCAB]}, "prompt"),
    ({"prompt": [1] * fakes.MAX_POSITION}, "prompt"),
    ({"prompt": "a" * 100_000}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"n": 2}, "n"),
    ({"n": 0}, "n"),
    ({"n": "1"}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"echo": True}, "echo"),
    ({"logprobs": 0}, "logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": "x"}, "frequency_penalty"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"model": 5}, "model"),
]


async def test_every_bad_field_is_refused_by_name(gateway):
    group = await gateway(1)
    for body, param in BAD:
        response = await group.complete(**body)
        assert response.status_code == 400, body
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param, (body, error)
        assert param in error["message"]
        assert error["type"] == "invalid_request_error"
    for unsupported in ("n", "best_of", "suffix", "echo", "logprobs"):
        body = next(body for body, param in BAD if param == unsupported)
        assert "unsupported" in (await group.complete(**body)).json()["error"]["message"]
    assert not group.ranks[0].submits
    assert (await group.complete(max_tokens=2)).status_code == 200


NO_JSON = [b"", b"{", b"[]", b"null", b"5", b'{"prompt": "\\ud800"}', b"\xff\xfe", b"[" * 5000, b'{"prompt": NaN}']


async def test_body_that_is_no_json_object_is_a_400(gateway):
    group = await gateway(1)
    for body in NO_JSON:
        response = await group.client.post("/v1/completions", content=body)
        assert response.status_code == 400, body
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_missing_prompt_unknown_model_and_huge_body(gateway):
    group = await gateway(1)
    response = await group.client.post("/v1/completions", json={"model": MODEL})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    response = await group.complete(model="other")
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    response = await group.complete(prompt="a" * (5 << 20))
    assert response.status_code == 413


async def test_nulls_and_fields_that_nobody_knows_are_ignored(gateway):
    group = await gateway(1)
    nulls = dict.fromkeys(("stop", "seed", "n", "logprobs", "suffix", "best_of", "echo", "stream", "stream_options"))
    response = await group.complete(
        max_tokens=3, top_k=5, user="me", neutral=[1], n=1, presence_penalty=0, logit_bias={}
    )
    assert response.status_code == 200
    assert (await group.complete(max_tokens=3, **nulls)).status_code == 200


async def test_unknown_paths_and_methods_have_the_error_envelope(gateway):
    group = await gateway()
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v1/nothing", 404)):
        response = await group.client.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_models_health_and_metrics_tell_what_happened(gateway):
    group = await gateway(2)
    await group.complete(max_tokens=4)
    await group.complete(max_tokens=-4)
    models = (await group.client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == [MODEL]
    health = await group.client.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok", "ranks": 2, "in_flight": 0})
    lines = (await group.client.get("/metrics")).text.splitlines()
    for line in (
        'elastic_gateway_requests_total{outcome="completed"} 1.0',
        'elastic_gateway_requests_total{outcome="invalid"} 1.0',
        'elastic_gateway_replays_total{cause="lost"} 0.0',
        "elastic_gateway_tokens_total 4.0",
        "elastic_gateway_in_flight 0.0",
        "elastic_gateway_queued 0.0",
        "elastic_gateway_routes 2.0",
        "elastic_gateway_ttft_seconds_count 1.0",
        "elastic_gateway_queue_seconds_count 1.0",
        "elastic_gateway_itl_seconds_count 3.0",
    ):
        assert line in lines


async def test_requests_spread_over_the_ranks(gateway):
    group = await gateway(3)
    for rank in group.ranks.values():
        rank.gate.clear()
    asking = [asyncio.create_task(group.complete(max_tokens=2)) for _ in range(9)]
    await until(lambda: sum(len(rank.submits) for rank in group.ranks.values()) == 9, "all are placed")
    assert (await group.status()).per_slot == {0: 3, 1: 3, 2: 3}
    for rank in group.ranks.values():
        rank.gate.set()
    await asyncio.gather(*asking)


async def test_client_that_does_not_read_gets_the_whole_answer_later(gateway):
    group = await gateway(1)
    async with group.stream(max_tokens=400) as stream:
        await until(lambda: group.ranks[0].emitted == 400, "the rank is done while the client sleeps")
        await stream.rest()
    assert stream.tokens == right_answer(PROMPT, 400)


async def test_half_a_request_and_then_silence_harms_nobody(gateway):
    group = await gateway(1)
    host, port = group.client.base_url.host, group.client.base_url.port
    _, writer = await asyncio.open_connection(host, port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{" + json.dumps("x").encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await group.complete(max_tokens=2)).status_code == 200
    assert (await group.status()).accepted == 1
