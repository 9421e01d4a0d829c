"""The HTTP routes. Every error, also for an unknown path, has the envelope of the OpenAI API. vLLM's own control endpoints
(scaling, pause, faults) are not reachable through here."""

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from elastic.gateway.envelope import crashed, error_response, http_error, json_response
from elastic.gateway.schema import ApiError
from healer.router.answer import answer
from healer.router.plan import Kind
from healer.router.pool import RETRY_UNAVAILABLE_S, Pool, Rank
from healer.router.proxy import passage

log = structlog.get_logger("healer.router")

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def create_app(pool: Pool) -> Starlette:
    """The router's ASGI application."""

    async def completions(request: Request) -> Response:
        return await answer(pool, Kind.COMPLETION, request)

    async def chat(request: Request) -> Response:
        return await answer(pool, Kind.CHAT, request)

    async def other(request: Request) -> Response:
        return await passage(pool, request)

    async def livez(_: Request) -> Response:
        return json_response({"status": "ok"})

    async def readyz(_: Request) -> Response:
        if pool.closing:
            return _unready("closing")
        return json_response(_status(pool)) if pool.admitting else _unready("no rank takes requests")

    async def readyz_slot(request: Request) -> Response:
        slot = request.path_params["slot"]
        rank = pool.slot(slot)
        if rank is None:
            return error_response(ApiError(404, f"slot {slot} is not in the file", code="not_found"))
        return json_response(_rank(rank)) if rank.open else _unready("takes no requests", **_rank(rank))

    async def status(_: Request) -> Response:
        return json_response(_status(pool))

    async def metrics(_: Request) -> Response:
        pool.update_gauges()
        return Response(generate_latest(pool.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    return Starlette(
        routes=[
            Route(Kind.COMPLETION.value, completions, methods=["POST"]),
            Route(Kind.CHAT.value, chat, methods=["POST"]),
            Route("/v1/{path:path}", other, methods=METHODS),
            Route("/health", readyz),
            Route("/livez", livez),
            Route("/readyz", readyz),
            Route("/readyz/slot/{slot:int}", readyz_slot),
            Route("/status", status),
            Route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: http_error, ClientDisconnect: _left, Exception: crashed("router", log)},
    )


def _rank(rank: Rank) -> dict[str, object]:
    return {
        "slot": rank.id.slot,
        "incarnation": rank.id.incarnation,
        "url": rank.route.address,
        "admit": rank.route.admit,
        "reach": rank.seen.reach,
        "open": rank.open,
        "in_flight": rank.in_flight,
        "running": rank.seen.running,
        "waiting": rank.seen.waiting,
    }


def _status(pool: Pool) -> dict[str, object]:
    return {
        "status": "closing" if pool.closing else ("ok" if pool.admitting else "no rank takes requests"),
        "epoch": pool.epoch,
        "in_flight": pool.in_flight,
        "queued": pool.queued,
        "ranks": [_rank(rank) for rank in pool.ranks],
    }


def _unready(why: str, **more: object) -> Response:
    return json_response({"status": why, **more}, 503, {"retry-after": str(RETRY_UNAVAILABLE_S)})


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=400)
