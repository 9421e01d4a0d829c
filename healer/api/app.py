"""The HTTP API: what the daemon knows, and the few things that it can be asked to do.

It runs in the supervisor's loop. Reading is open to whoever reaches the address; control needs the bearer token where the
policy names one (it must, off loopback), and a JSON body, which a page in a browser cannot send unasked.
"""

import contextlib
import hmac
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from elastic.errors import ElasticError, Infeasible
from healer.diagnosis import Health
from healer.incidents import summarise
from healer.journal import Kind
from healer.status import unheld
from healer.supervisor import Supervisor

MAX_BODY_BYTES = 64 << 10
MAX_ROWS = 1000
LIVE_LIMIT_S = 5.0
"""A loop that has not gone round for this long is not alive."""
MIN_TOKEN_CHARS = 16


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one of the two."""

    ranks: int | None = None
    slots: list[int] | None = None


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def read_token(path: str | None) -> bytes | None:
    """The token that control calls need; None: none. Raises ElasticError naming the file."""
    if path is None:
        return None
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise ElasticError(f"{path}: the token file cannot be read: {error.strerror}") from error
    if len(token) < MIN_TOKEN_CHARS:
        raise ElasticError(f"{path}: the token has {len(token)} characters, expected at least {MIN_TOKEN_CHARS}")
    return token


def listen(host: str, port: int) -> socket.socket:
    """Bind before anything else is started. Raises ElasticError when the address is taken."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ElasticError(f"spec.api.host: {host!r} cannot be resolved: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ElasticError(
            f"the API cannot listen on {host}:{port}: {error.strerror}; another daemon may run, or change spec.api.port"
        ) from error
    return sock


class Server(uvicorn.Server):
    """Serves until `should_exit`; signals are the daemon's business."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


Handler = Callable[[Request], Awaitable[Response]]


class _Api:
    def __init__(self, supervisor: Supervisor, token: bytes | None) -> None:
        self._supervisor, self._token = supervisor, token

    # --- reading --------------------------------------------------------------------------------------------------

    async def healthz(self, _: Request) -> Response:
        """200 while the daemon works and the group serves; 503 until it does."""
        status = self._supervisor.status()
        # every live rank takes part in every step: one that is known to be dead holds all of them up
        sick = any(v.health == Health.UNHEALTHY for v in status.verdicts)
        group = status.group
        whole = bool(group.live) and not sick and not unheld(group) and not group.gateway
        serves = status.state in ("ok", "degraded") and whole
        return JsonResponse({"state": status.state, "why": status.why}, 200 if serves else 503)

    async def livez(self, _: Request) -> Response:
        """200 while the supervisor's loop goes round."""
        age = self._supervisor.loop_age_s
        return JsonResponse({"loop_age_s": age, "limit_s": LIVE_LIMIT_S}, 200 if age < LIVE_LIMIT_S else 503)

    async def status(self, _: Request) -> Response:
        return JsonResponse(self._supervisor.status())

    async def metrics(self, _: Request) -> Response:
        metrics = self._supervisor.metrics
        return Response(metrics.render(), media_type=metrics.content_type)

    async def history(self, request: Request) -> Response:
        return JsonResponse(summarise(self._supervisor.journal.incidents(_limit(request, 50))))

    async def timeline(self, request: Request) -> Response:
        incident = request.path_params["incident"]
        entries = self._supervisor.journal.timeline(incident)
        if not entries:
            raise HTTPException(404, f"no incident {incident!r}; GET /history lists them")
        return JsonResponse({"incident": summarise(entries)[0], "entries": entries})

    async def decisions(self, request: Request) -> Response:
        return JsonResponse(self._supervisor.journal.recent(Kind.DECISION, _limit(request, 50)))

    # --- control --------------------------------------------------------------------------------------------------

    async def scale(self, request: Request) -> Response:
        body = await self._control(request)
        try:
            asked = msgspec.json.decode(body, type=ScaleRequest)
        except msgspec.MsgspecError as error:
            raise HTTPException(400, f'{error}; expected {{"ranks": 4}} or {{"slots": [0, 1]}}') from None
        if (asked.ranks is None) == (asked.slots is None):
            raise HTTPException(400, 'expected exactly one of "ranks" and "slots"')
        wanted = asked.ranks if asked.ranks is not None else tuple(asked.slots or ())
        try:
            target = self._supervisor.scale(wanted, who=_who(request))
        except Infeasible as error:
            raise HTTPException(409, str(error)) from None
        return JsonResponse({"target": target}, 202)

    async def stop(self, request: Request) -> Response:
        await self._control(request)
        self._supervisor.end(stop=True, who=_who(request))
        return JsonResponse({"stopping": True}, 202)

    async def _control(self, request: Request) -> bytes:
        """The body of a control call that is allowed."""
        if self._token is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            # both compared in any case, so that the time taken tells nothing
            right = hmac.compare_digest(given.strip().encode(), self._token)
            if scheme.lower() != "bearer" or not right:
                raise HTTPException(401, "a valid bearer token is needed", {"WWW-Authenticate": "Bearer"})
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "expected Content-Type: application/json")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        return bytes(body)


def _limit(request: Request, default: int) -> int:
    given = request.query_params.get("limit", str(default))
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= MAX_ROWS):
        raise HTTPException(400, f"limit: {given[:40]!r} is not valid, expected 1 to {MAX_ROWS}")
    return int(given)


def _who(request: Request) -> str:
    return f"operator at {request.client.host}" if request.client else "operator"


async def _problem(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JsonResponse({"error": error.detail}, error.status_code, dict(error.headers or {}))
    return JsonResponse({"error": "the daemon failed on this request; see its log"}, 500)


def make_app(supervisor: Supervisor, token: bytes | None) -> Starlette:
    api = _Api(supervisor, token)
    reading: dict[str, Handler] = {
        "/healthz": api.healthz,
        "/livez": api.livez,
        "/status": api.status,
        "/metrics": api.metrics,
        "/history": api.history,
        "/history/{incident}": api.timeline,
        "/decisions": api.decisions,
    }
    routes = [Route(path, handler, methods=["GET"]) for path, handler in reading.items()]
    routes += [Route("/scale", api.scale, methods=["POST"]), Route("/stop", api.stop, methods=["POST"])]
    return Starlette(routes=routes, exception_handlers={HTTPException: _problem, 500: _problem})
