"""The API's own description, OpenAPI 3.1, made from the records that it reads and writes."""

from collections.abc import Mapping
from typing import Any

import msgspec

from healer import __version__
from healer.incidents import IncidentSummary
from healer.journal import Entry
from healer.orders import ORDERS, Carried
from healer.status import DaemonStatus

REF = "#/components/schemas/{name}"


class Problem(msgspec.Struct):
    """Every answer of 400 and above."""

    error: str


class Liveness(msgspec.Struct):
    loop_age_s: float
    limit_s: float


class Readiness(msgspec.Struct):
    state: str
    why: str


class Timeline(msgspec.Struct):
    incident: IncidentSummary
    entries: list[Entry]


class Stopping(msgspec.Struct):
    stopping: bool


READING: Mapping[str, tuple[str, Any, tuple[int, ...]]] = {
    "/healthz": ("Whether the group serves", Readiness, (200, 503)),
    "/livez": ("Whether the daemon's loop goes round", Liveness, (200, 503)),
    "/readyz": ("Whether the group serves; the same as /healthz", Readiness, (200, 503)),
    "/readyz/slot/{slot}": ("Whether the rank in this slot serves: for load balancers", Readiness, (200, 404, 503)),
    "/status": ("The group, its ranks, and what the daemon thinks of them", DaemonStatus, (200,)),
    "/view": ("Epoch, live slots and placement", dict[str, Any], (200,)),
    "/incidents": ("Past incidents, oldest first", list[IncidentSummary], (200, 400, 503)),
    "/incidents/{incident}": ("One incident, as a timeline", Timeline, (200, 404, 503)),
    "/decisions": ("Decisions, newest first", list[Entry], (200, 400, 503)),
}
"""By path: what it is, the type of its answer, and the statuses."""

_TEXT = {
    200: "the answer",
    202: "accepted; the daemon carries it out in the background",
    400: "the request is not valid",
    401: "a valid bearer token is needed",
    404: "no such thing",
    408: "the body did not come in time",
    409: "it cannot be done now; the reason is in the answer",
    413: "the body is too long",
    415: "the body is not declared as JSON",
    422: "the Idempotency-Key was used for another call",
    429: "too many wrong tokens",
    503: "not now",
}
_CONTROL = (202, 400, 401, 408, 409, 413, 415, 422, 429, 503)
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "A call that is sent again under the same key gets the first answer and is not carried out again.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"},
}


def document(*, with_token: bool) -> dict[str, Any]:
    """The whole document; `with_token` where control calls need the bearer token."""
    answers = [answer for _, answer, _ in READING.values()]
    kinds = [*answers, *ORDERS.values(), Carried, Stopping, Problem]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
    # what the type cannot say: exactly one of the two is given
    components["Scale"]["oneOf"] = [
        {"required": [key], "properties": {key: {"type": kind}}}
        for key, kind in (("ranks", "integer"), ("slots", "array"))
    ]
    by_kind = {id(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    paths: dict[str, Any] = {}
    for path, (summary, answer, statuses) in READING.items():
        operation: dict[str, Any] = {"summary": summary, "responses": _responses(statuses, by_kind[id(answer)])}
        if parameters := _parameters(path):
            operation["parameters"] = parameters
        paths[path] = {"get": operation}
    for path, order in ORDERS.items():
        content = {"application/json": {"schema": by_kind[id(order)]}}
        paths[path] = {
            "post": {
                "summary": (order.__doc__ or "").strip(),
                "parameters": [_KEY],
                "requestBody": {"required": True, "content": content},
                "responses": _responses(_CONTROL, by_kind[id(Carried)]),
            }
        }
    paths["/stop"] = {
        "post": {
            "summary": "End serving and the daemon",
            "parameters": [_KEY],
            "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}},
            "responses": _responses(_CONTROL, by_kind[id(Stopping)]),
        }
    }
    if with_token:
        for operations in paths.values():
            if "post" in operations:
                operations["post"]["security"] = [{"token": []}]
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "healer",
            "version": __version__,
            "description": "What the daemon knows, and what it can be asked.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if with_token:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return found


def _responses(statuses: tuple[int, ...], answer: Any) -> dict[str, Any]:
    problem = {"$ref": REF.format(name="Problem")}
    readiness = answer.get("$ref", "").endswith(("Readiness", "Liveness"))
    found = {}
    for status in statuses:
        own = status < 300 or (status == 503 and readiness)
        schema = answer if own else problem
        found[str(status)] = {"description": _TEXT[status], "content": {"application/json": {"schema": schema}}}
    return found


def _parameters(path: str) -> list[dict[str, Any]]:
    if path in ("/incidents", "/decisions"):
        schema = {"type": "integer", "minimum": 1, "maximum": 1000, "default": 50}
        return [{"name": "limit", "in": "query", "required": False, "schema": schema}]
    if "{slot}" in path:
        return [{"name": "slot", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}}]
    if "{incident}" in path:
        return [{"name": "incident", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    return []
