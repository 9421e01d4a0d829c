"""What the client has, over any chunks, stop strings and deaths; and which requests can be continued at all."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healer.router.plan import Kind, continued_body, find_obstacle, first_body, read_request
from healer.router.probe import parse_load
from healer.router.transcript import Diverged, Transcript
from tests.vllm.router_fakes import Detokenizer, decode

ALPHABET = "ab cÄ你🙂"
PROMPT = list(b"<prompt>")


def run(
    answer: list[int], stops: list[str], shown_stop: bool, cuts: list[int], deaths: list[int]
) -> tuple[str, list[int], int]:
    """Text and ids as the client has them, and how many tokens the ranks made, over ranks that die after so many tokens."""
    transcript = Transcript(stops=stops, stops_shown=shown_stop, ids_shown=True)
    transcript.prompt = PROMPT
    said, made = "", 0
    ids: list[int] = []
    for life in [*deaths, 10_000]:
        at = transcript.at
        while at and decode(transcript.tail(at, 16)).endswith("\ufffd"):
            at -= 1
        transcript.resume(at)
        rank = Detokenizer([*PROMPT, *transcript.tokens], stops, shown_stop)
        rest = answer[at:]
        chunk, held = [], ""
        for position, token in enumerate(rest):
            made += 1
            if position >= life:
                break
            text, hit = rank.add(token)
            final = hit is not None or position == len(rest) - 1
            if final and hit is None:
                text += rank.rest()
            chunk.append(token)
            held += text
            size = cuts[made % len(cuts)]
            if len(chunk) >= size or final:
                piece = transcript.feed(held, chunk, final=final)
                said, ids = said + piece.text, [*ids, *piece.token_ids]
                chunk, held = [], ""
            if final:
                return said, ids, made
    raise AssertionError("the last rank lives")


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(ALPHABET, min_size=1, max_size=40),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=6), max_size=3),
    shown_stop=st.booleans(),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    deaths=st.lists(st.integers(0, 30), max_size=5),
)
def test_whatever_the_chunks_the_stops_and_the_deaths_the_client_has_the_undisturbed_answer(
    text: str, stops: list[str], shown_stop: bool, cuts: list[int], deaths: list[int]
) -> None:
    answer = list(text.encode())
    undisturbed, right_ids, _ = run(answer, stops, shown_stop, [1], [])
    said, ids, _ = run(answer, stops, shown_stop, cuts, deaths)
    assert said == undisturbed
    assert ids == right_ids


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab cd", min_size=10, max_size=40), death=st.integers(1, 39))
def test_without_stop_strings_no_shown_token_is_generated_twice(text: str, death: int) -> None:
    answer = list(text.encode())
    _, _, made = run(answer, [], False, [1], [death])
    assert made <= len(answer) + 1


def test_a_token_that_contradicts_what_the_client_has_is_noticed() -> None:
    transcript = Transcript(ids_shown=True)
    transcript.prompt = PROMPT
    transcript.feed("", [0xC3])
    transcript.resume(0)
    with pytest.raises(Diverged):
        transcript.feed("x", [120])
    unseen = Transcript()
    unseen.prompt = PROMPT
    unseen.feed("", [0xC3])
    unseen.resume(0)
    assert unseen.feed("x", [120]).text == "x"


@pytest.mark.parametrize(
    ("kind", "body", "word"),
    [
        (Kind.COMPLETION, {"prompt": "x"}, ""),
        (Kind.COMPLETION, {"prompt": [1, 2], "n": 1, "best_of": 1, "echo": False, "logprobs": None}, ""),
        (Kind.COMPLETION, {"prompt": ["x"], "response_format": {"type": "text"}, "presence_penalty": 0.0}, ""),
        (Kind.COMPLETION, {"prompt": "x", "logprobs": 0}, "logprobs"),
        (Kind.COMPLETION, {"prompt": ["x", "y"]}, "prompt"),
        (Kind.COMPLETION, {"prompt": "x", "n": True}, "n"),
        (Kind.COMPLETION, {"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        (Kind.COMPLETION, {"prompt": "x", "stop": [1]}, "stop"),
        (Kind.COMPLETION, {"prompt": "x", "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        (Kind.CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [], "tool_choice": "auto"}, ""),
        (Kind.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, ""),
        (Kind.CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        (Kind.CHAT, {"messages": "x"}, "messages"),
        (Kind.CHAT, {"messages": [], "logprobs": True}, "logprobs"),
        (Kind.CHAT, {"messages": [], "tools": [{}], "tool_choice": "none"}, "tools"),
    ],
)
def test_what_can_be_continued(kind: Kind, body: dict[str, object], word: str) -> None:
    assert word in find_obstacle(kind, body)
    assert bool(word) == bool(find_obstacle(kind, body))


def test_a_continuation_carries_the_sampling_and_drops_what_made_the_prompt() -> None:
    raw = (
        b'{"model":"m","messages":[],"max_completion_tokens":9,"temperature":0.5,"stop":"x","chat_template":"t","seed":3,'
        b'"request_id":"r","min_tokens":4,"cache_salt":"s"}'
    )
    request = read_request(Kind.CHAT, raw)
    assert request.max_tokens == 9
    assert json.loads(continued_body(request, [1, 2], [3], max_tokens=8, attempt=2)) == {
        "model": "m",
        "temperature": 0.5,
        "stop": "x",
        "cache_salt": "s",
        "prompt": [1, 2, 3],
        "max_tokens": 8,
        "min_tokens": 3,
        "seed": 4,
        "request_id": "r-2",
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_a_body_that_cannot_be_continued_is_sent_byte_for_byte() -> None:
    raw = b'{ "prompt" : "x", "n": 2 }'
    assert first_body(read_request(Kind.COMPLETION, raw)) == raw


def test_the_load_is_read_without_the_series_beside_it() -> None:
    text = (
        b"# HELP vllm:num_requests_running Number\n# TYPE vllm:num_requests_running gauge\n"
        b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 2.0\n'
        b'vllm:num_requests_waiting{engine="0"} 4.0\nvllm:num_requests_waiting_by_reason{reason="capacity"} 4.0\n'
        b'vllm:num_requests_waiting{engine="1"} NaN'
    )
    assert parse_load(text) == (5, 4)
    assert parse_load(b"\xff\x00 nonsense") == (0, 0)
