"""HTTP as both fronts speak it, the gateway of a group and the router before vLLM: bodies within bounds, answers as JSON, every
error in the envelope of the OpenAI API."""

from collections.abc import Awaitable, Callable

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from elastic.gateway.schema import ApiError


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError 413, ClientDisconnect."""
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise ApiError(413, f"the body is above {max_bytes} bytes", code="body_too_large")
    return b"".join(parts)


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers(), "application/json")


async def http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else None))


def crashed(front: str, log: structlog.stdlib.BoundLogger) -> Callable[[Request, Exception], Awaitable[Response]]:
    """For an exception that is a bug; `front` names the process to its client."""

    async def answer(request: Request, error: Exception) -> Response:
        log.error("request_crashed", path=request.url.path, exc_info=error)
        message = f"the {front} failed on this request; its log says why"
        return error_response(ApiError(500, message, code="internal_error"))

    return answer
