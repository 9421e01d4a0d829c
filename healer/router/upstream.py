"""One attempt of a request on one rank, with every ending told apart: an answer, the rank's own refusal, or a loss."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from enum import StrEnum
from typing import Any

import httpx
import msgspec

from healer.router.foreign import UNREADABLE, TooLong, read_answer
from healer.router.pool import Rank
from healer.router.probe import Reach
from healer.router.shapes import Chunk

MAX_EVENT_BYTES = 8 << 20
SHOWN_CHARS = 300
DETOKENIZE_DEADLINE_S = 10.0

HOP_BY_HOP = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)
"""RFC 9110, section 7.6.1."""
NOT_FORWARDED = HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect", "x-data-parallel-rank"}
"""The last would let a client choose an engine by itself."""


class Cause(StrEnum):
    """Why an attempt gave no whole answer."""

    UNREACHABLE = "unreachable"
    """No connection: nothing was sent."""
    GATE = "gate"
    """503: the rank takes nothing now; the request was not begun."""
    BUSY = "busy"
    """429: its queue is full; the request was not begun."""
    BROKEN = "broken"
    """The connection ended before the answer did."""
    ERROR = "error"
    """5xx, or an error event in the stream."""
    ABORTED = "aborted"
    """finish_reason "abort", with status 200."""
    SILENT = "silent"
    """Nothing came for too long."""
    DROPPED = "dropped"
    """The file does not name the rank any more."""
    GARBLED = "garbled"
    """Not what vLLM answers."""


NOT_BEGUN = frozenset({Cause.UNREACHABLE, Cause.GATE, Cause.BUSY})
SUSPECT = {
    Cause.UNREACHABLE: Reach.DOWN,
    Cause.BROKEN: Reach.DOWN,
    Cause.ERROR: Reach.DOWN,
    Cause.GATE: Reach.SHUT,
}
"""What an attempt's loss says about the rank, until it is probed again, which is at once."""


class Lost(Exception):
    """The rank gave no whole answer. `status` and `body`: what it said, if it did."""

    def __init__(self, cause: Cause, why: str, status: int = 0, body: bytes = b"") -> None:
        super().__init__(why)
        self.cause, self.status, self.body = cause, status, body


class Refusal(Exception):
    """The rank's own answer that is no success and no fault of the rank: the client's to read."""

    def __init__(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers, self.body = status, headers, body


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's headers for a rank; the API key is among them."""
    return {name: value for name, value in headers.items() if name.lower() not in NOT_FORWARDED}


def returned(headers: httpx.Headers) -> list[tuple[str, str]]:
    """A rank's headers for the client. The body is framed anew."""
    left_out = HOP_BY_HOP | {"content-length", "date", "server"}
    return [(name, value) for name, value in headers.multi_items() if name.lower() not in left_out]


@contextlib.asynccontextmanager
async def losses(rank: Rank, deadline: float) -> AsyncIterator[None]:
    """Within it, what goes wrong with the connection or the rank is raised as Lost. TimeoutError at the deadline (of the
    loop's clock) passes."""
    try:
        async with rank.attempt(deadline):
            yield
    except TimeoutError:
        if rank.lost:
            raise Lost(Cause.DROPPED, f"{rank.id} is no longer routed to") from None
        raise
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise Lost(Cause.UNREACHABLE, f"{rank.id}: {_say(error)}") from None
    except httpx.ReadTimeout:
        raise Lost(Cause.SILENT, f"{rank.id} said nothing for too long") from None
    except (httpx.HTTPError, httpx.StreamError, RuntimeError) as error:
        # RuntimeError: the client was closed, because the file dropped the rank
        if isinstance(error, RuntimeError) and not rank.lost:
            raise
        cause = Cause.DROPPED if rank.lost else Cause.BROKEN
        raise Lost(cause, f"{rank.id}: {_say(error)}") from None


def _say(error: Exception) -> str:
    return str(error)[:SHOWN_CHARS] or type(error).__name__


@contextlib.asynccontextmanager
async def opened(
    rank: Rank,
    path: str,
    content: bytes,
    headers: Mapping[str, str],
    *,
    silence_s: float,
    method: str = "POST",
    max_bytes: int = MAX_EVENT_BYTES,
) -> AsyncIterator[httpx.Response]:
    """A response of status 2xx, its body not read. Raises Lost, Refusal."""
    timeout = httpx.Timeout(silence_s, connect=rank.client.timeout.connect)
    async with rank.client.stream(
        method, path, content=content, headers=dict(headers) | {"accept-encoding": "identity"}, timeout=timeout
    ) as response:
        if not response.is_success:
            body = await read_whole(response, max_bytes)
            raise judged(rank, response, body)
        yield response


def judged(rank: Rank, response: httpx.Response, body: bytes) -> Lost | Refusal:
    """What a status that is no success means."""
    status = response.status_code
    why = f"{rank.id}: status {status}: {body[:SHOWN_CHARS].decode(errors='replace')}"
    if status == 503:
        return Lost(Cause.GATE, why, status, body)
    if status == 429:
        return Lost(Cause.BUSY, why, status, body)
    if status >= 500 and status != 501:
        return Lost(Cause.ERROR, why, status, body)
    return Refusal(status, returned(response.headers), body)


async def read_whole(response: httpx.Response, max_bytes: int) -> bytes:
    """Raises Lost for a body above the limit."""
    try:
        return await read_answer(response, max_bytes)
    except TooLong as error:
        raise Lost(Cause.GARBLED, str(error)) from None


async def events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of server-sent events, up to [DONE], which is the last one yielded. vLLM sends one line of data an event,
    and comments to keep connections alive. Raises Lost when the stream ends before it."""
    held, parts = b"", response.aiter_raw()
    async for part in parts:
        held += part
        if b"\n" not in part:
            if len(held) > MAX_EVENT_BYTES:
                raise Lost(Cause.GARBLED, f"an event is longer than {MAX_EVENT_BYTES} bytes")
            continue
        *lines, held = held.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                yield data
                if data == b"[DONE]":
                    with contextlib.suppress(httpx.HTTPError):
                        # to its very end, so that the connection can be used again
                        async for _ in parts:
                            pass
                    return
    raise Lost(Cause.BROKEN, "the stream ended before its end was said")


def read_chunk(data: bytes) -> Chunk:
    """Raises Lost for an error that is the rank's, Refusal for one that is the request's."""
    try:
        chunk = msgspec.json.decode(data)
    except UNREADABLE as error:
        raise Lost(Cause.GARBLED, f"an event that is no JSON: {error}") from None
    if not isinstance(chunk, dict):
        raise Lost(Cause.GARBLED, "an event that is no JSON object")
    told = chunk.get("error")
    if told is not None:
        code = told.get("code") if isinstance(told, dict) else None
        if isinstance(code, int) and 400 <= code < 500:
            raise Refusal(code, [("content-type", "application/json")], data)
        raise Lost(Cause.ERROR, f"an error in the stream: {data[:SHOWN_CHARS].decode(errors='replace')}", 500, data)
    return chunk


async def detokenize(rank: Rank, model: Any, tokens: list[int], headers: Mapping[str, str]) -> str:
    """The text of some tokens. Raises Lost, Refusal."""
    body = {"tokens": tokens} | ({"model": model} if model else {})
    content = msgspec.json.encode(body)
    async with opened(rank, "/detokenize", content, headers, silence_s=DETOKENIZE_DEADLINE_S) as response:
        found = await read_whole(response, MAX_EVENT_BYTES)
    return str(_field(found, "prompt"))


async def context_length(rank: Rank, model: Any, headers: Mapping[str, str]) -> int:
    """`max_model_len` of a model, or of the first that the rank names. Raises Lost, Refusal."""
    async with opened(rank, "/v1/models", b"", headers, silence_s=DETOKENIZE_DEADLINE_S, method="GET") as response:
        models = _field(await read_whole(response, MAX_EVENT_BYTES), "data")
    listed = models if isinstance(models, list) else []
    known = [one for one in listed if isinstance(one, dict) and isinstance(one.get("max_model_len"), int)]
    if not known:
        raise Lost(Cause.GARBLED, f"{rank.id}: /v1/models names no max_model_len")
    named = next((one for one in known if one.get("id") == model), known[0])
    return int(named["max_model_len"])


def _field(body: bytes, name: str) -> Any:
    try:
        return msgspec.json.decode(body)[name]
    except (*UNREADABLE, KeyError, TypeError):
        raise Lost(Cause.GARBLED, f"an answer without {name!r}") from None


def loop_time() -> float:
    return asyncio.get_running_loop().time()
