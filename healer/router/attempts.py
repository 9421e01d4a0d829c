"""One request over as many ranks as it takes.

What the client has is the transcript's; each attempt either ends the answer or is lost, and the next one takes it up: behind
the tokens that are there, or from the start when the client has nothing of it. A request that can do neither ends in one
explicit error.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto
from typing import Protocol

import structlog

from elastic.gateway.ledger import BARREN_LIMIT, RankId
from elastic.gateway.schema import ApiError
from healer.router import upstream
from healer.router.plan import Kind, Request, continued_body, first_body
from healer.router.pool import RETRY_BUSY_S, Pool, Rank
from healer.router.shapes import ABORT, Chunk, Delta, read_delta
from healer.router.transcript import INCOMPLETE, Diverged, Piece, Transcript
from healer.router.upstream import NOT_BEGUN, SUSPECT, Cause, Lost

log = structlog.get_logger("healer.router")

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
"""Before the rank that just failed a request gets it again, and before a third rank does: engines that die together answer
500 for some 0.25 s before their servers end."""
TAIL_TOKENS = 16
"""Decoded to see whether a character is whole; one has 4 bytes, and a token at least one of them."""
STEPS_BACK = 8

NOTHING = Piece("", ())


class Next(Enum):
    """What a loss means for the request."""

    PROGRESS = auto()
    """Try again; the lost rank had given tokens."""
    BARREN = auto()
    """Try again; it had given none."""
    DONE = auto()
    """The answer is whole, only the end of the stream was lost."""


class Sink(Protocol):
    """Where an answer goes. Called by one request's task; `put` may wait for the client and raises ClientGone."""

    @property
    def begun(self) -> bool:
        """Whether the client has a part of the answer."""
        ...

    async def put(self, kind: Kind, chunk: Chunk, delta: Delta | None, piece: Piece) -> None: ...

    def replayed(self) -> None:
        """What follows is a continuation."""
        ...

    def restarted(self) -> None:
        """What follows is the answer from its start. Only while not `begun`."""
        ...


async def over_ranks(
    pool: Pool, deadline: float, once: Callable[[Rank], Awaitable[None]], again: Callable[[Lost], Next]
) -> None:
    """Run `once` on one rank after another until it returns. `again` is told of each loss: it prepares the next attempt, or
    raises.

    Raises ApiError 429, 503 and 504, and 500 for a request that many ranks in a row were lost with, for it may be what
    kills them; and what `once` and `again` raise."""
    avoid: RankId | None = None
    busy: set[RankId] = set()
    barren, backoff_s = 0, BACKOFF_FIRST_S
    while True:
        rank = await pool.acquire(deadline, avoid)
        try:
            if rank.id == avoid or barren > 1:
                async with asyncio.timeout_at(deadline):
                    await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
                if not rank.open:
                    continue
            async with upstream.losses(rank, deadline):
                await once(rank)
            return
        except TimeoutError:
            raise ApiError(504, "the request did not end within its time", code="timeout") from None
        except Lost as lost:
            pool.metrics.attempts_lost.labels(lost.cause.value).inc()
            log.info("attempt_lost", slot=rank.id.slot, cause=lost.cause.value, why=str(lost))
            if lost.cause in SUSPECT:
                pool.suspect(rank, SUSPECT[lost.cause])
            avoid = rank.id
            if lost.cause is Cause.BUSY:
                busy.add(rank.id)
                if all(one.id in busy for one in pool.ranks if one.open):
                    raise ApiError(
                        429, f"every rank is busy: {lost}", code="queue_full", retry_after_s=RETRY_BUSY_S
                    ) from None
                continue
            following = again(lost)
            if following is Next.DONE:
                return
            if following is Next.PROGRESS:
                barren, backoff_s = 0, BACKOFF_FIRST_S
            elif lost.cause not in NOT_BEGUN and lost.cause is not Cause.DROPPED:
                barren += 1
            if barren >= BARREN_LIMIT:
                raise ApiError(
                    500,
                    f"the request lost {barren} ranks in a row and got no token; the last: {lost}",
                    code="ranks_lost",
                ) from None


class Tracked:
    """A request whose answer can be continued."""

    def __init__(
        self,
        pool: Pool,
        request: Request,
        transcript: Transcript,
        sink: Sink,
        headers: Mapping[str, str],
        on_tokens: Callable[[int], None],
    ) -> None:
        self._pool, self._request, self._transcript, self._sink = pool, request, transcript, sink
        self._headers, self._on_tokens = headers, on_tokens
        self._parsed = False
        """Reasoning came last: a parser in the server is in the midst of it, and a continuation would not be."""
        self._finished = False
        self._attempt = 0
        self._resumes = False
        self._got = 0

    async def run(self, deadline: float) -> None:
        """Raises as `over_ranks`, Refusal, ClientGone."""
        await over_ranks(self._pool, deadline, self._once, self._again)

    def _again(self, lost: Lost) -> Next:
        """Settle how the next attempt goes on. Raises ApiError where it cannot."""
        if self._finished:
            return Next.DONE
        progress = self._got > 0
        transcript, request = self._transcript, self._request
        if lost.cause in NOT_BEGUN and not progress:
            return Next.BARREN
        why = ""
        if transcript.untracked or transcript.prompt is None:
            why = "the rank did not say the tokens of its text"
        elif self._parsed:
            why = "its reasoning had not ended"
        restarts = not request.stream and request.reproducible
        if not why and not restarts and (transcript.at or self._sink.begun):
            self._resumes = True
        elif not self._sink.begun:
            self._resumes = self._parsed = False
            transcript.restart()
            self._sink.restarted()
        else:
            raise ApiError(
                502, f"the rank was lost and the answer cannot be continued: {why}: {lost}", code="rank_lost"
            )
        self._pool.metrics.replays.labels("continued" if self._resumes else "restarted").inc()
        return Next.PROGRESS if progress else Next.BARREN

    async def _once(self, rank: Rank) -> None:
        self._attempt += 1
        self._got = 0
        if self._resumes and await self._settle(rank):
            await self._continue(rank)
        else:
            await self._stream(rank, self._request.kind, first_body(self._request))

    async def _settle(self, rank: Rank) -> bool:
        """Find the token behind which the rank can go on, and resume the transcript there; False: at the start."""
        transcript, model = self._transcript, self._request.body.get("model")
        last = max(0, transcript.at - STEPS_BACK)
        for tokens in range(transcript.at, last - 1, -1):
            if tokens:
                tail = transcript.tail(tokens, TAIL_TOKENS)
                text = await upstream.detokenize(rank, model, tail, self._headers)
            # at the start the rank has what the first one had
            if not tokens or not text.endswith(INCOMPLETE):
                transcript.resume(tokens)
                self._sink.replayed()
                return tokens > 0
        raise ApiError(
            502, "the rank was lost and the answer cannot be continued: it ends within a character", code="rank_lost"
        )

    async def _continue(self, rank: Rank) -> None:
        request, transcript = self._request, self._transcript
        assert transcript.prompt is not None
        answered = list(transcript.tokens)
        if request.max_tokens is not None:
            left = request.max_tokens - len(answered)
        else:
            left = await self._context(rank) - len(transcript.prompt) - len(answered)
        if left <= 0:
            self._finished = True
            choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
            chunk = {"object": "text_completion", "choices": [choice | {"token_ids": []}]}
            delta = Delta(finish="length")
            await self._sink.put(Kind.COMPLETION, chunk, delta, transcript.feed("", (), final=True))
            return
        body = continued_body(request, transcript.prompt, answered, max_tokens=left, attempt=self._attempt)
        await self._stream(rank, Kind.COMPLETION, body)

    async def _context(self, rank: Rank) -> int:
        model = self._request.body.get("model")
        known = self._pool.max_model_len
        name = str(model or "")
        if name not in known:
            known[name] = await upstream.context_length(rank, model, self._headers)
        return known[name]

    async def _stream(self, rank: Rank, kind: Kind, body: bytes) -> None:
        silence_s = self._pool.limits.silence_s
        async with upstream.opened(rank, kind.value, body, self._headers, silence_s=silence_s) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise Lost(Cause.GARBLED, f"{rank.id}: no event stream, though one was asked for")
            async for data in upstream.events(response):
                if data != b"[DONE]":
                    await self._take(kind, upstream.read_chunk(data))
        if not self._finished:
            raise Lost(Cause.BROKEN, f"{rank.id}: the stream ended without a finish_reason")

    async def _take(self, kind: Kind, chunk: Chunk) -> None:
        try:
            delta = read_delta(kind, chunk)
        except ValueError as error:
            raise Lost(Cause.GARBLED, str(error)) from None
        if delta is None:
            await self._sink.put(kind, chunk, None, NOTHING)
            return
        if delta.finish == ABORT:
            raise Lost(Cause.ABORTED, "the rank aborted the request")
        transcript = self._transcript
        if delta.prompt is not None and transcript.prompt is None:
            transcript.prompt = delta.prompt
        try:
            piece = transcript.feed(delta.text, delta.token_ids, final=delta.finish is not None)
        except Diverged as error:
            why = f"the rank was lost and the answer cannot be continued: another rank goes on differently, {error}"
            raise ApiError(502, why, code="rank_lost") from None
        if delta.beyond_text:
            self._parsed = True
            # text behind a parser is not the tokens' text, so nothing is known of where stop strings hold it back
            transcript.untracked = transcript.untracked or bool(self._request.stops)
        elif delta.text:
            self._parsed = False
        if delta.token_ids:
            self._got += len(delta.token_ids)
            self._on_tokens(len(delta.token_ids))
        self._finished = self._finished or delta.finish is not None
        await self._sink.put(kind, chunk, delta, piece)
