"""What a client gets for a completion or a chat, streamed or whole.

Nothing is sent before a rank's first words are known, so that a refusal is still a plain status. An error after that ends
the stream without [DONE], so that no client takes the part for the whole. A client that goes away ends its request at once,
wherever it runs.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from elastic.gateway.envelope import error_response, read_body
from elastic.gateway.schema import ApiError
from healer.router import upstream
from healer.router.attempts import Next, Tracked, over_ranks
from healer.router.plan import Kind, Request, first_body, read_request
from healer.router.pool import RETRY_UNAVAILABLE_S, Pool, Rank
from healer.router.shapes import ABORT, DONE, Chunk, Delta, StreamShape, WholeShape, count_usage, event
from healer.router.transcript import Piece, Transcript
from healer.router.upstream import Cause, Lost, Refusal

log = structlog.get_logger("healer.router")

TIMEOUT_HEADER = "x-request-timeout-s"
EVENT_STREAM = [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")]

OUTCOME_OF = {429: "busy", 503: "unavailable", 400: "invalid", 413: "invalid"}
"""What an error is counted as; the others: failed."""


class ClientGone(Exception):
    """The client does not read, or has closed the connection."""


def allowed_s(headers: Mapping[str, str], most_s: float) -> float:
    """The time that a request has. Raises ApiError 400."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return most_s
    try:
        asked = float(text)
    except ValueError:
        asked = -1.0
    if not 0 < asked < float("inf"):
        raise ApiError(400, f"{TIMEOUT_HEADER}: {text!r} is no number of seconds above 0", code="invalid_value")
    return min(asked, most_s)


class Reply:
    """The HTTP side of one answer: status and headers once, then parts."""

    def __init__(self, send: Send, stuck_s: float) -> None:
        self._send, self._stuck_s = send, stuck_s
        self.started = False

    async def start(self, status: int, headers: list[tuple[str, str]]) -> None:
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        self.started = True
        await self._out({"type": "http.response.start", "status": status, "headers": raw})

    async def part(self, body: bytes, *, more: bool = True) -> None:
        """Raises ClientGone for a client that keeps the connection and does not read."""
        await self._out({"type": "http.response.body", "body": body, "more_body": more})

    async def whole(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        await self.start(status, [*headers, ("content-length", str(len(body)))])
        await self.part(body, more=False)

    async def _out(self, message: dict[str, Any]) -> None:
        waiting = asyncio.timeout(self._stuck_s)
        try:
            async with waiting:
                await self._send(message)
        except OSError as error:
            # TimeoutError is an OSError too: ours only if this clock ran out
            if isinstance(error, TimeoutError) and not waiting.expired():
                raise
            raise ClientGone(str(error) or "does not read") from None


class StreamSink:
    """A streamed answer that can be continued."""

    def __init__(self, request: Request, transcript: Transcript, reply: Reply) -> None:
        self._request, self._transcript, self._reply = request, transcript, reply
        self._shape = StreamShape(request, transcript)
        self._last: Chunk = {}
        self._usage_sent = False
        self.begun = False

    async def put(self, kind: Kind, chunk: Chunk, delta: Delta | None, piece: Piece) -> None:
        made = self._shape.chunk(kind, chunk, delta, piece)
        if made is None:
            return
        self._usage_sent = self._usage_sent or delta is None
        self.begun = self.begun or not (delta is not None and delta.role_only)
        self._last = made
        if not self._reply.started:
            await self._reply.start(200, EVENT_STREAM)
        await self._reply.part(event(made))

    def replayed(self) -> None:
        self._shape.replayed()

    def restarted(self) -> None:
        if self._reply.started:
            self._shape.replayed()

    async def end(self) -> None:
        if self._request.wants_usage and not self._usage_sent:
            last = {name: value for name, value in self._last.items() if name in ("id", "object", "created", "model")}
            await self._reply.part(event({**last, "choices": [], "usage": count_usage(self._transcript)}))
        await self._reply.part(DONE, more=False)


class WholeSink:
    """An answer that is sent at its end."""

    begun = False

    def __init__(self, request: Request, transcript: Transcript, reply: Reply) -> None:
        self._reply = reply
        self._shape = WholeShape(request, transcript)

    async def put(self, kind: Kind, chunk: Chunk, delta: Delta | None, piece: Piece) -> None:
        self._shape.add(chunk, delta, piece)

    def replayed(self) -> None:
        self._shape.replayed()

    def restarted(self) -> None:
        self._shape.restarted()

    async def end(self) -> None:
        await self._reply.whole(200, [("content-type", "application/json")], msgspec.json.encode(self._shape.body()))


class Answer(Response):
    """Runs one request: admitted when the response is called, over when the call ends, however."""

    def __init__(self, pool: Pool, request: Request, headers: Mapping[str, str], time_s: float) -> None:
        self._pool, self._request, self._time_s = pool, request, time_s
        self._upstream_headers = headers
        self.background = None
        self._token_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics, reply = self._pool.metrics, Reply(send, self._pool.limits.silence_s)
        try:
            with self._pool.admitted():
                outcome = await self._accompanied(receive, reply)
        except ApiError as error:
            outcome = OUTCOME_OF.get(error.status, "failed")
            with contextlib.suppress(ClientGone):
                await self._fail(error, reply)
        except ClientGone as gone:
            log.info("client_lost", why=str(gone))
            outcome = "cancelled"
        metrics.requests.labels(outcome).inc()

    async def _accompanied(self, receive: Receive, reply: Reply) -> str:
        """Answer while the client is there and the router is up."""
        work = asyncio.create_task(self._work(reply), name="answer")
        gone = asyncio.create_task(_gone(receive), name="client")
        ends = asyncio.create_task(self._pool.ended.wait(), name="end")
        try:
            await asyncio.wait({work, gone, ends}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and ends.done():
                await _cancel(work)
                raise ApiError(503, "the router shut down", code="shutting_down", retry_after_s=RETRY_UNAVAILABLE_S)
            if not work.done():
                return "cancelled"
            return work.result()
        finally:
            await _cancel(work, gone, ends)

    async def _work(self, reply: Reply) -> str:
        deadline = upstream.loop_time() + self._time_s
        try:
            if not self._request.obstacle:
                await self._tracked(reply, deadline)
            elif self._request.stream:
                await self._opaque_stream(reply, deadline)
            else:
                await self._opaque_whole(reply, deadline)
        except Refusal as refusal:
            if reply.started:
                await reply.part(b"data: " + refusal.body.replace(b"\n", b" ") + b"\n\n", more=False)
            else:
                await reply.whole(refusal.status, refusal.headers, refusal.body)
            return "refused"
        return "completed"

    async def _fail(self, error: ApiError, reply: Reply) -> None:
        log.warning("request_failed", status=error.status, code=error.code, why=error.message)
        if reply.started:
            await reply.part(b"data: " + error.body() + b"\n\n", more=False)
        else:
            headers = [("content-type", "application/json"), *error.headers().items()]
            await reply.whole(error.status, headers, error.body())

    async def _tracked(self, reply: Reply, deadline: float) -> None:
        request = self._request
        transcript = Transcript(
            stops=request.stops,
            stops_shown=bool(request.body.get("include_stop_str_in_output")),
            ids_shown=request.stream and request.wants_ids,
        )
        sink = (StreamSink if request.stream else WholeSink)(request, transcript, reply)
        self._token_at = time.monotonic()
        first = True

        def on_tokens(count: int) -> None:
            nonlocal first
            metrics, now = self._pool.metrics, time.monotonic()
            (metrics.ttft if first else metrics.itl).observe(now - self._token_at)
            metrics.tokens.inc(count)
            self._token_at, first = now, False

        await Tracked(self._pool, request, transcript, sink, self._upstream_headers, on_tokens).run(deadline)
        await sink.end()

    # --- answers that cannot be continued: passed on as they are ------------------------------------------------------

    def _again(self, reply: Reply, lost: Lost) -> Next:
        if reply.started:
            why = self._request.obstacle
            raise ApiError(
                502, f"the rank was lost and the answer cannot be continued: {why}: {lost}", code="rank_lost"
            )
        if lost.cause not in upstream.NOT_BEGUN:
            self._pool.metrics.replays.labels("restarted").inc()
        return Next.BARREN

    async def _opaque_stream(self, reply: Reply, deadline: float) -> None:
        async def once(rank: Rank) -> None:
            async with self._opened(rank) as response:
                async for data in upstream.events(response):
                    if data != b"[DONE]" and (b'"error"' in data or b'"abort"' in data):
                        _refuse_abort(upstream.read_chunk(data))
                    if not reply.started:
                        await reply.start(200, EVENT_STREAM)
                    await reply.part(b"data: " + data + b"\n\n")

        await over_ranks(self._pool, deadline, once, lambda lost: self._again(reply, lost))
        await reply.part(b"", more=False)

    async def _opaque_whole(self, reply: Reply, deadline: float) -> None:
        found: tuple[list[tuple[str, str]], bytes] | None = None

        async def once(rank: Rank) -> None:
            nonlocal found
            async with self._opened(rank) as response:
                body = await upstream.read_whole(response, self._pool.limits.max_answer_bytes)
                if b'"abort"' in body:
                    _refuse_abort(upstream.read_chunk(body))
                found = upstream.returned(response.headers), body

        await over_ranks(self._pool, deadline, once, lambda lost: self._again(reply, lost))
        assert found is not None
        await reply.whole(200, *found)

    def _opened(self, rank: Rank) -> contextlib.AbstractAsyncContextManager[Any]:
        request, silence_s = self._request, self._pool.limits.silence_s
        return upstream.opened(
            rank, request.kind.value, first_body(request), self._upstream_headers, silence_s=silence_s
        )


def _refuse_abort(found: object) -> None:
    choices = found.get("choices") if isinstance(found, dict) else None
    if isinstance(choices, list) and any(isinstance(c, dict) and c.get("finish_reason") == ABORT for c in choices):
        raise Lost(Cause.ABORTED, "the rank aborted the request")


async def _gone(receive: Receive) -> None:
    """The body was read, so the next message says that the client is gone (or that all was sent)."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def answer(pool: Pool, kind: Kind, http: HttpRequest) -> Response:
    """POST of a completion or a chat."""
    try:
        time_s = allowed_s(http.headers, pool.limits.request_s)
        raw = await read_body(http, pool.limits.max_body_bytes)
    except ApiError as error:
        pool.metrics.requests.labels("invalid").inc()
        return error_response(error)
    headers = {**upstream.forwarded(http.headers), "content-type": http.headers.get("content-type", "application/json")}
    return Answer(pool, read_request(kind, raw), headers, time_s)
