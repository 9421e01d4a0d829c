"""A refill on the engines: the states of vLLM's elastic scaling, over slots with holes.

On a survivor the state prepares while the loop serves, and commits at a boundary under a pause, as a scale-up does. Other than
there, a preparation that fails or is aborted is dropped, and the engine serves on. On a joiner the state takes the place of a
new engine's in a scale-up.
"""

# mypy: disable-error-code="import-not-found, import-untyped, has-type"
import functools
import logging
import threading
import time
from concurrent.futures import Future
from typing import Any

import msgspec
from vllm.config import ParallelConfig
from vllm.distributed.elastic_ep.elastic_state import (
    ElasticEPScalingState,
    ScaleUpExistingEngineState,
    ScaleUpNewEngineState,
)
from vllm.v1.engine import ReconfigureDistributedRequest
from vllm.v1.engine.core import DPEngineCoreProc

from elastic.vllm import groups
from elastic.vllm.records import RefillAnswer, RefillPrepare, Refusal
from elastic.vllm.sentinel import place_of
from elastic.vllm.worker.interface import RefillOrder, read_order

log = logging.getLogger("vllm.healer.in_place")

IDLE_S = 0.005
"""vLLM's loop spins while a scaling is prepared; with nothing to do it rests so long each time."""


def order_from(prepare: RefillPrepare) -> RefillOrder:
    boot = prepare.bootstrap
    return RefillOrder(
        prepare.epoch,
        prepare.live,
        prepare.joiners,
        prepare.source,
        boot.host,
        boot.store_port,
        prepare.timeout_s,
    )


class Survivor(ElasticEPScalingState):  # type: ignore[misc]
    """Of an engine that serves. Progresses in the loop."""

    def __init__(self, engine: Any, prepare: RefillPrepare, request: Any, config: Any) -> None:
        super().__init__(
            engine.model_executor, engine, engine.vllm_config, config, "existing", "scale_up", reconfig_request=request
        )
        self.order = order_from(prepare)
        self.deadline = time.monotonic() + prepare.timeout_s
        self.committed: Future[float] = Future()
        self._stop = threading.Event()
        self._paused_at = 0.0

    @property
    def slot(self) -> int:
        return int(self.vllm_config.parallel_config.data_parallel_rank)

    def progress(self) -> bool:
        if self.commit_requested:
            moved: bool = super().progress()
            return moved
        try:
            moved = super().progress()
        except Exception as error:
            log.exception("[in-place] slot %d: preparation of epoch %d", self.slot, self.order.epoch)
            drop(self.engine_core, f"{type(error).__name__}: {error}")
            return False
        if not moved and not self.engine_core.has_work():
            time.sleep(IDLE_S)
        return moved

    def stop(self) -> None:
        self._stop.set()
        self._prepare_executor.shutdown(wait=False, cancel_futures=True)

    def _init_new_dp_group(self) -> tuple[Any, Any]:
        store = groups.connect(self.order.store_host, self.order.store_port)
        prefix = f"refill/{self.order.epoch}/engine"
        groups.gather(store, prefix, self.slot, self.order.members, self.deadline, self._stop.is_set)
        return groups.form(store, prefix, self.slot, self.order.members, self.deadline), store

    def _execute_async(self, execute_method: str, *_: Any) -> bool:
        """The worker's part instead of ElasticEPScalingExecutor, with the same contract: keys that are set when it has ended."""
        if self._prepare_future is None:
            given = (self.order._asdict(), self.reconfig_request)
            keys = self._collective_rpc("healer_refill_prepare", args=given)
            self._prepare_future = self._prepare_executor.submit(self._wait_for, keys)
        if not self._prepare_future.done():
            return False
        self._prepare_future.result()
        self._prepare_future = None
        self._collective_rpc("healer_refill_prepared")
        return True

    def _wait_for(self, keys: list[str]) -> None:
        store = groups.connect(self.order.store_host, self.order.store_port)
        while not store.check(keys):
            if self._stop.is_set() or time.monotonic() > self.deadline:
                raise groups.NotMet(f"the workers have not prepared in time ({keys})")
            time.sleep(IDLE_S)

    def _progress_existing_engine(self) -> bool:
        if self.state != ScaleUpExistingEngineState.COMMIT_SCALE_UP or not self.commit_requested:
            moved: bool = super()._progress_existing_engine()
            return moved
        self._commit_new_dp_group()
        groups.settle(self.new_dp_group, self.vllm_config.parallel_config.cpu_distributed_timeout)
        self._collective_rpc("healer_refill_commit")
        self.state = ScaleUpExistingEngineState.COMPLETE
        self._update_parallel_config()
        place = place_of(self.engine_core)
        assert place is not None
        place.live, place.changed = self.order.members, True
        self.committed.set_result(time.monotonic())
        return True


class Joiner(ElasticEPScalingState):  # type: ignore[misc]
    """Of an engine that fills a slot."""

    def __init__(self, engine: Any, order: RefillOrder) -> None:
        config = engine.vllm_config.parallel_config
        super().__init__(engine.model_executor, engine, engine.vllm_config, config, "new", "scale_up")
        self.order = order

    def _join(self, phase: str) -> None:
        self._collective_rpc("healer_join", args=(self.order._asdict(), phase))

    def _progress_new_engine(self) -> bool:
        import torch
        import torch.distributed as dist

        engine = self.engine_core
        if self.state == ScaleUpNewEngineState.PRE_KV_INIT:
            self._join("receive")
            engine.available_gpu_memory_for_kv_cache = ParallelConfig.sync_kv_cache_memory_size(self.new_dp_group, -1)
            self.state = ScaleUpNewEngineState.PREPARE
        elif self.state == ScaleUpNewEngineState.PREPARE:
            self._join("warm")
            self._mark_ready_for_switch()
            # the others come to this when they commit; what they know of waves is the most
            waves = torch.tensor([0, 0, 0], dtype=torch.int32)
            dist.all_reduce(waves, op=dist.ReduceOp.MAX, group=self.new_dp_group)
            engine.engines_running = bool(waves[0])
            engine.current_wave, engine.step_counter = int(waves[1]), int(waves[2])
            groups.settle(self.new_dp_group, self.vllm_config.parallel_config.cpu_distributed_timeout)
            self._join("commit")
            self.state = ScaleUpNewEngineState.COMPLETE
        return True


def drop(engine: Any, why: str) -> str:
    """Forget a preparation that is not committed; the engine serves on. Returns the state that it was in."""
    state, place = engine.eep_scaling_state, place_of(engine)
    assert place is not None
    if not isinstance(state, Survivor) or state.commit_requested:
        return ""
    state.stop()
    engine.eep_scaling_state, engine.process_input_queue_block = None, True
    place.refill_error = why
    if state.new_dp_group is not None:
        groups.leave(state, "new_dp_group")
    try:
        engine.model_executor.collective_rpc("healer_refill_abort")
    except Exception:
        log.exception("[in-place] the workers' part of an abort")  # the engine serves on in the old groups
    return str(state.state.name).lower()


# --- utilities of the engine core, called by name through the loop ----------------------------------------------------------


def _answer(engine: Any, epoch: int, ok: bool, detail: str = "", **more: Any) -> dict[str, Any]:
    slot = engine.vllm_config.parallel_config.data_parallel_rank
    found: dict[str, Any] = msgspec.to_builtins(RefillAnswer(epoch, slot, ok, detail, **more))
    return found


def healer_refill_prepare(engine: Any, given: dict[str, Any]) -> dict[str, Any]:
    from copy import deepcopy

    place, prepare = place_of(engine), msgspec.convert(given, RefillPrepare, strict=False)
    if place is None:
        return _answer(engine, prepare.epoch, False, "not in force on this engine", refused=Refusal.WRONG_STATE)
    members = tuple(sorted(prepare.live + prepare.joiners))
    known = engine.eep_scaling_state
    if isinstance(known, Survivor) and known.order == order_from(prepare):
        return _answer(engine, prepare.epoch, True, known.ready_key)  # a repetition
    if refused := place.refuse(prepare.epoch, prepare, members):
        return _answer(engine, prepare.epoch, False, refused[1], refused=refused[0])
    wrong = ""
    if known is not None:
        wrong = f"another scaling is in {known.state.name.lower()}"
    elif tuple(sorted(prepare.live)) != place.live or set(prepare.joiners) & set(place.live) or not prepare.joiners:
        wrong = f"live are {list(place.live)} here, the order says {list(prepare.live)} and {list(prepare.joiners)}"
    elif prepare.bootstrap.size != place.size:
        wrong = f"the size is {place.size}, the order says {prepare.bootstrap.size}"
    if wrong:
        return _answer(engine, prepare.epoch, False, wrong, refused=Refusal.WRONG_STATE)
    boot, config = prepare.bootstrap, deepcopy(engine.vllm_config.parallel_config)
    request = ReconfigureDistributedRequest(
        new_data_parallel_size=boot.size,
        new_data_parallel_rank=-1,
        new_data_parallel_rank_local=-1,
        new_data_parallel_master_ip=boot.host,
        new_data_parallel_master_port=boot.port,
        new_data_parallel_master_port_list=list(boot.ports),
        coord_store_port=boot.store_port,
    )
    config.data_parallel_master_ip, config._coord_store_port = boot.host, boot.store_port
    config.data_parallel_master_port, config._data_parallel_master_port_list = boot.port, list(boot.ports)
    place.take(prepare.epoch, prepare)
    place.refill_error = ""
    state = Survivor(engine, prepare, request, config)
    engine.eep_scaling_state, engine.process_input_queue_block = state, False
    return _answer(engine, prepare.epoch, True, state.ready_key)


def healer_refill_pause(engine: Any, epoch: int) -> Any:
    """The first half of a commit: all live engines agree to schedule nothing. A future, or an answer that refuses."""
    place, state = place_of(engine), engine.eep_scaling_state
    if not isinstance(state, Survivor) or state.order.epoch != epoch or not state.is_ready_for_switch():
        return _answer(engine, epoch, False, _why_not(place, state), refused=Refusal.WRONG_STATE)
    assert place is not None
    if engine.is_scheduler_paused():
        return _answer(engine, epoch, False, "the scheduler is paused by somebody else", refused=Refusal.WRONG_STATE)
    place.pausing = True
    return _then(engine.pause_scheduler(mode="keep", clear_cache=False), lambda: _answer(engine, epoch, True))


def healer_refill_commit(engine: Any, epoch: int) -> Any:
    """The second half: in the paused loop. The future ends when this engine has switched."""
    place, state = place_of(engine), engine.eep_scaling_state
    if not isinstance(state, Survivor) or state.order.epoch != epoch or not state.is_ready_for_switch():
        return _answer(engine, epoch, False, _why_not(place, state), refused=Refusal.WRONG_STATE)
    engine.commit_prepared_elastic_ep()
    return _then(state.committed, lambda: _answer(engine, epoch, True))


def healer_refill_resume(engine: Any, epoch: int) -> dict[str, Any]:
    """A barrier among all members, the joiner included: it comes here by itself."""
    place = place_of(engine)
    assert place is not None
    engine.resume_scheduler()
    place.pausing = False
    return _answer(engine, epoch, True)


def healer_refill_abort(engine: Any, epoch: int) -> dict[str, Any]:
    state = engine.eep_scaling_state
    if not isinstance(state, Survivor):
        return _answer(engine, epoch, True, "nothing to abort")
    if state.order.epoch > epoch:
        return _answer(engine, epoch, False, f"epoch {state.order.epoch} is being prepared", refused=Refusal.STALE)
    if state.commit_requested:
        return _answer(engine, epoch, False, "it is being committed", refused=Refusal.WRONG_STATE)
    place = place_of(engine)
    if place is not None and place.pausing:
        return _answer(engine, epoch, False, "it is paused for its commit; order a shrink", refused=Refusal.WRONG_STATE)
    return _answer(engine, epoch, True, drop(engine, "aborted"))


def _why_not(place: Any, state: Any) -> str:
    if not isinstance(state, Survivor):
        return (place.refill_error if place is not None else "") or "nothing is prepared"
    return f"epoch {state.order.epoch} is in {state.state.name.lower()}"


def _then(future: Any, answer: Any) -> Any:
    """A future of the answer; failures go on. None counts as done."""
    if future is None:
        return answer()
    found: Future[Any] = Future()

    def done(before: Future[Any]) -> None:
        error = before.exception()
        if error is not None:
            found.set_exception(error)
        else:
            found.set_result(answer())

    future.add_done_callback(done)
    return found


# --- installing -------------------------------------------------------------------------------------------------------------


def install() -> None:
    """May be called again. The guard has compared what is replaced here."""
    engine = DPEngineCoreProc
    if getattr(engine, "healer_installed", False):
        return
    engine.healer_installed = True
    for utility in (
        healer_refill_prepare,
        healer_refill_pause,
        healer_refill_commit,
        healer_refill_resume,
        healer_refill_abort,
    ):
        setattr(engine, utility.__name__, utility)
    ElasticEPScalingState.ready_key = property(
        lambda state: f"eep_ready/{state.engine_core.vllm_config.parallel_config.data_parallel_rank}"
    )
    _joiners(engine)
    _stock_scaling(engine)


def _joiners(engine: Any) -> None:
    stock_group, stock_state = engine._init_data_parallel, engine._eep_scale_up_before_kv_init

    @functools.wraps(stock_group)
    def init_data_parallel(self: Any, vllm_config: Any) -> None:
        config = vllm_config.parallel_config
        order = read_order(config)
        if order is None:
            stock_group(self, vllm_config)
            return
        store = groups.connect(order.store_host, order.store_port)
        prefix, deadline = f"refill/{order.epoch}/engine", time.monotonic() + order.timeout_s
        slot = config.data_parallel_rank
        groups.gather(store, prefix, slot, order.members, deadline, lambda: False)
        self.dp_rank, self.dp_size = slot, config.data_parallel_size
        self.dp_group, self.dp_store = groups.form(store, prefix, slot, order.members, deadline), store

    @functools.wraps(stock_state)
    def before_kv_init(self: Any) -> None:
        order = read_order(self.vllm_config.parallel_config)
        if order is None:
            stock_state(self)
            return
        self.ignore_start_dp_wave = True
        self.eep_scaling_state = Joiner(self, order)
        self.eep_scaling_state.run_pre_kv_init_states()
        self.process_input_queue_block = False

    engine._init_data_parallel, engine._eep_scale_up_before_kv_init = init_data_parallel, before_kv_init


def _stock_scaling(engine: Any) -> None:
    stock = engine.reinitialize_distributed

    @functools.wraps(stock)
    def reinitialize_distributed(self: Any, reconfig_request: ReconfigureDistributedRequest) -> Any:
        place = place_of(self)
        if place is not None and place.empty:
            raise RuntimeError(f"slots {list(place.empty)} are empty: refill them before scaling")
        return stock(self, reconfig_request)

    engine.reinitialize_distributed = reinitialize_distributed
    switched = ElasticEPScalingState._update_parallel_config

    @functools.wraps(switched)
    def update_parallel_config(self: Any) -> None:
        switched(self)
        place = place_of(self.engine_core)
        if place is not None and not isinstance(self, Survivor):
            place.live, place.changed = tuple(range(place.size)), True

    ElasticEPScalingState._update_parallel_config = update_parallel_config
