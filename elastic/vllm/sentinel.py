"""Our part of vLLM's EngineCoreSentinel: what happens at a fault, and who takes which order."""

# mypy: disable-error-code="import-not-found, import-untyped"
import functools
import logging
from typing import Any

import msgspec

from elastic.vllm.engine import InPlace
from elastic.vllm.held import hold
from elastic.vllm.records import NOT_IN_FORCE, Requests

log = logging.getLogger("vllm.healer.in_place")

PROBE_S = 60.0
ORDERS = frozenset({"healer_info", "healer_shrink"})


def install() -> None:
    """May be called again. The guard has compared what is replaced here."""
    from vllm.v1.fault_tolerance import engine_core_sentinel as stock

    sentinel = stock.EngineCoreSentinel
    if getattr(sentinel, "healer_installed", False):
        return
    sentinel.healer_installed = True
    _construct(sentinel)
    _fault(sentinel)
    _commands(sentinel)
    _retry(sentinel)


def place_of(engine: Any) -> InPlace | None:
    """None before the sentinel is made, and without fault tolerance."""
    found: InPlace | None = getattr(getattr(engine, "ft_sentinel", None), "healer", None)
    return found


def _construct(sentinel: Any) -> None:
    original = sentinel.__init__

    @functools.wraps(original)
    def construct(self: Any, engine: Any, parallel_config: Any) -> None:
        original(self, engine, parallel_config)
        self.healer, self.healer_why = None, _not_in_force(engine, parallel_config)
        if not self.healer_why:
            self.healer = InPlace(engine, self)
        log.info("[in-place] engine %d: %s", self.engine_index, self.healer_why or "in force")

    sentinel.__init__ = construct


def _not_in_force(engine: Any, config: Any) -> str:
    """Why this engine stays stock; empty: it does not. In the main thread, before the loop runs: the workers are asked."""
    if not (config.enable_elastic_ep and config.data_parallel_external_lb and hasattr(engine, "eep_scaling_state")):
        return "only with --enable-elastic-ep and an external load balancer"
    try:
        found = engine.model_executor.collective_rpc("healer_probe", timeout=PROBE_S)
    except Exception as error:
        return f"the worker's part does not answer: {error}"
    return "; ".join(f"worker {rank}: {detail}" for rank, (state, detail) in enumerate(found) if state != "ready")


def _fault(sentinel: Any) -> None:
    original = sentinel.on_fault

    @functools.wraps(original)
    def on_fault(self: Any, error: Exception) -> None:
        """In place of vLLM's: requests stay, the engine's group is left. Statuses are vLLM's."""
        from vllm.v1.engine import EngineStatusType

        if self.healer is None:
            original(self, error)
            return
        self.resumed.clear()
        executor = self.engine.model_executor
        dead = bool(getattr(executor, "is_failed", False))
        self.healer.on_fault(error)
        self.status_type = EngineStatusType.DEAD if dead else EngineStatusType.UNHEALTHY
        self.fault_info = type(error).__name__
        log.warning("[FT] Busy loop raised %s; status -> %s", self.fault_info, self.status_type.name, exc_info=error)
        if dead:
            hold(self.engine, Requests.ABORT, self.healer.lost)
        self._push_status()
        self.healer.parked.set()

    sentinel.on_fault = on_fault


def _commands(sentinel: Any) -> None:
    original = sentinel.handle_command

    @functools.wraps(original)
    def handle_command(self: Any, client: int, call: int, given: dict[str, Any]) -> None:
        name = str(given.get("instruction"))

        def answer(success: bool, text: str) -> None:
            _send(self, client, call, given.get("request_id", ""), success, text)

        if name in ORDERS and self.healer is None:
            answer(False, f"{NOT_IN_FORCE}: {self.healer_why}")
        elif name in ORDERS:
            self.healer.command(name, given.get("params", {}), answer)
        elif name == "retry" and self.healer is not None and (why := self.healer.refuse_retry()):
            log.warning("[in-place] retry refused: %s", why)
            answer(False, why)
        else:
            original(self, client, call, given)

    sentinel.handle_command = handle_command


def _send(self: Any, client: int, call: int, request: str, success: bool, text: str) -> None:
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
    from vllm.v1.fault_tolerance.utils import FaultToleranceResult
    from vllm.v1.serial_utils import UtilityResult

    output = UtilityOutput(call)
    output.result = UtilityResult(msgspec.structs.asdict(FaultToleranceResult(request, success, text)))
    self.engine.output_queue.put_nowait((client, EngineCoreOutputs(utility_output=output)))


def _retry(sentinel: Any) -> None:
    original = sentinel.retry

    @functools.wraps(original)
    def retry(self: Any, request: Any) -> Any:
        """vLLM aborts at the fault; here it is left until it is known that nothing better comes."""
        if self.healer is None:
            return original(self, request)
        hold(self.engine, Requests.ABORT, self.healer.lost)
        self.healer.parked.clear()
        return original(self, request)

    sentinel.retry = retry
