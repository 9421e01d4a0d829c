"""The open loop against a server that does to its clients what a bad gateway would."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from chaos.load import Generator, ledger
from chaos.records import Prompt, Request, tokens_hash
from chaos.scenario import Load

WANT = (5, 6, 7)
PROMPT = Prompt(id=0, tokens=(1, 2), expected=WANT, expected_hash=tokens_hash(WANT))


def _chunk(ids: list[int], finish: str | None = None) -> bytes:
    data = {"id": "cmpl-1", "choices": [{"token_ids": ids, "finish_reason": finish}]}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


ANSWERS: dict[str, tuple[bytes, bytes]] = {
    "right": (b"200 OK", _chunk([5]) + _chunk([6, 7], "length") + b"data: [DONE]\n\n"),
    "differs": (b"200 OK", _chunk([5, 9, 7], "length")),
    "lost": (b"200 OK", _chunk([5, 6], "length")),
    "duplicated": (b"200 OK", _chunk([5, 6, 7, 7], "length")),
    "refused": (b"503 Service Unavailable", b'{"error": "full"}'),
    "failed": (b"200 OK", _chunk([5]) + b'data: {"error": {"message": "gone"}}\n\n'),
    "cut": (b"200 OK", _chunk([5])),
}


@asynccontextmanager
async def _server(head: bytes, body: bytes) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + head + b"\r\nConnection: close\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _asked(base: str, count: int = 1) -> list[Request]:
    generator = Generator(base, "m", Load(rate_per_s=0.0), [PROMPT], seed=1)
    running = asyncio.create_task(generator.run())
    await asyncio.sleep(0)
    generator.burst(count)
    generator.stop()
    await running
    return generator.records()


@pytest.mark.parametrize("outcome", ANSWERS)
async def test_what_a_bad_gateway_does_is_called_by_its_name(outcome: str) -> None:
    async with _server(*ANSWERS[outcome]) as base:
        (request,) = await _asked(base)
    assert request.outcome == outcome
    assert len(request.times) == len(request.tokens)
    assert request.differs_at == (1 if outcome == "differs" else -1)
    assert request.ended_at >= request.sent_at


async def test_nobody_listens_and_the_request_is_not_lost_from_the_ledger() -> None:
    (request,) = await _asked("http://127.0.0.1:9")
    assert request.outcome == "cut"
    book = ledger([request], [PROMPT], replayed=2)
    assert (book.sent, book.outcomes, book.tokens, book.replayed) == (1, {"cut": 1}, 0, 2)


async def test_arrivals_do_not_wait_for_answers_and_are_the_same_for_the_same_seed() -> None:
    async with _server(*ANSWERS["right"]) as base:
        plans = []
        for _ in range(2):
            generator = Generator(base, "m", Load(rate_per_s=200.0), [PROMPT], seed=7)
            sent: list[int] = []
            enough = asyncio.Event()
            generator.on_sent = lambda n, sent=sent, enough=enough: (sent.append(n), len(sent) > 8 and enough.set())
            running = asyncio.create_task(generator.run())
            await asyncio.wait_for(enough.wait(), 30)
            generator.stop()
            await running
            found = generator.records()
            assert [r.n for r in found] == sent
            plans.append([round(b.due_at - a.due_at, 6) for a, b in pairwise(found[:8])])
        assert plans[0] == plans[1]
