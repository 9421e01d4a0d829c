"""Puts the worker's part into vLLM's workers. Called by the plugin in every process; what is heavy is imported in workers only."""

# mypy: disable-error-code="import-not-found, import-untyped"
import functools
import logging
from collections.abc import Callable
from typing import Any

from elastic.vllm.guard import Part, verdict
from elastic.vllm.records import GuardState
from elastic.vllm.worker.interface import read_order

log = logging.getLogger("vllm.healer.in_place")

METHODS = (
    "healer_probe",
    "healer_leave",
    "healer_shrink",
    "healer_refill_prepare",
    "healer_refill_prepared",
    "healer_refill_commit",
    "healer_refill_abort",
    "healer_join",
)


class Stock:
    """Of a worker that is left as it is."""

    def __init__(self, why: str) -> None:
        self._why = why

    def healer_probe(self) -> tuple[str, str]:
        return ("stock", self._why)


def install() -> None:
    """Wrap the point where every worker is made. May be called again."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.init_worker
    if getattr(original, "healer", False):
        return

    @functools.wraps(original)
    def init_worker(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        attach(self.worker)

    init_worker.healer = True  # type: ignore[attr-defined]
    WorkerWrapperBase.init_worker = init_worker


def attach(worker: Any) -> None:
    """Before the worker's groups are formed. A worker class that brings its own methods keeps them."""
    if hasattr(type(worker), "healer_probe"):
        return
    part: Any
    if why := refusal(worker.vllm_config):
        log.info("[in-place] off in this worker: %s", why)
        part = Stock(why)
    else:
        part = _member(worker)
    for name in METHODS:
        if hasattr(part, name):
            setattr(worker, name, getattr(part, name))


exchanges: dict[str, Callable[[], Any]] = {}
"""By vLLM's name of the all-to-all back end. NIXL EP is the only one whose graphs outlive a peer."""


def refusal(vllm_config: Any) -> str:
    """Why this worker cannot heal in place; empty: it can."""
    found = verdict(Part.WORKER)
    if found.state != GuardState.READY:
        return found.reason or str(found.state)
    config = vllm_config.parallel_config
    backend = config.all2all_backend
    if backend != "nixl_ep" and backend not in exchanges:
        return f"all2all back end {backend}: only nixl_ep keeps its graphs when a rank is lost"
    if backend == "nixl_ep" and not config.enable_elastic_ep:
        return "--enable-elastic-ep is needed: only then groups can be replaced"
    if not config.enable_eplb:
        return "--enable-eplb is needed: it keeps the expert maps that are changed"
    if config.pipeline_parallel_size > 1 or config.prefill_context_parallel_size > 1:
        return "pipeline and prefill-context parallel groups are not supported"
    if not config.disable_nccl_for_dp_synchronization:
        return "--disable-nccl-for-dp-synchronization is needed: ranks agree on each step over gloo"
    return ""


def _member(worker: Any) -> Any:
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import all2all
    from vllm.distributed.eplb import eplb_state
    from vllm.distributed.eplb.eplb_utils import CpuGpuEvent
    from vllm.distributed.stateless_coordinator import StatelessGroupCoordinator
    from vllm.v1.worker import dp_utils
    from vllm.v1.worker.sentinel.gpu_worker_sentinel import WorkerSentinel

    from elastic.vllm.worker import dp_sync, experts, meeting
    from elastic.vllm.worker.exchange import exchange
    from elastic.vllm.worker.manager import replace_manager
    from elastic.vllm.worker.member import Member

    dp_sync.replace_sync(parallel_state, dp_utils)
    dp_sync.replace_retry(WorkerSentinel)
    experts.replace_rearrangement(eplb_state)
    experts.replace_waiting(CpuGpuEvent)
    experts.replace_reduction(eplb_state.EplbState)
    meeting.replace_coordinator(StatelessGroupCoordinator)
    config = worker.vllm_config.parallel_config
    if config.all2all_backend == "nixl_ep":
        replace_manager(all2all.NixlEPAll2AllManager)
        used: Any = exchange
    else:
        used = exchanges[config.all2all_backend]()
    return Member(worker, used, read_order(config))
