"""Servers that answer anything: what they send never crashes the daemon or the router, holds up nobody for longer than its
deadline, and is never taken for more than it proves."""

import asyncio
import contextlib
import copy
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.errors import ElasticError
from healer.targets.vllm.endpoints import Endpoints, Removal
from healer.targets.vllm.machine import State
from healer.targets.vllm.plan import Do, Facts, decide
from healer.targets.vllm.records import Held, Role
from healer.targets.vllm.signals import beats
from healer.targets.vllm.watch import RankWatch
from tests.vllm.router_fakes import FakeRank, right_text, right_tokens
from tests.vllm.router_stand import Stand, stream, until

PROMPT = (1, 2, 3)
DEADLINE_S = 0.4
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
NEST = b"[" * 100_000

Calls = dict[str, Callable[[Endpoints], Awaitable[Any]]]
CALLS: Calls = {
    "health": lambda rank: rank.health(deadline_s=DEADLINE_S),
    "gate": lambda rank: rank.gate(deadline_s=DEADLINE_S),
    "scaling": lambda rank: rank.scaling(deadline_s=DEADLINE_S),
    "scale": lambda rank: rank.scale(3, deadline_s=DEADLINE_S),
    "fault_status": lambda rank: rank.fault_status(deadline_s=DEADLINE_S),
    "retry": lambda rank: rank.retry("id", deadline_s=DEADLINE_S),
    "can_remove": lambda rank: rank.can_remove(deadline_s=DEADLINE_S),
    "remove": lambda rank: rank.remove(Removal("id", (1,)), deadline_s=DEADLINE_S),
    "reset_prefix_cache": lambda rank: rank.reset_prefix_cache(deadline_s=DEADLINE_S),
    "metrics": lambda rank: rank.metrics(deadline_s=DEADLINE_S),
    "version": lambda rank: rank.version(deadline_s=DEADLINE_S),
    "canary": lambda rank: rank.canary("m", PROMPT, 4, deadline_s=DEADLINE_S),
}
"""Every question that the target has."""


class Behaviour:
    """How a hostile server answers: pieces with a pause between them, then silence or the end."""

    def __init__(
        self, *pieces: bytes, pause_s: float = 0.0, repeat: bool = False, stay: bool = True, rst: bool = False
    ):
        self.pieces, self.pause_s, self.repeat, self.stay, self.rst = pieces, pause_s, repeat, stay, rst

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            while True:
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(self.pause_s)
                if not self.repeat:
                    break
            if self.stay:
                await reader.read()
        if self.rst:
            writer.transport.abort()
        writer.close()


def whole(body: bytes, more: bytes = b"") -> bytes:
    return HEAD + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


BEHAVIOURS = {
    "accepts and says nothing": Behaviour(),
    "closes at once": Behaviour(stay=False),
    "resets": Behaviour(stay=False, rst=True),
    "half a status line": Behaviour(b"HTTP/1.1 2"),
    "a head without an end": Behaviour(b"HTTP/1.1 200 OK\r\nX: ", b"x" * 1000, repeat=True),
    "continues for ever": Behaviour(b"HTTP/1.1 100 Continue\r\n\r\n", repeat=True),
    "a body shorter than it said": Behaviour(HEAD + b"Content-Length: 1000\r\n\r\n{", stay=False),
    "a byte at a time": Behaviour(HEAD + b"Content-Length: 1000\r\n\r\n", b"{", pause_s=0.05, repeat=True),
    "an endless body": Behaviour(CHUNKED, *[b"100000\r\n" + b" " * 0x100000 + b"\r\n"] * 20),
    "wrong chunks": Behaviour(CHUNKED + b"zz\r\nwhat\r\n"),
    "a bomb": Behaviour(whole(gzip.compress(b" " * (64 << 20)), b"Content-Encoding: gzip\r\n")),
    "another protocol": Behaviour(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "a page": Behaviour(whole(b"<html>Bad Gateway</html>")),
    "an error with status 200": Behaviour(whole(b'{"error":{"message":"EngineCore died","code":500}}')),
    "deep JSON": Behaviour(whole(NEST)),
    "deep JSON in a field": Behaviour(whole(b'{"message":' + NEST)),
    "deep JSON in an error": Behaviour(b"HTTP/1.1 400 X\r\nContent-Length: 100000\r\n\r\n" + b'{"a":' * 20_000),
    "a redirect": Behaviour(b"HTTP/1.1 302 X\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"),
    "no JSON number": Behaviour(whole(b'{"is_scaling_elastic_ep":false,"requested_data_parallel_size":1e999}')),
}


@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_every_question_ends_in_its_time_and_in_our_own_errors(name: str) -> None:
    listener = await asyncio.start_server(BEHAVIOURS[name].serve, "127.0.0.1", 0)
    rank = Endpoints(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        answers = await asyncio.gather(*(call(rank) for call in CALLS.values()), return_exceptions=True)
        assert loop.time() - began < 3 * DEADLINE_S + 5.0
        for question, found in zip(CALLS, answers, strict=True):
            if isinstance(found, BaseException):
                assert isinstance(found, ElasticError), (question, found)
            else:
                assert question in ("health", "gate", "metrics") or not found, f"{question} believed it: {found}"
    finally:
        await rank.aclose()
        listener.close()


# --- mutated answers --------------------------------------------------------------------------------------------------

IDLE = {
    "is_scaling_elastic_ep": False,
    "phase": "idle",
    "epoch": None,
    "error": None,
    "requested_data_parallel_size": None,
}
FAULTS = {"schema_version": 1, "total_engines": 1, "engines": [{"id": 0, "status": "healthy"}]}
METRICS = (
    'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
    'vllm:generation_tokens_total{engine="0"} 100.0\n'
)
CANARY = {"choices": [{"text": "x", "finish_reason": "length", "token_ids": [1, 2, 3, 4]}]}
SOUND: dict[str, Any] = {
    "/health": "",
    "/is_scaling_elastic_ep": IDLE,
    "/metrics": METRICS,
    "/fault_tolerance/status": FAULTS,
    "/v1/models": {"data": []},
    "/v1/completions": CANARY,
}
ODD = st.sampled_from([None, True, -1, 0, 2**63, 1.5, "", "x", "healthy ", [], {}, [[]], [None], {"a": 1}])
NUMBERS = st.sampled_from(["NaN", "Inf", "-Inf", "-5", "1e400", "1e300", "", "x", "0x10", "1_0", "9" * 400])


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, int, bytes]:
    """Of one endpoint: its path, a status and a body that vLLM 0.33 does not send."""
    path = draw(st.sampled_from(sorted(SOUND)))
    body = copy.deepcopy(SOUND[path])
    status = draw(st.sampled_from([200, 200, 200, 200, 204, 301, 401, 404, 418, 500, 502]))
    how = draw(st.sampled_from(["field", "drop", "cut", "behind", "bytes", "number"]))
    if isinstance(body, dict) and how in ("field", "drop"):
        inner = body
        while draw(st.booleans()) and any(isinstance(v, list) and v and isinstance(v[0], dict) for v in inner.values()):
            inner = next(v[0] for v in inner.values() if isinstance(v, list) and v and isinstance(v[0], dict))
        key = draw(st.sampled_from(sorted(inner)))
        if how == "drop":
            del inner[key]
        else:
            inner[key] = draw(ODD)
    text = body if isinstance(body, str) else json.dumps(body)
    if how == "number" and path == "/metrics":
        line = draw(st.integers(0, 2))
        lines = text.splitlines()
        lines[line] = lines[line].rpartition(" ")[0] + " " + draw(NUMBERS)
        text = "\n".join(lines) + "\n"
    raw = text.encode()
    if how == "cut":
        raw = raw[: draw(st.integers(0, len(raw)))]
    elif how == "behind":
        raw += draw(st.sampled_from([b"}", b"\0", b"\xff", raw or b"{}", b"[" * 9999]))
    elif how == "bytes":
        raw = draw(st.one_of(st.binary(max_size=60), st.just(NEST)))
    return path, status, raw


def watch(slot: int, answers: dict[str, tuple[int, bytes]]) -> RankWatch:
    def answer(request: httpx.Request) -> httpx.Response:
        status, body = answers.get(request.url.path, (404, b""))
        return httpx.Response(status, stream=httpx.ByteStream(body))

    endpoints = Endpoints(f"http://rank{slot}", transport=httpx.MockTransport(answer))
    return RankWatch(
        Held(slot, 0, slot, 10 + slot, 1, f"http://rank{slot}", Role.LIVE), endpoints, None, stall_after_s=9
    )


def said(body: Any) -> tuple[int, bytes]:
    return 200, (body if isinstance(body, str) else json.dumps(body)).encode()


async def judged(mutation: tuple[str, int, bytes] | None) -> tuple[Do, RankWatch, int]:
    """What is decided about two ranks that are to become three, when one of them answers like that; and how many beat."""
    sound = {path: said(body) for path, body in SOUND.items()}
    bent = dict(sound)
    if mutation is not None:
        bent[mutation[0]] = mutation[1:]
    ranks = [watch(0, sound), watch(1, bent)]
    try:
        for _ in range(2):
            for rank in ranks:
                await rank.poll(deadline_s=5, scaling=False)
                await rank.sing("m", PROMPT, 4, deadline_s=5, reference=(1, 2, 3, 4))
        now = max(rank.look.at for rank in ranks if rank.look is not None)
        seen = tuple(rank.facts(now) for rank in ranks)
        step = decide(Facts(state=State.SERVING, now=now, ranks=seen, target=(0, 1, 2), lost={}))
        return step.do, ranks[1], len(beats(ranks, epoch=1, phase="serving", now=now, scaling=False))
    finally:
        for rank in ranks:
            await rank.aclose()


def test_the_answers_that_are_mutated_are_good_ones() -> None:
    do, _, count = asyncio.run(judged(None))
    assert (do, count) == (Do.GROW, 2)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated())
def test_no_mutated_answer_makes_healer_act_or_silences_the_other_ranks(mutation: tuple[str, int, bytes]) -> None:
    do, rank, count = asyncio.run(judged(mutation))
    assert do in (Do.NOTHING, Do.GROW)
    assert count >= 1, "the sound rank beats, whatever the other one says"
    if do == Do.GROW:
        # then what it said must still have meant that it is sound
        look = rank.look
        assert look is not None
        assert (look.health, look.dead, look.unhealthy) == (True, False, False)
        assert look.scaling is not None
        assert not look.scaling.is_scaling_elastic_ep
        assert rank.canary is not None
        assert (rank.canary.ok, rank.canary.tokens) == (True, (1, 2, 3, 4))


# --- the router -------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "id": "x",
    "object": "text_completion",
    "created": 1,
    "model": "tiny",
    "choices": [{"index": 0, "text": "a", "finish_reason": None, "token_ids": [97], "prompt_token_ids": None}],
}


class Liar(FakeRank):
    """Answers a stream with `said`, and then as it should."""

    said = b""

    async def _stream(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any], gone: Any) -> None:
        if not self.said:
            return await super()._stream(writer, path, body, gone)
        told, self.said = self.said, b""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + told)
        await writer.drain()
        raise ConnectionError


@contextlib.asynccontextmanager
async def lying(tmp_path: Path) -> AsyncIterator[tuple[Stand, Liar]]:
    """A router before one rank that lies once."""
    stand, liar = Stand(tmp_path), Liar()
    await liar.start()
    stand.ranks[0] = liar
    await stand.start(ranks=0)
    try:
        await stand.until_open(1)
        yield stand, liar
    finally:
        await stand.aclose()


def events() -> list[bytes]:
    found = []
    for key in ("choices", "usage", "id"):
        for value in (None, 5, "x", [5], [None], {"a": 1}, True):
            found.append(json.dumps(GOOD | {key: value}))
    for key in ("text", "token_ids", "finish_reason", "prompt_token_ids"):
        for value in (5, {"a": 1}, [None], ["x"], [1.5], True):
            found.append(json.dumps(GOOD | {"choices": [GOOD["choices"][0] | {key: value}]}))
    found += ["5", "null", '"x"', "{", "[" * 20_000, '{"choices":[' + "[" * 20_000, "\udcff"]
    return [b"data: " + text.encode(errors="surrogateescape") + b"\n\n" for text in found]


async def test_no_event_of_a_stream_whatever_it_holds_costs_a_client_its_answer(tmp_path: Path) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    async with lying(tmp_path) as (stand, liar):
        for streams in (True, False):
            for told in events():
                liar.said = told
                body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "model": "tiny"}
                if streams:
                    got = await stream(stand.client, "/v1/completions", body)
                    text, error = got.text, got.error
                else:
                    answer = await stand.client.post("/v1/completions", json=body)
                    error = answer.json().get("error")
                    text = "" if error else answer.json()["choices"][0]["text"]
                # a chunk that is vLLM's own shape may be believed; then the client has one error, or more text
                assert error is not None or text.endswith(right_text(prompt, 6)) or _believed(told), (told, text, error)
        assert (await stand.client.get("/health")).status_code == 200


def _believed(told: bytes) -> bool:
    chunk = json.loads(told[6:].decode())
    return isinstance(chunk, dict) and chunk["choices"] == GOOD["choices"]


@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_a_hostile_rank_beside_a_good_one_costs_no_request(tmp_path: Path, name: str) -> None:
    listener = await asyncio.start_server(BEHAVIOURS[name].serve, "127.0.0.1", 0)
    bad = FakeRank()
    bad.port = listener.sockets[0].getsockname()[1]
    stand = Stand(tmp_path)
    stand.settings["limits"] = {"silence_s": 0.5}
    await stand.add(0)
    stand.ranks[1] = bad
    try:
        await stand.start(ranks=0)

        async def open_() -> bool:
            return any(rank["open"] for rank in (await stand.status())["ranks"])

        await until(open_)
        prompt = list(b"hello there")
        for _ in range(3):
            got = await stream(stand.client, "/v1/completions", {"prompt": prompt, "max_tokens": 5, "temperature": 0})
            assert (got.error, got.text) == (None, right_text(prompt, 5)), name
            assert len(right_tokens(prompt, 5)) == 5
    finally:
        await stand.aclose()
        listener.close()
