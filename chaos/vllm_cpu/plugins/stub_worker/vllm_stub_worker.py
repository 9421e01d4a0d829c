"""A vLLM worker without a model, for tests: API server, engine core, scheduler, DP coordinator, fault-tolerance sentinel and
the state machine of elastic EP are vLLM's own, only the GPU's work is replaced.

    VLLM_PLUGINS=vllm_stub_worker VLLM_STUB_ALLOW_EPLB=1 vllm serve MODEL --worker-cls vllm_stub_worker.StubWorker ...

The token at position p of a sequence is 2 + (crc32(its first 4 ids) + p) % 90: the same on every rank, and for a request that
is continued on another one from what it has already got.

Faults are files in $VLLM_STUB_FAULT_DIR. They are taken once, except `hang_`, which holds as long as the file is there:
    raise_step_rank<R>               a step fails on one rank
    raise_step_together              a step fails on all ranks at once, as after a fault of the exchange; once each time it is touched
    raise_eep_<method>_rank<R>       a part of a scaling fails; hang_eep_<method>_rank<R> waits in it. Methods:
                                     prepare_reconfiguration, prepare_new_worker, warmup_new_worker, commit_scale_up,
                                     commit_scale_down
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import os
import socket
import stat
import threading
import time
import zlib
from pathlib import Path
from typing import Any

FIRST_IDS = 4


def fault(kind: str, rank: int) -> None:
    folder = os.environ.get("VLLM_STUB_FAULT_DIR")
    if not folder:
        return
    once = Path(folder, f"raise_{kind}_rank{rank}")
    if once.exists():
        once.unlink()
        raise RuntimeError(f"injected {kind} on rank {rank}")
    while Path(folder, f"hang_{kind}_rank{rank}").exists():
        time.sleep(0.02)


def since(armed: Path, path: Path) -> bool:
    """Whether it was touched since the fault was armed."""
    try:
        return path.stat().st_mtime_ns >= armed.stat().st_mtime_ns
    except FileNotFoundError:
        return False


def fault_together(rank: int, size: int) -> None:
    """A fault of the exchange is met by all within one step, and once: a retry may be sooner than whoever armed it. Ranks that
    do not come soon stand in vLLM's own collective, where a step of this rank is waited for: then it is tried in the next one."""
    folder = os.environ.get("VLLM_STUB_FAULT_DIR")
    if not folder or not Path(folder, "raise_step_together").exists():
        return
    armed, met = Path(folder, "raise_step_together"), Path(folder, f"met_{rank}")
    if since(armed, met):
        return
    mine, until = Path(folder, f"arrived_{rank}"), time.monotonic() + 0.5
    mine.touch()
    while time.monotonic() < until:
        if all(since(armed, Path(folder, f"arrived_{other}")) for other in range(size)):
            met.touch()
            time.sleep(0.1)  # for the others to see it too
            raise RuntimeError(f"injected into all ranks, rank {rank}")
        time.sleep(0.005)
    mine.unlink(missing_ok=True)


def token(first: list[int], position: int) -> int:
    return 2 + (zlib.crc32(bytes(str(first[:FIRST_IDS]), "ascii")) + position) % 90


def make() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

    class StubWorker(WorkerBase):  # type: ignore[misc]  # vLLM is not installed where this is checked
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.requests: dict[str, tuple[list[int], int]] = {}  # first ids, length of the prompt
            self.computed: dict[str, int] = {}
            self.step_s = float(os.environ.get("VLLM_STUB_STEP_MS", "5")) / 1e3
            self.scale_s = float(os.environ.get("VLLM_STUB_EEP_S", "0.2"))
            self.model_runner = None
            self.background: tuple[threading.Event, list[BaseException]] | None = None

        @property
        def dp_rank(self) -> int:
            return int(self.vllm_config.parallel_config.data_parallel_rank)

        def meet_faults(self) -> None:
            fault("step", self.dp_rank)
            fault_together(self.dp_rank, self.vllm_config.parallel_config.data_parallel_size)

        def init_device(self) -> None:
            self.device = torch.device("cpu")

        def load_model(self, *, load_dummy_weights: bool = False) -> None:
            pass

        def get_model(self) -> Any:
            return torch.nn.Module()

        def get_supported_tasks(self) -> tuple[str, ...]:
            return ("generate",)

        def get_supported_kv_cache_layouts(self) -> list[str]:
            return ["LBHNC", "LBNHC", "NHD", "HND"]

        def get_kv_cache_spec(self) -> dict[str, Any]:
            size = self.vllm_config.cache_config.block_size or 16
            spec = FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
            return {f"model.layers.{layer}.self_attn.attn": spec for layer in range(2)}

        def determine_available_memory(self) -> int:
            return 64 << 20

        def initialize_from_config(self, kv_cache_config: Any) -> None:
            pass

        def initialize_cache(self, *args: Any, **options: Any) -> None:
            pass

        def compile_or_warm_up_model(self) -> Any:
            return CompilationTimes(0.0, 0.0)

        def update_max_model_len(self, size: int) -> None:
            pass

        def get_kv_connector_handshake_metadata(self) -> None:
            return None

        def execute_dummy_batch(self) -> None:
            self.meet_faults()
            time.sleep(self.step_s)

        def execute_model(self, scheduled: Any) -> Any:
            self.meet_faults()
            if scheduled.total_num_scheduled_tokens:
                time.sleep(self.step_s)
            for request in scheduled.finished_req_ids:
                self.requests.pop(request, None)
            for new in scheduled.scheduled_new_reqs:
                ids = list(new.prompt_token_ids or [])
                self.requests[new.req_id] = ids[:FIRST_IDS], len(ids)
                self.computed[new.req_id] = new.num_computed_tokens
            cached = scheduled.scheduled_cached_reqs
            self.computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            names, tokens = [], []
            for name, count in scheduled.num_scheduled_tokens.items():
                first, prompt = self.requests[name]
                end = self.computed[name] + count
                names.append(name)
                tokens.append([token(first, end)] if end >= prompt else [])
            places = {name: place for place, name in enumerate(names)}
            return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)

        def sample_tokens(self, grammar_output: Any) -> Any:
            raise AssertionError("execute_model has already returned the output")

        def take_draft_token_ids(self) -> None:
            return None

        def check_health(self) -> None:
            pass

        def handle_ft_command(self, request: Any) -> None:
            self.requests.clear()

        def shutdown(self) -> None:
            pass

        def elastic_ep_execute(self, method: str, *args: Any, **options: Any) -> Any:
            """The entry point and the asynchronous contract of vLLM's own ElasticEPScalingExecutor."""
            if method == "start_async":
                return self.start_async(args[0], args[1:])
            if method == "clear_async":
                assert self.background is not None
                errors, self.background = self.background[1], None
                if errors:
                    raise errors[0]
                return None
            return self.scale(method)

        def start_async(self, method: str, args: tuple[Any, ...]) -> str:
            request, key = args[0], f"eep_async/{method}/{self.dp_rank}/{self.rank}"
            done, errors = threading.Event(), list[BaseException]()
            self.background = done, errors

            def run() -> None:
                from vllm.distributed.utils import get_cached_tcp_store_client

                try:
                    self.scale(method)
                except BaseException as error:
                    errors.append(error)
                done.set()
                store = get_cached_tcp_store_client(request.new_data_parallel_master_ip, request.coord_store_port)
                store.set(key, b"1")

            threading.Thread(target=run, daemon=True).start()
            return key

        def scale(self, method: str) -> None:
            fault(f"eep_{method}", self.dp_rank)
            time.sleep(self.scale_s)

    return StubWorker


_made: list[Any] = []


def __getattr__(name: str) -> Any:
    """The class is made when vLLM asks for it: importing this module must not import vLLM."""
    if name != "StubWorker":
        raise AttributeError(name)
    if not _made:
        _made.append(make())
    return _made[0]


def fork() -> None:
    """Let children begin with what their parent has imported, as on GPUs where the user asks for it: vLLM has them import all anew on a
    CPU, which takes 8 s of a core for each, and these workers use none of the libraries that do not bear a fork."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def and_fork(_: type, config: Any) -> None:
        update(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(and_fork)
    os.register_at_fork(after_in_child=let_go_of_listeners)


def let_go_of_listeners() -> None:
    """In a forked child. vLLM's API server starts its engine while it listens for the engine's handshake; an engine that keeps
    that socket too makes every later scaling fail, for which rank 0 listens on the same port again (address in use)."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                listens = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                )
            if listens:
                os.close(int(name))
        except OSError:
            continue


def register() -> None:
    """Let vLLM accept EPLB, which elastic EP needs, on a CPU; and Ray's fake GPUs."""
    if os.environ.get("VLLM_STUB_FORK"):
        fork()
    if os.environ.get("VLLM_STUB_RAY"):
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.ray_device_key = "GPU"
    if not os.environ.get("VLLM_STUB_ALLOW_EPLB"):
        return
    import vllm.config.parallel as parallel

    class Platform:
        def __init__(self, real: Any) -> None:
            self.real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def is_cuda_alike(self) -> bool:
            return True

    if not isinstance(parallel.current_platform, Platform):
        parallel.current_platform = Platform(parallel.current_platform)
