"""All else below /v1: passed on to one rank as it is, and the answer back as it comes.

A request is sent again only where nothing of it was begun, or where sending it twice does no harm (GET, HEAD)."""

import contextlib

import structlog
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from elastic.gateway.envelope import error_response, read_body
from elastic.gateway.schema import ApiError
from healer.router import upstream
from healer.router.answer import OUTCOME_OF, ClientGone, Reply, allowed_s
from healer.router.attempts import Next, over_ranks
from healer.router.pool import Pool, Rank
from healer.router.upstream import NOT_BEGUN, Lost, Refusal

log = structlog.get_logger("healer.router")

REPEATABLE = frozenset({"GET", "HEAD"})
ONE_RANK_ONLY = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Change the rank that they reach: sent through here they would make the ranks differ."""


class Passage(Response):
    """One request, run when the response is called."""

    def __init__(self, pool: Pool, http: HttpRequest, body: bytes, time_s: float) -> None:
        self._pool, self._http, self._body, self._time_s = pool, http, body, time_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pool = self._pool
        reply = Reply(send, pool.limits.silence_s)
        outcome = "completed"
        try:
            with pool.admitted():
                deadline = upstream.loop_time() + self._time_s
                await over_ranks(
                    pool, deadline, lambda rank: self._once(rank, reply), lambda lost: self._again(reply, lost)
                )
        except Refusal as refusal:
            outcome = "refused"
            with contextlib.suppress(ClientGone):
                await reply.whole(refusal.status, refusal.headers, refusal.body)
        except ApiError as error:
            outcome = OUTCOME_OF.get(error.status, "failed")
            if reply.started:
                # no end is sent: the client sees a broken answer, not a short one
                log.warning("passage_broken", path=self._http.url.path, why=error.message)
            else:
                with contextlib.suppress(ClientGone):
                    await error_response(error)(scope, receive, send)
        except ClientGone:
            outcome = "cancelled"
        pool.metrics.requests.labels(outcome).inc()

    async def _once(self, rank: Rank, reply: Reply) -> None:
        http, limits = self._http, self._pool.limits
        query = f"?{http.url.query}" if http.url.query else ""
        async with upstream.opened(
            rank,
            http.url.path + query,
            self._body,
            upstream.forwarded(http.headers),
            silence_s=limits.silence_s,
            method=http.method,
        ) as response:
            headers = upstream.returned(response.headers)
            await reply.start(response.status_code, headers)
            async for part in response.aiter_raw():
                await reply.part(part)
        await reply.part(b"", more=False)

    def _again(self, reply: Reply, lost: Lost) -> Next:
        if reply.started or (lost.cause not in NOT_BEGUN and self._http.method not in REPEATABLE):
            raise ApiError(502, f"the rank gave no whole answer: {lost}", code="rank_lost")
        return Next.BARREN


async def passage(pool: Pool, http: HttpRequest) -> Response:
    """Any method of a path below /v1 that has no handler of its own."""
    try:
        if http.url.path in ONE_RANK_ONLY:
            raise ApiError(400, f"{http.url.path} changes one rank only: send it to each rank", code="not_routed")
        time_s = allowed_s(http.headers, pool.limits.request_s)
        body = await read_body(http, pool.limits.max_body_bytes)
    except ApiError as error:
        pool.metrics.requests.labels("invalid").inc()
        return error_response(error)
    return Passage(pool, http, body, time_s)
