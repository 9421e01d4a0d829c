"""One answer to one client, streamed or whole.

Nothing is sent before the first token (or the end) is known, so that every refusal, the rank's own included, is still a
plain status. A client that goes away ends its request at once, wherever it runs.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from elastic.config import ModelShape
from elastic.gateway.dispatcher import Busy, Dispatcher, Unavailable
from elastic.gateway.envelope import error_response, read_body
from elastic.gateway.ledger import Entry, Failure, Order, Reason
from elastic.gateway.metrics import GatewayMetrics
from elastic.gateway.schema import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_TEMPERATURE,
    INT64,
    ApiError,
    Choice,
    Completion,
    CompletionBody,
    Usage,
    parse_completion,
)
from elastic.gateway.text import AnswerText, Piece
from elastic.protocol import Sampling

log = structlog.get_logger("elastic.gateway")

MAX_BODY_BYTES = 4 << 20
LONG_PROMPT_CHARS = 2048
"""Longer prompts are tokenised in a thread: the loop also carries everybody's tokens."""
RETRY_BUSY_S = 1
RETRY_UNAVAILABLE_S = 2

STATUS_OF = {
    Reason.REJECTED: 400,
    Reason.UNROUTABLE: 503,
    Reason.SILENT: 503,
    Reason.SHUTDOWN: 503,
    Reason.BARREN: 500,
    Reason.INTERNAL: 500,
}


@dataclass(frozen=True)
class Service:
    """What all answers share."""

    model: str
    shape: ModelShape
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    dispatcher: Dispatcher
    metrics: GatewayMetrics
    request_timeout_s: float
    draw_seed: Callable[[], int]
    """A seed, 0 to 2^63 - 1, for a sampled request that brings none."""
    clock: Callable[[], float] = time.time


class Asked(NamedTuple):
    """A checked request."""

    order: Order
    created: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool


def api_error(failure: Failure) -> ApiError:
    status = STATUS_OF[failure.reason]
    return ApiError(
        status,
        failure.message,
        param="prompt" if failure.reason is Reason.REJECTED else None,
        code=failure.reason.value,
        retry_after_s=RETRY_UNAVAILABLE_S if status == 503 else None,
    )


async def ask(service: Service, request: Request) -> Asked:
    """Read and check a request. Raises ApiError."""
    body = parse_completion(await read_body(request, MAX_BODY_BYTES))
    if body.model is not None and body.model != service.model:
        message = f"the model {body.model!r} does not exist, this group serves {service.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    prompt = await _prompt_tokens(service, body.prompt)
    temperature = DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
    # drawn once, here: a replay goes on with the same draws
    seed = body.seed % INT64 if body.seed is not None else (service.draw_seed() if temperature > 0 else 0)
    order = Order(
        request=f"cmpl-{uuid.uuid4().hex}",
        prompt=prompt,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        sampling=Sampling(temperature=temperature, top_p=1.0 if body.top_p is None else body.top_p, seed=seed),
        stop_ids=() if body.ignore_eos else service.eos_ids,
    )
    return Asked(order, int(service.clock()), body.stop or (), *_form(body))


def _form(body: CompletionBody) -> tuple[bool, bool, bool]:
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return bool(body.stream), include_usage, bool(body.return_token_ids)


async def _prompt_tokens(service: Service, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        encode = service.tokenizer.encode
        long = len(prompt) > LONG_PROMPT_CHARS
        tokens = tuple((await asyncio.to_thread(encode, prompt) if long else encode(prompt)).ids)
    else:
        tokens = tuple(prompt)
    if not tokens:
        raise ApiError(400, "prompt: holds no token", param="prompt", code="invalid_value")
    if (highest := max(tokens)) >= service.shape.vocab:
        message = f"prompt: token id {highest} is outside the vocabulary of {service.shape.vocab}"
        raise ApiError(400, message, param="prompt", code="invalid_value")
    if len(tokens) >= (limit := service.shape.max_position):
        message = f"prompt: {len(tokens)} tokens leave no room for an answer within the model's {limit} positions"
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")
    return tokens


class Answer(Response):
    """Runs one request: admitted when the response is called, closed in the ledger when the call ends, however."""

    def __init__(self, service: Service, asked: Asked) -> None:
        # the status and the headers are known only when the first token is: they are sent by __call__
        self._service, self._asked = service, asked
        self.background = None
        self._wake = asyncio.Event()
        self._answered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, asked = self._service, self._asked
        dispatcher, request = service.dispatcher, asked.order.request
        try:
            entry = dispatcher.admit(asked.order, self._wake.set)
        except Busy as busy:
            service.metrics.requests.labels("busy").inc()
            error = ApiError(429, str(busy), code="queue_full", retry_after_s=RETRY_BUSY_S)
            return await error_response(error)(scope, receive, send)
        except Unavailable as unavailable:
            service.metrics.requests.labels("unavailable").inc()
            error = ApiError(503, str(unavailable), code="unavailable", retry_after_s=RETRY_UNAVAILABLE_S)
            return await error_response(error)(scope, receive, send)
        watch = asyncio.create_task(self._watch(receive), name=f"client of {request}")
        try:
            async with contextlib.aclosing(self._pieces(entry)) as pieces:
                first = await anext(pieces, None)
                if first is None:
                    if entry.failure is not None:
                        await error_response(api_error(entry.failure))(scope, receive, send)
                elif asked.stream:
                    await self._send_stream(entry, first, pieces, send)
                else:
                    await self._send_whole(entry, first, pieces, scope, receive, send)
        except (OSError, TimeoutError) as error:
            log.info("client_lost", request=request, why=str(error) or type(error).__name__)
        except Exception:
            dispatcher.fail(request, Failure(Reason.INTERNAL, "the gateway failed on this answer"))
            raise
        finally:
            dispatcher.cancel(request)
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _watch(self, receive: Receive) -> None:
        """The body was read, so the next message says that the client is gone (or that all was sent)."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._service.dispatcher.cancel(self._asked.order.request)

    async def _pieces(self, entry: Entry) -> AsyncGenerator[Piece, None]:
        """Text as tokens are accepted, up to the piece with a finish; ends without one when the entry was failed or
        cancelled."""
        text = AnswerText(self._service.tokenizer, self._asked.stops, self._asked.order.stop_ids)
        while True:
            await self._wake.wait()
            self._wake.clear()
            fresh = entry.accepted[self._answered :]
            piece = text.feed(fresh, entry.finish)
            self._answered += len(piece.token_ids)
            if piece.finish is not None:
                self._service.dispatcher.finish(entry.order.request, piece.finish)
            if piece.token_ids or piece.finish is not None:
                yield piece
            if piece.finish is not None or not entry.open:
                return

    async def _send_whole(
        self, entry: Entry, first: Piece, pieces: AsyncIterator[Piece], scope: Scope, receive: Receive, send: Send
    ) -> None:
        all_pieces = [first, *[piece async for piece in pieces]]
        finish = all_pieces[-1].finish
        if finish is None:
            if entry.failure is not None:
                await error_response(api_error(entry.failure))(scope, receive, send)
            return
        tokens = tuple(token for piece in all_pieces for token in piece.token_ids)
        whole = Piece("".join(piece.text for piece in all_pieces), tokens, finish)
        body = msgspec.json.encode(self._completion(whole, usage=self._usage(), with_prompt=True))
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _send_stream(self, entry: Entry, first: Piece, pieces: AsyncIterator[Piece], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = first
        await self._send_chunk(first, send, with_prompt=True)
        async for last in pieces:
            await self._send_chunk(last, send)
        if last.finish is None:
            # an error ends the stream without [DONE], so that no client takes the part for the whole
            end = b"data: " + api_error(entry.failure).body() + b"\n\n" if entry.failure is not None else b""
        else:
            end = b"data: [DONE]\n\n"
            if self._asked.include_usage:
                end = _event(msgspec.structs.replace(self._base(), usage=self._usage())) + end
        await self._send(send, end, more=False)

    async def _send_chunk(self, piece: Piece, send: Send, *, with_prompt: bool = False) -> None:
        # text that is held back (half a character, the start of a stop string) makes no chunk of its own
        if piece.text or piece.finish is not None or self._asked.return_token_ids:
            usage = None if self._asked.include_usage else msgspec.UNSET
            await self._send(send, _event(self._completion(piece, usage=usage, with_prompt=with_prompt)), more=True)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        """Raises TimeoutError for a client that keeps the connection and does not read."""
        async with asyncio.timeout(self._service.request_timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": more})

    def _base(self) -> Completion:
        return Completion(
            id=self._asked.order.request, created=self._asked.created, model=self._service.model, choices=()
        )

    def _completion(
        self, piece: Piece, *, usage: Usage | msgspec.UnsetType | None, with_prompt: bool = False
    ) -> Completion:
        ids = self._asked.return_token_ids
        choice = Choice(
            index=0,
            text=piece.text,
            logprobs=None,
            finish_reason=piece.finish,
            token_ids=piece.token_ids if ids else msgspec.UNSET,
            prompt_token_ids=self._asked.order.prompt if ids and with_prompt else msgspec.UNSET,
        )
        return msgspec.structs.replace(self._base(), choices=(choice,), usage=usage)

    def _usage(self) -> Usage:
        prompt = len(self._asked.order.prompt)
        return Usage(prompt_tokens=prompt, completion_tokens=self._answered, total_tokens=prompt + self._answered)


def _event(completion: Completion) -> bytes:
    body = msgspec.json.encode(completion)
    # many clients split at any Unicode line end, and a model may say one
    for raw, escaped in ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029")):
        body = body.replace(raw, escaped)
    return b"data: " + body + b"\n\n"


async def completions(service: Service, request: Request) -> Response:
    """POST /v1/completions."""
    try:
        return Answer(service, await ask(service, request))
    except ApiError as error:
        service.metrics.requests.labels("invalid").inc()
        return error_response(error)
    except ClientDisconnect:
        return Response(status_code=400)
