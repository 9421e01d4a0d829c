"""What one rank says of itself. /health knows a dead engine, /metrics knows a shut gate: vLLM answers 200 on the one while
it scales or is retired, and 503 on the other."""

import asyncio
from enum import StrEnum

import httpx
import msgspec

from healer.router.foreign import TooLong, read_answer

MAX_BYTES = 8 << 20
"""Of metrics; those of a large deployment take some hundred kB."""
PROBE_DEADLINE_S = 2.0
RUNNING, WAITING = b"vllm:num_requests_running", b"vllm:num_requests_waiting"


class Reach(StrEnum):
    """Whether requests get through to a rank, as last seen."""

    UNKNOWN = "unknown"
    """Not asked yet."""
    OPEN = "open"
    SHUT = "shut"
    """It answers 503: a commit, a pause, or it is retired."""
    DOWN = "down"
    """It does not answer, or says that its engine is dead."""


class Seen(msgspec.Struct, frozen=True):
    reach: Reach
    running: int = 0
    waiting: int = 0


async def look(client: httpx.AsyncClient) -> Seen:
    """Never raises for what a server does."""
    try:
        health, _ = await _get(client, "/health")
        if health != 200:
            return Seen(Reach.DOWN)
        status, text = await _get(client, "/metrics")
    except (httpx.HTTPError, TimeoutError, TooLong):
        return Seen(Reach.DOWN)
    if status == 503:
        return Seen(Reach.SHUT)
    running, waiting = parse_load(text) if status == 200 else (0, 0)
    return Seen(Reach.OPEN, running, waiting)


async def _get(client: httpx.AsyncClient, path: str) -> tuple[int, bytes]:
    """The whole of it within the deadline, however slowly it comes."""
    headers = {"accept-encoding": "identity"}
    async with (
        asyncio.timeout(PROBE_DEADLINE_S),
        client.stream("GET", path, headers=headers, timeout=PROBE_DEADLINE_S) as response,
    ):
        return response.status_code, await read_answer(response, MAX_BYTES)


def parse_load(text: bytes) -> tuple[int, int]:
    """Requests that run and that wait, summed over engines; 0 for what is not shown. The counts by reason beside the
    second are left out: they would be counted twice."""
    return _total(text, RUNNING), _total(text, WAITING)


def _total(text: bytes, name: bytes) -> int:
    total, at = 0.0, 0
    while (at := text.find(b"\n" + name, at)) >= 0:
        line = text[at + 1 : text.find(b"\n", at + 1) if text.find(b"\n", at + 1) >= 0 else len(text)]
        at += 1
        if line[len(name) : len(name) + 1] not in (b"{", b" "):
            continue
        try:
            value = float(line.rpartition(b" ")[2])
        except ValueError:
            continue
        total += value if value > 0 else 0.0
    return int(total) if total < 1e9 else 0
