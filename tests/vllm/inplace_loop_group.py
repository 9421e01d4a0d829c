"""Several of vLLM's own engine loops in one process: DPEngineCoreProc.run_busy_loop, scheduler, sentinel and gloo groups are the
real ones; model, worker processes, API server and coordinator are not there. For inplace_loops.py.

A worker is a thread. To kill a rank is to let its loop and its worker raise SystemExit and to drop their groups, as the kernel
does with sockets.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import contextlib
import itertools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from elastic.vllm import groups, waking
from elastic.vllm.records import EngineInfo, Requests, ShrinkResult
from elastic.vllm.worker.interface import ORDER_KEY, REFILL_VARIABLE, RefillOrder, order_of
from tests.vllm.inplace_scheduler import Engine as Scheduling
from tests.vllm.inplace_scheduler import following

STEP_S, LIMIT_S = 0.005, 30.0
MODEL = sys.argv[1] if len(sys.argv) > 1 else ""


class Worker(threading.Thread):
    """Executor and worker: one call after another, in a thread."""

    def __init__(self, slot: int) -> None:
        super().__init__(daemon=True)
        self.slot, self.group, self.is_failed, self.is_sleeping = slot, None, False, False
        self.calls: queue.Queue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = queue.Queue()
        self.tokens: dict[str, list[int]] = {}
        self.fails = ""
        self.dies = False
        self.freed: threading.Event | None = None
        """Of one whose next step waits until this is set, as in a kernel, and has then met a fault."""
        self.stands = threading.Event()
        """It waits."""

    def run(self) -> None:
        while True:
            future, call, given = self.calls.get()
            if self.dies:
                return
            try:
                future.set_result(call(*given))
            except Exception as error:
                groups.forget(error)
                future.set_exception(RuntimeError(f"worker: {error}"))

    def call(self, call: Callable[..., Any], *given: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.calls.put((future, call, given))
        return future

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return [self.call(getattr(self, method), *args).result(timeout)]

    def execute_model(self, scheduled: Any, non_block: bool = False) -> "Future[Any]":
        return self.call(self.step, scheduled)

    def execute_dummy_batch(self) -> None:
        self.call(self.together).result()

    def together(self) -> None:
        import torch
        from vllm.distributed.utils import cpu_all_reduce_

        time.sleep(STEP_S)
        if self.freed is not None:
            self.stands.set()
            self.freed.wait(LIMIT_S)
            self.freed = None
            raise RuntimeError("fault detected in all2all")
        try:
            cpu_all_reduce_(torch.ones(1, dtype=torch.int32), self.group)
        except Exception as error:
            groups.forget(error)
            groups.leave(self, "group")
            raise

    def step(self, scheduled: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        if scheduled.total_num_scheduled_tokens:
            self.together()
        for new in scheduled.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids)
        began = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        began |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names, sampled = [], []
        for name, count in scheduled.num_scheduled_tokens.items():
            tokens, end = self.tokens[name], began[name] + count
            while len(tokens) <= end:
                tokens.append(following(tokens))
            names.append(name)
            sampled.append([tokens[end]] if end >= self.known(name) else [])
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={n: i for i, n in enumerate(names)}, sampled_token_ids=sampled
        )

    known: Callable[[str], int]

    def synchronize_device(self) -> None:
        pass

    def healer_probe(self) -> tuple[str, str]:
        return "ready", ""

    def healer_leave(self, epoch: int) -> None:
        groups.leave(self, "group")

    def healer_shrink(
        self, epoch: int, survivors: list[int], host: str, port: int, timeout_s: float
    ) -> tuple[bool, str]:
        if self.fails:
            return False, self.fails
        store, prefix, deadline = groups.connect(host, port), f"shrink/{epoch}/worker", time.monotonic() + timeout_s
        groups.gather(store, prefix, self.slot, survivors, deadline, lambda: False)
        self.group = groups.form(store, prefix, self.slot, survivors, deadline)
        return True, ""

    def healer_refill_prepare(self, given: dict[str, Any], request: Any) -> str:
        order, self.prepared, key = order_of(given), None, f"prepared/{given['epoch']}/{self.slot}"

        def prepare() -> None:
            store, deadline = groups.connect(order.store_host, order.store_port), time.monotonic() + order.timeout_s
            with contextlib.suppress(groups.NotMet):
                prefix = f"refill/{order.epoch}/worker"
                groups.gather(store, prefix, self.slot, order.members, deadline, lambda: False)
                self.prepared = groups.form(store, prefix, self.slot, order.members, deadline)
            store.set(key, b"1")

        threading.Thread(target=prepare, daemon=True).start()
        return key

    def healer_refill_prepared(self) -> None:
        if self.prepared is None or self.fails:
            raise RuntimeError(self.fails or "not prepared")

    def healer_refill_commit(self) -> None:
        groups.leave(self, "group")
        self.group, self.prepared = self.prepared, None

    def healer_refill_abort(self) -> None:
        self.prepared = None

    def healer_join(self, given: dict[str, Any], phase: str) -> None:
        if phase == "receive":
            self.healer_refill_prepare(given, None)
            while self.prepared is None:
                time.sleep(0.01)
            self.healer_refill_commit()


def scheduling() -> Scheduling:
    return Scheduling(MODEL, async_scheduling=False, longest=600, blocks=800)


def engine_class() -> type:
    from vllm.v1.engine.core import DPEngineCoreProc, EngineShutdownState
    from vllm.v1.fault_tolerance.engine_core_sentinel import EngineCoreSentinel

    class Engine(DPEngineCoreProc):  # type: ignore[misc]
        def __init__(
            self, slot: int, size: int, part: Scheduling, store: Any, joins: RefillOrder | None = None
        ) -> None:
            self.hasher, self.scheduler, self.vllm_config = part.hasher, part.scheduler, part.vllm_config
            config = self.vllm_config.parallel_config
            config.__dict__.update(
                data_parallel_rank=slot, data_parallel_size=size, enable_elastic_ep=True, data_parallel_external_lb=True
            )
            self.engine_index, self.dp_rank, self.slot = slot, slot, slot
            self.input_queue, self.output_queue, self.aborts_queue = queue.Queue(), queue.Queue(), queue.Queue()
            self.shutdown_state, self.reject_new_requests = EngineShutdownState.RUNNING, False
            self.engines_running = self.pending_pause = self.ignore_start_dp_wave = False
            self.step_counter, self.current_wave, self.dp_sync_interval = 0, 0, 16
            self.prefill_schedule_interval, self.log_stats = 1, False
            self.publish_dp_lb_stats, self.has_coordinator, self.process_input_queue_block = False, True, True
            self.eep_scaling_state, self.batch_queue, self.async_scheduling = None, None, False
            self.check_for_draft_tokens = self.is_pooling_model = self.is_mm_encoder_only = False
            self._idle_state_callbacks, self._weight_version, self.step_fn = [], "default", self.step
            self.enable_fault_tolerance = True
            self.model_executor = Worker(slot)
            self.model_executor.known = lambda name: self.scheduler.requests[name].num_tokens
            self.model_executor.start()
            self.available_gpu_memory_for_kv_cache = 1 << 20
            config.eplb_config.num_redundant_experts = 0
            if joins is None:
                for owner, name, kind in ((self, "dp_group", "engine"), (self.model_executor, "group", "worker")):
                    until = time.monotonic() + LIMIT_S
                    setattr(owner, name, groups.form(store, f"start/{kind}", slot, range(size), until))
            else:
                config.__dict__.update(data_parallel_master_ip="127.0.0.1", _coord_store_port=joins.store_port)
                self._init_data_parallel(self.vllm_config)
                self._eep_scale_up_before_kv_init()
            self.ft_sentinel = EngineCoreSentinel(self, config)
            self.results: dict[int, Any] = {}
            self.loop = threading.Thread(target=self.live, daemon=True)

        def live(self) -> None:
            with contextlib.suppress(SystemExit):
                self.run_busy_loop()

        def execute_dummy_batch(self) -> None:
            if self.model_executor.dies:
                raise SystemExit
            super().execute_dummy_batch()

    return Engine


class Group:
    """Engines 0..size-1, a coordinator's work, and a controller."""

    calls = itertools.count(1)

    def __init__(self, size: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.size, self.epoch = size, 0
        kind, made = engine_class(), dict[int, Any]()
        # one after another: threads that import the same modules may wait for each other
        parts = [scheduling() for _ in range(size)]

        def make(slot: int) -> None:
            made[slot] = kind(slot, size, parts[slot], groups.connect("127.0.0.1", self.store.port))

        threads = [threading.Thread(target=make, args=(slot,)) for slot in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.engines = made
        self.coordinator_away = False
        self.answers: dict[str, list[int]] = {}
        self.ended: dict[str, Any] = {}
        for engine in self.engines.values():
            engine.loop.start()
            threading.Thread(target=self.coordinate, args=(engine,), daemon=True).start()

    def call_all(self) -> None:
        """As a coordinator that was started again."""
        from vllm.v1.engine import EngineCoreRequestType

        for engine in self.engines.values():
            engine.input_queue.put((EngineCoreRequestType.START_DP_WAVE, (0, waking.WAKE)))

    def coordinate(self, engine: Any) -> None:
        """What API server and DP coordinator do with an engine's outputs."""
        from vllm.v1.engine import EngineCoreRequestType

        while True:
            _, outputs = engine.output_queue.get()
            if outputs.start_wave is not None and not self.coordinator_away:
                for other in self.engines.values():
                    if other is not engine:
                        wave = (outputs.start_wave, engine.engine_index)
                        other.input_queue.put((EngineCoreRequestType.START_DP_WAVE, wave))
            if outputs.utility_output is not None and outputs.utility_output.call_id > 0:
                output = outputs.utility_output
                failed = {"ok": False, "detail": output.failure_message}
                engine.results[output.call_id] = failed if output.failure_message else output.result.result
            for one in outputs.outputs or ():
                self.answers.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ended[one.request_id] = one.finish_reason

    def ask(self, slot: int, tokens: int) -> tuple[str, list[int]]:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequestType
        from vllm.v1.request import Request

        name = f"q{next(self.calls)}"
        prompt = [3 + slot, 7, *range(20, 20 + 9)]
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = Request(name, prompt, params, None, block_hasher=self.engines[slot].hasher)
        self.engines[slot].input_queue.put((EngineCoreRequestType.ADD, (request, 0)))
        full = list(prompt)
        while len(full) < len(prompt) + tokens:
            full.append(following(full))
        return name, full[len(prompt) :]

    def until(self, condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"not in time: {what}; {self.states()}"
            time.sleep(0.005)

    def states(self) -> list[str]:
        return [msgspec.json.encode(e.ft_sentinel.healer.info()).decode() for e in self.engines.values()]

    def right(self, *asked: tuple[str, list[int]]) -> None:
        for name, tokens in asked:
            self.until(lambda name=name: name in self.ended, f"{name} ends")
            assert self.answers[name] == tokens, f"{name}: {self.answers[name]} is not {tokens}"

    def begun(self, *asked: tuple[str, list[int]]) -> None:
        for name, _ in asked:
            self.until(lambda name=name: len(self.answers.get(name, ())) > 2, f"{name} begins")

    def kill(self, slot: int) -> None:
        engine = self.engines.pop(slot)
        engine.model_executor.dies = True
        groups.leave(engine, "dp_group")
        groups.leave(engine.model_executor, "group")

    def send(self, slot: int, name: str, params: dict[str, Any]) -> int:
        call = next(self.calls)
        given = {"instruction": name, "params": params, "request_id": "x"}
        self.engines[slot].ft_sentinel.handle_command(0, call, given)
        return call

    def result(self, slot: int, call: int) -> dict[str, Any]:
        self.until(lambda: call in self.engines[slot].results, f"slot {slot} answers {call}")
        found: dict[str, Any] = self.engines[slot].results[call]
        return found

    def utility(self, slot: int, name: str, *args: Any) -> int:
        from vllm.v1.engine import EngineCoreRequestType

        call = next(self.calls)
        self.engines[slot].input_queue.put((EngineCoreRequestType.UTILITY, (0, call, name, args)))
        return call

    def all(self, slots: list[int], name: str, *args: Any) -> list[dict[str, Any]]:
        calls = {slot: self.utility(slot, name, *args) for slot in slots}
        return [self.result(slot, call) for slot, call in calls.items()]

    def prepare(self, live: list[int], joiner: int, timeout_s: float = 10.0) -> RefillOrder:
        """The controller's store, and the survivors' part."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.epoch += 1
        self.refill_store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self.refill_store.port
        order = RefillOrder(self.epoch, tuple(live), (joiner,), live[0], "127.0.0.1", port, timeout_s)
        self.refill_store.set(ORDER_KEY, json.dumps(order._asdict()).encode())
        given = {"epoch": self.epoch, "live": live, "joiners": [joiner], "source": live[0], "timeout_s": timeout_s}
        boot = {"size": self.size, "host": "127.0.0.1", "port": 1, "ports": [2, 3], "store_port": port}
        for answer in self.all(live, "healer_refill_prepare", given | {"bootstrap": boot}):
            assert answer["ok"], answer
        return order

    def join(self, order: RefillOrder) -> Any:
        """A joiner, up to its loop."""
        os.environ[REFILL_VARIABLE] = "1"
        try:
            found = engine_class()(order.joiners[0], self.size, scheduling(), None, order)
        finally:
            del os.environ[REFILL_VARIABLE]
        return found

    def enter(self, order: RefillOrder, engine: Any) -> None:
        slot = order.joiners[0]
        self.engines[slot] = engine
        engine.loop.start()
        threading.Thread(target=self.coordinate, args=(engine,), daemon=True).start()
        keys = [f"eep_ready/{member}" for member in order.members]
        self.until(lambda: self.refill_store.check(keys), "all are ready")

    def vanish(self, order: RefillOrder, engine: Any) -> None:
        """The joiner says that it is ready, and is gone."""
        slot = order.joiners[0]
        self.refill_store.set(f"eep_ready/{slot}", b"1")
        keys = [f"eep_ready/{member}" for member in order.members]
        self.until(lambda: self.refill_store.check(keys), "all are ready")
        for owner, name in ((engine, "dp_group"), (engine.eep_scaling_state, "new_dp_group")):
            groups.leave(owner, name)
        groups.leave(engine.model_executor, "group")

    def commit(self, order: RefillOrder) -> None:
        for name in ("pause", "commit", "resume"):
            for answer in self.all(list(order.live), f"healer_refill_{name}", order.epoch):
                assert answer["ok"], (name, answer)

    def order(
        self,
        told: list[int],
        survivors: list[int] | None = None,
        *,
        epoch: int | None = None,
        timeout_s: float = 5.0,
        requests: Requests = Requests.KEEP,
    ) -> dict[int, ShrinkResult]:
        if epoch is None:
            self.epoch += 1
        params = {
            "epoch": epoch or self.epoch,
            "survivors": survivors or told,
            "store_host": "127.0.0.1",
            "store_port": self.store.port,
            "timeout_s": timeout_s,
            "requests": str(requests),
        }
        calls = {slot: self.send(slot, "healer_shrink", params) for slot in told}
        found = {slot: self.result(slot, call)["reason"] for slot, call in calls.items()}
        return {slot: msgspec.json.decode(text, type=ShrinkResult) for slot, text in found.items()}

    def serves(self, results: dict[int, ShrinkResult]) -> None:
        assert all(result.serves for result in results.values()), results

    def info(self, slot: int) -> EngineInfo:
        found: EngineInfo = self.engines[slot].ft_sentinel.healer.info()
        return found

    def idle(self) -> None:
        self.until(lambda: not any(e.engines_running for e in self.engines.values()), "all idle")
