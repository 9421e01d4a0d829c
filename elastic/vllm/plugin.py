"""The entry points that vLLM calls. `register` runs in every process of vLLM, `endpoints` in API servers, if VLLM_PLUGINS names
`healer_in_place`. Neither raises: a vLLM that is not as known runs stock, and one line says so."""

import importlib
import logging
from typing import Any

from elastic.vllm import guard
from elastic.vllm.records import GuardState

WORKER_PART = "elastic.vllm.worker.install"
log = logging.getLogger("vllm.healer.in_place")


def register() -> None:
    verdict = guard.verdict()
    if verdict.state != GuardState.READY:
        log.warning("[in-place] not in force, vLLM runs stock: %s", verdict.reason)
        return
    try:
        from elastic.vllm import api, launch, refill, sentinel, waking

        sentinel.install()
        refill.install()
        launch.install()
        waking.install()
        api.guard_scaling()
        _worker()
    except Exception:
        # part of it may be in place: each part is harmless alone, and orders need all of them
        log.exception("[in-place] could not be installed")


def _worker() -> None:
    """The worker's part decides for itself, in the processes that have a worker."""
    try:
        part = importlib.import_module(WORKER_PART)
    except ModuleNotFoundError:
        return
    part.install()


def endpoints() -> Any:
    from elastic.vllm.api import InPlaceRoutes

    return InPlaceRoutes()
