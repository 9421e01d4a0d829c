"""HTTP routes on the API server of each rank, under /v1/healer/in-place, and the refusal of stock scaling while a slot is empty.

Answers are the records of `records` as JSON. 400: the order cannot be read; 409: refused, the record says why; 503: not in
force here; 504: the engine did not answer in time.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import asyncio
import contextlib
import functools
import time
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from elastic.vllm import guard
from elastic.vllm.records import (
    NOT_IN_FORCE,
    PREFIX,
    EngineInfo,
    GuardState,
    Info,
    RefillAbort,
    RefillAnswer,
    RefillCommit,
    RefillPrepare,
    ShrinkOrder,
    ShrinkResult,
)

INFO_S = 2.0
SLACK_S = 2.0
UTILITY_S = 30.0
PAUSE_S, COMMIT_S, RESUME_S = 10.0, 60.0, 30.0
"""Of the parts of a commit: the others are under way in the same second, or something is wrong."""


class NotInForce(Exception):
    """vLLM is stock here; the message says why."""


class InPlaceRoutes:
    """The endpoint plugin."""

    name = "healer_in_place"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        app.add_api_route(PREFIX, _info, methods=["GET"])
        app.add_api_route(f"{PREFIX}/shrink", _shrink, methods=["POST"])
        app.add_api_route(f"{PREFIX}/refill/prepare", _prepare, methods=["POST"])
        app.add_api_route(f"{PREFIX}/refill/commit", _commit, methods=["POST"])
        app.add_api_route(f"{PREFIX}/refill/abort", _abort, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        pass


def why_not(client: Any) -> str:
    """Why healing in place is not in force in this API server; empty: it is."""
    config = client.vllm_config.parallel_config
    verdict = guard.verdict()
    if verdict.state != GuardState.READY:
        return verdict.reason
    if not config.enable_fault_tolerance:
        return "--enable-fault-tolerance is off"
    if not config.enable_elastic_ep:
        return "--enable-elastic-ep is off"
    if not config.data_parallel_external_lb:
        return "only with an external load balancer, one API server for each rank"
    return ""


def _client(request: Request) -> Any:
    client = request.app.state.engine_client
    if why := why_not(client):
        raise NotInForce(why)
    return client


def _json(record: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(record), status_code=status, media_type="application/json")


def _error(text: str, status: int) -> Response:
    """vLLM's own envelope."""
    kind = "healer_in_place"
    return JSONResponse({"error": {"message": text, "type": kind, "param": None, "code": status}}, status_code=status)


def _guarded(route: Any) -> Any:
    @functools.wraps(route)
    async def run(raw: Request) -> Response:
        try:
            found: Response = await route(raw)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
            return _error(str(error), 400)
        except NotInForce as error:
            return _error(f"not in force: {error}", 503)
        except TimeoutError:
            return _error("the engine did not answer in time", 504)
        except Exception as error:  # an engine's failure message, which says what went wrong
            return _error(str(error), 500)
        return found

    return run


async def engine_info(client: Any) -> EngineInfo:
    """Raises TimeoutError."""
    told = await _order(client, "healer_info", {}, INFO_S)
    return msgspec.json.decode(told, type=EngineInfo)


async def _order(client: Any, name: str, params: dict[str, Any], timeout_s: float) -> str:
    """To the engine's input thread. Raises TimeoutError, NotInForce, and ValueError where the order is none."""
    from vllm.v1.engine.core_client import FT_UTILITY_METHOD
    from vllm.v1.fault_tolerance.utils import FaultToleranceRequest

    request = FaultToleranceRequest(instruction=name, params=params)
    # not handle_fault: that would show a refusal as ft_error in /fault_tolerance/status for ever
    call = client.engine_core.call_utility_async(FT_UTILITY_METHOD, request)
    told = await asyncio.wait_for(call, timeout_s)
    reason = str(told["reason"])
    if reason.startswith(NOT_IN_FORCE):
        raise NotInForce(reason.removeprefix(f"{NOT_IN_FORCE}: "))
    if not told["success"] and not reason.startswith("{"):
        raise ValueError(reason)
    return reason


@_guarded
async def _info(raw: Request) -> Response:
    client, verdict = raw.app.state.engine_client, guard.verdict()
    if why := why_not(client):
        state = GuardState.STOCK if verdict.state == GuardState.READY else verdict.state
        return _json(Info(1, state, why, verdict.vllm, None))
    try:
        return _json(Info(1, verdict.state, "", verdict.vllm, await engine_info(client)))
    except TimeoutError:
        return _json(Info(1, verdict.state, "the engine did not answer in time", verdict.vllm, None))
    except NotInForce as error:
        return _json(Info(1, GuardState.STOCK, str(error), verdict.vllm, None))


@_guarded
async def _shrink(raw: Request) -> Response:
    client = _client(raw)
    order = msgspec.json.decode(await raw.body(), type=ShrinkOrder)
    told = await _order(client, "healer_shrink", msgspec.to_builtins(order), order.timeout_s + SLACK_S)
    result = msgspec.json.decode(told, type=ShrinkResult)
    if result.serves:
        _use_store(client, order.store_host, order.store_port)
    return _json(result, 409 if result.refused is not None else 200)


def _use_store(client: Any, host: str, port: int) -> None:
    """Stock scaling and its status look for their store where rank 0 had it, which may be gone."""
    from vllm.distributed.utils import get_cached_tcp_store_client

    config, coordinator = client.vllm_config.parallel_config, client.engine_core.external_eep_coordinator
    config.data_parallel_master_ip, config._coord_store_port = host, port
    coordinator.active_reconfig_store = coordinator.active_epoch = None
    get_cached_tcp_store_client.cache_clear()


async def _utility(client: Any, name: str, *args: Any, timeout_s: float) -> RefillAnswer:
    told = await asyncio.wait_for(client.engine_core.call_utility_async(name, *args), timeout_s)
    return msgspec.convert(told, RefillAnswer)


def _refill_answer(found: RefillAnswer) -> Response:
    return _json(found, 200 if found.ok else 409)


@_guarded
async def _prepare(raw: Request) -> Response:
    client = _client(raw)
    prepare = msgspec.json.decode(await raw.body(), type=RefillPrepare)
    given = msgspec.to_builtins(prepare)
    return _refill_answer(await _utility(client, "healer_refill_prepare", given, timeout_s=UTILITY_S))


@_guarded
async def _commit(raw: Request) -> Response:
    """On all live ranks at the same time: pause together, switch, go on together."""
    client, order = _client(raw), msgspec.json.decode(await raw.body(), type=RefillCommit)
    began = time.monotonic()
    for name, limit_s in (("pause", PAUSE_S), ("commit", COMMIT_S), ("resume", RESUME_S)):
        found = await _utility(client, f"healer_refill_{name}", order.epoch, timeout_s=limit_s)
        if not found.ok:
            return _refill_answer(found)
    engine = await engine_info(client)
    pause_s = round(time.monotonic() - began, 4)
    answer = msgspec.structs.replace(found, pause_s=pause_s, detail=f"live {list(engine.live)}")
    _use_store(client, order.store_host, order.store_port)
    return _refill_answer(answer)


@_guarded
async def _abort(raw: Request) -> Response:
    client, epoch = _client(raw), msgspec.json.decode(await raw.body(), type=RefillAbort).epoch
    return _refill_answer(await _utility(client, "healer_refill_abort", epoch, timeout_s=UTILITY_S))


def guard_scaling() -> None:
    """/scale_elastic_ep answers 400 while a slot is empty: vLLM would wait for it behind shut gates, for ever."""
    from vllm.v1.engine.async_llm import AsyncLLM

    stock = AsyncLLM.scale_elastic_ep
    if getattr(stock, "healer_installed", False):
        return

    @functools.wraps(stock)
    async def scale_elastic_ep(self: Any, new_data_parallel_size: int, drain_timeout: int = 300) -> Any:
        engine = None
        if not why_not(self):
            with contextlib.suppress(NotInForce):
                engine = await engine_info(self)
        if engine is not None:
            empty = [slot for slot in range(engine.size) if slot not in engine.live]
            if empty:
                raise ValueError(f"Cannot scale while slots {empty} are empty: refill them first.")
            if engine.phase is not None or engine.refill:
                raise ValueError("Cannot scale while an in-place order is under way.")
        return await stock(self, new_data_parallel_size, drain_timeout)

    scale_elastic_ep.healer_installed = True  # type: ignore[attr-defined]
    AsyncLLM.scale_elastic_ep = scale_elastic_ep
