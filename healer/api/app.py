"""The routes: each reads the supervisor or gives it an order."""

import asyncio
import hashlib
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from elastic.controller.records import GroupStatus
from elastic.errors import ElasticError
from healer.api.auth import Guard
from healer.api.openapi import document
from healer.diagnosis import Health
from healer.incidents import summarise
from healer.journal import Answer, Entry, Kind
from healer.metrics import Metrics
from healer.orders import ORDERS, Carried, Order, Scale
from healer.status import DaemonStatus, unheld

MAX_BODY_BYTES = 64 << 10
BODY_S = 5.0
"""For the body of a control call, from its head on."""
MAX_ROWS = 1000
LIVE_LIMIT_S = 5.0
"""A loop that has not gone round for this long is not alive."""
MAX_KEY_CHARS, MAX_NAME_CHARS = 200, 100
KEY = re.compile(f"[!-~]{{1,{MAX_KEY_CHARS}}}")

Handler = Callable[[Request], Awaitable[Response]]


class Records(Protocol):
    """The part of the journal that the API reads, and where it keeps what it answered. Reading may raise ElasticError."""

    def incidents(self, limit: int) -> list[Entry]: ...

    def timeline(self, incident: str) -> list[Entry]: ...

    def recent(self, kind: Kind, limit: int) -> list[Entry]: ...

    def answered(self, request: str) -> Answer | None: ...

    def answer(self, request: str, answer: Answer) -> None: ...


class Daemon(Protocol):
    """Who answers: the supervisor, or the standby for it. Called in its loop."""

    @property
    def metrics(self) -> Metrics: ...

    @property
    def journal(self) -> Records: ...

    @property
    def loop_age_s(self) -> float: ...

    def status(self) -> DaemonStatus: ...

    def observe(self) -> GroupStatus: ...

    def order(self, order: Order, *, who: str) -> Carried:
        """Raises ElasticError with the reason; then nothing was changed."""
        ...

    def end(self, *, stop: bool, who: str) -> None: ...


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else msgspec.json.encode(content)


class _Api:
    def __init__(self, daemon: Callable[[], Daemon], token: bytes | None, monotonic: Callable[[], float]) -> None:
        self._who_answers, self._guard = daemon, Guard(token, monotonic)
        self._document = document(with_token=token is not None)

    @property
    def _daemon(self) -> Daemon:
        return self._who_answers()

    # --- reading --------------------------------------------------------------------------------------------------

    async def healthz(self, _: Request) -> Response:
        """200 while the daemon works and the group serves; 503 until it does."""
        status = self._daemon.status()
        # every live rank takes part in every step: one that is known to be dead holds all of them up
        sick = any(v.health == Health.UNHEALTHY for v in status.verdicts)
        group = status.group
        whole = bool(group.live) and not sick and not unheld(group) and not group.gateway
        serves = status.state in ("ok", "degraded") and whole
        return JsonResponse({"state": status.state, "why": status.why}, 200 if serves else 503)

    async def ready_slot(self, request: Request) -> Response:
        """200 while the rank in this slot is live and nothing speaks against it."""
        text, status = request.path_params["slot"], self._daemon.status()
        found = next((s for s in status.group.slots if str(s.slot) == text), None)
        if found is None:
            raise HTTPException(404, f"no slot {text[:40]!r}; there are 0 to {status.group.max_ranks - 1}")
        sick = next((v for v in status.verdicts if v.rank.slot == found.slot and v.health == Health.UNHEALTHY), None)
        serves = found.state == "live" and sick is None
        why = sick.sentence if sick else "" if serves else f"slot {found.slot} is {found.state}"
        return JsonResponse({"state": found.state, "why": why}, 200 if serves else 503)

    async def livez(self, _: Request) -> Response:
        """200 while the supervisor's loop goes round."""
        age = self._daemon.loop_age_s
        return JsonResponse({"loop_age_s": age, "limit_s": LIVE_LIMIT_S}, 200 if age < LIVE_LIMIT_S else 503)

    async def status(self, _: Request) -> Response:
        return JsonResponse(self._daemon.status())

    async def view(self, _: Request) -> Response:
        group = self._daemon.observe()
        found = {
            "epoch": group.epoch,
            "live": group.live,
            "target": group.target,
            "placement_hash": group.placement_hash,
            "uncovered": group.uncovered,
            "losses_survivable": group.losses_survivable,
            "members": [s.member for s in group.slots if s.state == "live" and s.member is not None],
        }
        return JsonResponse(found)

    async def metrics(self, _: Request) -> Response:
        metrics = self._daemon.metrics
        return Response(metrics.render(), media_type=metrics.content_type)

    async def incidents(self, request: Request) -> Response:
        return JsonResponse(summarise(self._daemon.journal.incidents(_limit(request, 50))))

    async def timeline(self, request: Request) -> Response:
        incident = request.path_params["incident"]
        entries = self._daemon.journal.timeline(incident)
        if not entries:
            raise HTTPException(404, f"no incident {incident[:40]!r}; `healer history` and GET /incidents list them")
        return JsonResponse({"incident": summarise(entries)[0], "entries": entries})

    async def decisions(self, request: Request) -> Response:
        return JsonResponse(self._daemon.journal.recent(Kind.DECISION, _limit(request, 50)))

    async def openapi(self, _: Request) -> Response:
        return JsonResponse(self._document)

    # --- control --------------------------------------------------------------------------------------------------

    def order(self, path: str, kind: type[Order]) -> Handler:
        async def handle(request: Request) -> Response:
            body, key = await self._control(request)

            def carry_out() -> tuple[int, Any]:
                order = _decode(body, kind)
                try:
                    return 202, self._daemon.order(order, who=_who(request))
                except ElasticError as error:
                    return 409, {"error": str(error)}

            return self._once(key, path, body, carry_out)

        return handle

    async def stop(self, request: Request) -> Response:
        body, key = await self._control(request)

        def carry_out() -> tuple[int, Any]:
            if not isinstance(_decode(body, Any), dict):
                raise HTTPException(400, "expected a JSON object")
            try:
                self._daemon.end(stop=True, who=_who(request))
            except ElasticError as error:
                return 409, {"error": str(error)}
            return 202, {"stopping": True}

        return self._once(key, "/stop", body, carry_out)

    def _once(self, key: str, path: str, body: bytes, carry_out: Callable[[], tuple[int, Any]]) -> Response:
        """Carry an order out, unless it came before under the same key: then what was answered is answered again."""
        journal = self._daemon.journal
        digest = hashlib.blake2b(path.encode() + b"\0" + body, digest_size=16).hexdigest()
        known = journal.answered(key) if key else None
        if known is not None and known.digest != digest:
            raise HTTPException(422, f"Idempotency-Key {key[:40]!r} was used for another call")
        if known is None:
            status, answer = carry_out()
            known = Answer(digest, status, msgspec.json.encode(answer).decode())
            if key and status < 400:
                # what was refused may be possible the next time
                journal.answer(key, known)
        return JsonResponse(known.text.encode(), known.status)

    async def _control(self, request: Request) -> tuple[bytes, str]:
        """Body and key of a control call that is allowed."""
        self._guard.admit(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "expected Content-Type: application/json")
        key = request.headers.get("idempotency-key")
        if key is not None and not KEY.fullmatch(key):
            raise HTTPException(400, f"Idempotency-Key: expected 1 to {MAX_KEY_CHARS} printable characters, no blanks")
        try:
            async with asyncio.timeout(BODY_S):
                return await _body(request), key or ""
        except TimeoutError:
            close = {"Connection": "close"}
            raise HTTPException(408, f"the body did not come within {BODY_S:g} s", close) from None
        except ClientDisconnect:
            # nobody hears this; it is no failure of the daemon either
            raise HTTPException(400, "the caller went away before the end of the body") from None


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _decode(body: bytes, kind: Any) -> Any:
    try:
        order = msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        expected = '; expected {"ranks": 4} or {"slots": [0, 1]}' if kind is Scale else ""
        raise HTTPException(400, f"{error}{expected}") from None
    if isinstance(order, Scale) and (order.ranks is None) == (order.slots is None):
        raise HTTPException(400, 'expected exactly one of "ranks" and "slots"')
    return order


def _limit(request: Request, default: int) -> int:
    given = request.query_params.get("limit", str(default))
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= MAX_ROWS):
        raise HTTPException(400, f"limit: {given[:40]!r} is not valid, expected 1 to {MAX_ROWS}")
    return int(given)


def _who(request: Request) -> str:
    """Who asks, as far as it can be told: the name is the caller's own word (the header From), the address is not."""
    name = request.headers.get("from", "")
    if not (name.isascii() and name.isprintable() and 0 < len(name) <= MAX_NAME_CHARS):
        name = "operator"
    return f"{name} at {request.client.host}" if request.client else name


async def _problem(_: Request, error: Exception) -> Response:
    if isinstance(error, ElasticError):
        return JsonResponse({"error": str(error)}, 503)
    if isinstance(error, HTTPException):
        return JsonResponse({"error": error.detail}, error.status_code, dict(error.headers or {}))
    return JsonResponse({"error": "the daemon failed on this request; see its log"}, 500)


def make_app(
    daemon: Callable[[], Daemon], token: bytes | None, monotonic: Callable[[], float] = time.monotonic
) -> Starlette:
    """`daemon`: asked at each call, since a standby may have taken over meanwhile."""
    api = _Api(daemon, token, monotonic)
    reading: dict[str, Handler] = {
        "/healthz": api.healthz,
        "/readyz": api.healthz,
        "/readyz/slot/{slot}": api.ready_slot,
        "/livez": api.livez,
        "/status": api.status,
        "/view": api.view,
        "/metrics": api.metrics,
        "/incidents": api.incidents,
        "/incidents/{incident}": api.timeline,
        "/decisions": api.decisions,
        "/openapi.json": api.openapi,
    }
    routes = [Route(path, handler, methods=["GET"]) for path, handler in reading.items()]
    routes += [Route(path, api.order(path, kind), methods=["POST"]) for path, kind in ORDERS.items()]
    routes.append(Route("/stop", api.stop, methods=["POST"]))
    return Starlette(routes=routes, exception_handlers={HTTPException: _problem, ElasticError: _problem, 500: _problem})
