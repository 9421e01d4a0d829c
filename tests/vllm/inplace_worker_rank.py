"""Ranks of a real tiny Mixture-of-Experts in vLLM's engine on a CPU, driven line by line; run in vLLM's interpreter.

vLLM's imports take most of a start, so one process imports and forks a rank for each line on stdin:

    {"model": …, "slot": 0, "size": 4, "port": …, "variables": {…}, "socket": …, "log": …}     size 1: the reference

A rank connects to the socket and answers JSON lines with JSON lines. Ranks step in lockstep: the caller gives every rank the
same number of steps.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

import torch


def configuration(model: str, slot: int, size: int, port: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    common: dict[str, Any] = {
        "model": model,
        "dtype": os.environ.get("TEST_DTYPE", "float32"),
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 16 << 20,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
        "async_scheduling": False,
    }
    if size > 1:
        common |= {
            "data_parallel_size": size,
            "data_parallel_rank": slot,
            "data_parallel_external_lb": True,
            "enable_expert_parallel": True,
            "enable_eplb": True,
            "enable_elastic_ep": True,
            "eplb_config": {
                "num_redundant_experts": int(os.environ["TEST_REDUNDANT"]),
                "use_async": False,
                "step_interval": int(os.environ.get("TEST_BALANCE_EVERY", 10**6)),
                "window_size": 4,
            },
            "disable_nccl_for_dp_synchronization": True,
        }
    config = EngineArgs(**common).create_engine_config()
    config.parallel_config.distributed_executor_backend = "uni"
    config.parallel_config.data_parallel_master_ip = "127.0.0.1"
    config.parallel_config._coord_store_port = port
    return config


class Rank:
    def __init__(self, model: str, slot: int, size: int, port: int) -> None:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        if size > 1:
            from elastic.vllm.worker import install
            from elastic.vllm.worker.meeting import Meeting, forming
            from elastic.vllm.worker.slots import Slots
            from tests.vllm import inplace_cpu

            inplace_cpu.register()
            install.exchanges["allgather_reducescatter"] = inplace_cpu.Exchange
            install.install()
            if os.environ.get("HEALER_REFILL") != "1":
                forming.always(Meeting("127.0.0.1", port, "start", 300.0), Slots.full(size))
        self.core = EngineCore(configuration(model, slot, size, port), UniProcExecutor, log_stats=False)
        self.worker = self.core.model_executor.driver_worker.worker
        self.logits: list[torch.Tensor] = []
        network = self.worker.model_runner.get_model()
        compute = network.compute_logits

        def keep(*args: Any, **options: Any) -> Any:
            found = compute(*args, **options)
            if found is not None:
                self.logits.append(found.detach().float().clone())
            return found

        network.compute_logits = keep
        self.tokens: dict[str, list[int]] = {}

    def do_add(self, name: str, prompt: list[int], tokens: int) -> dict[str, Any]:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        request = EngineCoreRequest(name, prompt, None, params, None, time.time(), None, None, None)
        self.core.add_request(*self.core.preprocess_add_request(request))
        self.tokens[name] = []
        return {}

    def do_steps(self, count: int) -> dict[str, Any]:
        self.logits.clear()
        try:
            for _ in range(count):
                if self.core.scheduler.has_requests():
                    for outputs in self.core.step()[0].values():
                        for each in outputs.outputs:
                            self.tokens[each.request_id] += each.new_token_ids
                else:
                    self.core.model_executor.collective_rpc("execute_dummy_batch")
        except Exception as error:
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"[:400]}
        return {"tokens": self.tokens, "logits": [each.tolist() for each in self.logits]}

    def do_preempt(self) -> dict[str, Any]:
        """As the engine's part does for requests that are computed again."""
        from elastic.vllm.held import _nothing_in_flight

        scheduler = self.core.scheduler
        for request in reversed(list(scheduler.running)):
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
            request.num_computed_tokens = 0
        _nothing_in_flight(scheduler)
        return {}

    def do_rpc(self, method: str, args: list[Any]) -> dict[str, Any]:
        from tests.vllm.inplace_cpu import Exchange

        if method == "healer_shrink":
            Exchange.epoch = args[0]
        began = time.monotonic()
        return {
            "found": self.core.model_executor.collective_rpc(method, args=tuple(args)),
            "s": time.monotonic() - began,
        }

    def do_set(self, key: str, value: Any) -> dict[str, Any]:
        """In the controller's store."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore("127.0.0.1", int(os.environ["TEST_STORE"]), is_master=False, wait_for_workers=False)
        store.set(key, json.dumps(value))
        return {}

    def do_die_while_moving(self) -> dict[str, Any]:
        """In the next rearrangement, after one layer."""
        from tests.vllm.inplace_cpu import Mover

        Mover.layers_left = 2
        return {}

    def do_state(self) -> dict[str, Any]:
        state = next(iter(self.worker.model_runner.eplb_state.model_states.values()))
        layers = [layer.eplb_state for layer in state.model.moe_layers]
        return {
            "map": state.physical_to_logical_map.tolist(),
            "counts": state.logical_replica_count.tolist(),
            "addresses": [t.data_ptr() for t in (state.physical_to_logical_map_buffer, state.logical_to_physical_map)]
            + [t.data_ptr() for layer in layers for t in (layer.logical_to_physical_map, layer.logical_replica_count)]
            + [weight.data_ptr() for layer in state.model.expert_weights for weight in layer],
        }


def serve(order: dict[str, Any]) -> None:
    """A rank, from the fork to its end."""
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["variables"], TEST_STORE=str(order["port"]))
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(order["socket"])
    lines = channel.makefile("rwb")

    def say(found: dict[str, Any]) -> None:
        lines.write(json.dumps(found).encode() + b"\n")
        lines.flush()

    torch.set_num_threads(1)
    try:
        rank = Rank(order["model"], order["slot"], order["size"], order["port"])
        say({"pid": os.getpid(), "modules": [name for name in sys.modules if name.startswith("vllm.")]})
    except BaseException as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"[:400]})
        return
    for line in lines:
        given = json.loads(line)
        try:
            say(getattr(rank, f"do_{given.pop('do')}")(**given))
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"[:400]})


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        for name in order.pop("modules", ()):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        if os.fork() == 0:
            try:
                serve(order)
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
