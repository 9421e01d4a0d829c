"""The stub worker with a group of its own: one gloo all-reduce among the workers in every step, as GPU workers have, and the
worker's part of healing in place for that group (elastic/vllm/worker/interface.py).

    VLLM_PLUGINS=vllm_stub_worker,healer_in_place vllm serve MODEL --worker-cls vllm_in_place_worker.InPlaceStubWorker ...

Faults of its own, files in $VLLM_STUB_FAULT_DIR as those of the stub worker:
    raise_healer_shrink_rank<R>    a shrink fails in the worker: it votes no
    hang_healer_shrink_rank<R>     it stands there as long as the file is there
    raise_healer_prepare_rank<R>, hang_healer_join_<phase>_rank<R>    the same in a refill
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import threading
import time
from datetime import timedelta
from typing import Any

START_S = 300.0


def make() -> Any:
    import torch
    from vllm.distributed.utils import cpu_all_reduce_, get_cached_tcp_store_client
    from vllm_stub_worker import StubWorker, fault

    from elastic.vllm import groups
    from elastic.vllm.worker.interface import order_of, read_order

    class InPlaceStubWorker(StubWorker):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.group: Any = None
            self.prepared: Any = None
            self.standby: Any = None
            self.request: Any = None
            self.failed: list[Exception] = []
            self.stop = threading.Event()

        def meet(self, store: Any, prefix: str, members: tuple[int, ...], timeout_s: float) -> Any:
            deadline = time.monotonic() + timeout_s
            groups.gather(store, prefix, self.dp_rank, members, deadline, self.stop.is_set)
            return groups.form(store, prefix, self.dp_rank, members, deadline)

        def init_device(self) -> None:
            super().init_device()
            config = self.vllm_config.parallel_config
            order = read_order(config)
            if order is not None:
                store = groups.connect(order.store_host, order.store_port)
                self.group = self.meet(store, f"refill/{order.epoch}/worker", order.members, order.timeout_s)
                return
            store = get_cached_tcp_store_client(config.data_parallel_master_ip, config._coord_store_port)
            self.group = self.meet(store, "start/worker", tuple(range(config.data_parallel_size)), START_S)

        def step_together(self) -> None:
            try:
                cpu_all_reduce_(torch.ones(1, dtype=torch.int32), self.group, timedelta(minutes=30))
            except Exception as error:
                groups.forget(error)
                groups.leave(self, "group")  # peers that wait for this one must fail too
                raise

        def execute_dummy_batch(self) -> None:
            self.step_together()
            super().execute_dummy_batch()

        def execute_model(self, scheduled: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                self.step_together()
            return super().execute_model(scheduled)

        def elastic_ep_execute(self, method: str, *args: Any, **options: Any) -> Any:
            if method == "start_async":
                self.request = args[1]
            return super().elastic_ep_execute(method, *args, **options)

        def scale(self, method: str) -> None:
            """vLLM's own scaling: those who stay meet the newcomers, who start in the same store, and change over at the commit."""
            super().scale(method)
            if method == "prepare_reconfiguration":
                asked = self.request
                store = get_cached_tcp_store_client(asked.new_data_parallel_master_ip, asked.coord_store_port)
                members = tuple(range(asked.new_data_parallel_size))
                self.standby = self.meet(store, "start/worker", members, START_S)
            elif method in ("commit_scale_up", "commit_scale_down") and self.request is not None:
                groups.leave(self, "group")
                self.group, self.standby, self.request = self.standby, None, None

        def healer_probe(self) -> tuple[str, str]:
            return "ready", ""

        def healer_leave(self, epoch: int) -> None:
            groups.leave(self, "group")

        def healer_shrink(
            self, epoch: int, survivors: list[int], store_host: str, store_port: int, timeout_s: float
        ) -> tuple[bool, str]:
            fault("healer_shrink", self.dp_rank)
            self.healer_refill_abort()
            store = groups.connect(store_host, store_port)
            self.group = self.meet(store, f"shrink/{epoch}/worker", tuple(survivors), timeout_s)
            return True, f"group of {len(survivors)}"

        def healer_refill_prepare(self, given: dict[str, Any], request: Any) -> str:
            order, self.failed, self.prepared, self.stop = order_of(given), [], None, threading.Event()
            key = f"prepared/{order.epoch}/{self.dp_rank}/{self.rank}"

            def run() -> None:
                store = groups.connect(order.store_host, order.store_port)
                try:
                    fault("healer_prepare", self.dp_rank)
                    prefix = f"refill/{order.epoch}/worker"
                    self.prepared = self.meet(store, prefix, order.members, order.timeout_s)
                except Exception as error:
                    self.failed.append(error)
                store.set(key, b"1")

            threading.Thread(target=run, daemon=True).start()
            return key

        def healer_refill_prepared(self) -> None:
            if self.failed:
                raise self.failed[0]

        def healer_refill_commit(self) -> None:
            groups.leave(self, "group")
            self.group, self.prepared = self.prepared, None

        def healer_refill_abort(self) -> None:
            self.stop.set()
            self.stop = threading.Event()
            if self.prepared is not None:
                groups.leave(self, "prepared")
            self.prepared = None

        def healer_join(self, order: dict[str, Any], phase: str) -> None:
            fault(f"healer_join_{phase}", self.dp_rank)
            time.sleep(self.scale_s)

    return InPlaceStubWorker


_made: list[Any] = []


def __getattr__(name: str) -> Any:
    """The class is made when vLLM asks for it: importing this module must not import vLLM."""
    if name != "InPlaceStubWorker":
        raise AttributeError(name)
    if not _made:
        _made.append(make())
    return _made[0]
