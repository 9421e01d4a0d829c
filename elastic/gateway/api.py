"""The HTTP routes. Every error, also for an unknown path, has the envelope of the OpenAI API."""

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from elastic.gateway.completions import RETRY_UNAVAILABLE_S, Service, completions
from elastic.gateway.envelope import crashed, http_error, json_response

log = structlog.get_logger("elastic.gateway")


def create_app(service: Service) -> Starlette:
    """The gateway's ASGI application."""
    created = int(service.clock())

    async def models(_: Request) -> Response:
        model = {
            "id": service.model,
            "object": "model",
            "created": created,
            "owned_by": "healer",
            "max_model_len": service.shape.max_position,
        }
        return json_response({"object": "list", "data": [model]})

    async def health(_: Request) -> Response:
        dispatcher = service.dispatcher
        ranks = dispatcher.admitting
        status = "closing" if dispatcher.closing else ("ok" if ranks else "no rank admits")
        body = {"status": status, "ranks": ranks, "in_flight": len(dispatcher.ledger)}
        if status == "ok":
            return json_response(body)
        return json_response(body, 503, {"retry-after": str(RETRY_UNAVAILABLE_S)})

    async def metrics(_: Request) -> Response:
        service.dispatcher.update_gauges()
        text = generate_latest(service.metrics.registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def completion(request: Request) -> Response:
        return await completions(service, request)

    return Starlette(
        routes=[
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: http_error, Exception: crashed("gateway", log)},
    )
