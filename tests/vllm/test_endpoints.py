import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import ElasticError, Retryable
from healer.targets.vllm.endpoints import BadAnswer, Endpoints, EngineStatus, Gate, Phase

PROMPT = (1, 2, 3)


@contextlib.asynccontextmanager
async def server(*pieces: bytes, pause_s: float = 0.0, stay: bool = False) -> AsyncIterator[Endpoints]:
    """A real socket that answers every request with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    await reader.readexactly(int(line.split(b":")[1]))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
            if stay:
                await reader.read()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    endpoints = Endpoints(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    try:
        yield endpoints
    finally:
        await endpoints.aclose()
        listener.close()


def answer(status: int, body: Any) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    return head.encode() + content


async def test_what_vllm_answers_is_understood() -> None:
    idle = {"is_scaling_elastic_ep": False, "phase": "idle", "epoch": None, "error": None}
    async with server(answer(200, idle | {"requested_data_parallel_size": None})) as rank:
        found = await rank.scaling(deadline_s=5)
        assert (found.is_scaling_elastic_ep, found.phase) == (False, Phase.IDLE)
    engine = {"id": 0, "status": "unhealthy", "fault_info": "RuntimeError"}
    async with server(answer(200, {"schema_version": 1, "total_engines": 1, "engines": [engine]})) as rank:
        status = await rank.fault_status(deadline_s=5)
        assert status is not None
        assert status.engines[0].status is EngineStatus.UNHEALTHY
    async with server(answer(404, {"detail": "Not Found"})) as rank:
        assert await rank.fault_status(deadline_s=5) is None
    async with server(answer(200, {"message": "Scaled to 3 data parallel engines"})) as rank:
        assert await rank.scale(3, deadline_s=5) == "Scaled to 3 data parallel engines"
    async with server(answer(200, b"")) as rank:
        assert await rank.health(deadline_s=5)


@pytest.mark.parametrize(
    ("status", "body", "gate"),
    [
        (200, {"object": "list"}, Gate.OPEN),
        (401, {"error": "Unauthorized"}, Gate.OPEN),
        (503, {"error": "The model is currently scaling. Please try again later."}, Gate.SCALING),
        (503, {"error": "This data-parallel rank has been retired and is awaiting shutdown."}, Gate.RETIRED),
        (503, {"error": "busy"}, Gate.SHUT),
    ],
)
async def test_a_shut_gate_is_told_from_a_retired_rank(status: int, body: Any, gate: Gate) -> None:
    async with server(answer(status, body)) as rank:
        assert await rank.gate(deadline_s=5) is gate


async def test_a_size_that_vllm_would_misread_is_never_sent() -> None:
    async with server(answer(200, {"message": "Scaled to True data parallel engines"})) as rank:
        with pytest.raises(ValueError, match="True"):
            await rank.scale(True, deadline_s=5)


async def test_an_aborted_request_with_status_200_does_not_pass_for_a_canary() -> None:
    for choice in (
        {"text": "half", "finish_reason": "abort", "token_ids": [1, 2]},
        {"text": "", "finish_reason": "length", "token_ids": []},
        {"text": "x", "finish_reason": None},
    ):
        async with server(answer(200, {"choices": [choice]})) as rank:
            with pytest.raises(BadAnswer, match="tokens"):
                await rank.canary("m", PROMPT, 4, deadline_s=5)
    async with server(answer(200, {"error": {"message": "EngineCore encountered an issue."}})) as rank:
        with pytest.raises(BadAnswer):
            await rank.canary("m", PROMPT, 4, deadline_s=5)


async def test_a_server_that_dribbles_or_never_ends_costs_no_more_than_the_deadline() -> None:
    head = b"HTTP/1.1 200 X\r\nContent-Length: 100000\r\n\r\n"
    loop = asyncio.get_running_loop()
    for pieces, pause_s, stay in (((head, *[b"x"] * 100), 0.05, False), ((head,), 0.0, True), ((), 0.0, True)):
        async with server(*pieces, pause_s=pause_s, stay=stay) as rank:
            began = loop.time()
            with pytest.raises(Retryable, match="no answer"):
                await rank.scaling(deadline_s=0.3)
            assert loop.time() - began < 5


async def test_an_endless_answer_is_cut_off() -> None:
    head = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    async with server(head, *[chunk] * 12) as rank:
        with pytest.raises(BadAnswer, match="longer"):
            await rank.metrics(deadline_s=10)


async def test_nobody_there_is_told_from_a_refusal() -> None:
    rank = Endpoints("http://127.0.0.1:9")
    with pytest.raises(Retryable):
        await rank.health(deadline_s=1)
    await rank.aclose()
    async with server(answer(400, {"error": {"message": "Cannot scale to data_parallel_size 9", "code": 400}})) as rank:
        with pytest.raises(ElasticError, match="Cannot scale to data_parallel_size 9") as refused:
            await rank.scale(9, deadline_s=5)
        assert not isinstance(refused.value, Retryable)


@settings(max_examples=60, deadline=None)
@given(
    status=st.sampled_from([200, 202, 204, 301, 400, 404, 500, 503]),
    body=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=20),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
            max_leaves=8,
        ),
    ),
)
def test_no_answer_whatever_it_holds_raises_anything_but_our_own_errors(status: int, body: Any) -> None:
    async def ask() -> None:
        async with server(answer(status, body)) as rank:
            for call in (
                rank.health(deadline_s=5),
                rank.gate(deadline_s=5),
                rank.scaling(deadline_s=5),
                rank.fault_status(deadline_s=5),
                rank.metrics(deadline_s=5),
                rank.version(deadline_s=5),
                rank.reset_prefix_cache(deadline_s=5),
                rank.canary("m", PROMPT, 4, deadline_s=5),
            ):
                with contextlib.suppress(ElasticError):
                    await call

    asyncio.run(ask())
