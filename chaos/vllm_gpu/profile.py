"""What differs between the places where the scenario runs: how vLLM is started, how long things take, and how a fault that
passes is made."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.vllm_cpu.model import EXPERTS as SMALL_EXPERTS
from chaos.vllm_gpu.model import CONFIG
from elastic.errors import ElasticError

MOST_RANKS = 3
SEQUENCES = 16
"""At once, of a rank."""
STUB = Path(__file__).parents[1] / "vllm_cpu/plugins/stub_worker"
LAUNCHER = """\
#!{python}
if __name__ == "__main__":
    import sys

    from vllm.entrypoints.cli.main import main

    sys.exit(main())
"""
RUNTIME = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


@dataclass(frozen=True)
class Profile:
    """Of one kind of machine."""

    name: str
    executable: Path
    model: Path
    python: Path
    """That runs vLLM; it writes the model too, where that has weights."""
    writes_model: bool
    args: tuple[str, ...]
    env: dict[str, str]
    base_port: int
    experts: int
    heartbeat_s: float
    start_s: float
    """For the start of a group, or a restart."""
    stop_s: float
    """The longest that the transient fault may stop a rank's engine."""
    settle_s: float
    stock_s: float
    """How long the group without healer is watched."""
    vocabulary: int
    tokens: int
    """Of an answer."""
    streams: int
    gpus: int = 0
    """That the slots share in turn; 0: ranks need none."""
    faults: Path | None = None
    """Folder of the stub worker's faults; None: faults are real."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """What a reader needs to judge the figures."""

    def shared(self, slots: int) -> list[int]:
        """The GPU of each of so many slots."""
        return [slot % self.gpus for slot in range(slots)] if self.gpus else []

    def policy(self, run_dir: Path) -> dict[str, Any]:
        """Sections of `spec`, but for the API's."""
        silent_s = 3 * self.stop_s
        return {
            "target": {
                "kind": "vllm",
                "runDir": str(run_dir),
                "ranks": 2,
                "maxRanks": MOST_RANKS,
                "gpus": self.shared(MOST_RANKS),
                "executable": str(self.executable),
                "model": str(self.model),
                "experts": self.experts,
                "args": list(self.args),
                "env": self.env,
                "basePort": self.base_port,
                "gateway": {"port": 0},
                "canary": {"interval": "10s", "deadline": "30s"},
                "deadlines": {
                    "start": f"{self.start_s:g}s",
                    "scale": f"{self.start_s:g}s",
                    "commit": "60s",
                    "gate": "30s",
                    "retry": "60s",
                    "settle": f"{self.settle_s:g}s",
                    "stall": f"{silent_s:g}s",
                    "drain": "5s",
                    "end": "5s",
                },
            },
            # the fault that passes stops a rank for longer than NIXL EP waits: it must not be given up before
            "detection": {
                "heartbeatInterval": f"{self.heartbeat_s:g}s",
                "stallAfter": f"{1.5 * self.stop_s:g}s",
                "silentAfter": f"{silent_s:g}s",
            },
            # a GPU's fault would concern each rank on it, and the faults here are of single ranks
            "sensors": {"nvml": {"enabled": False}, "kernelLog": {"enabled": False}},
            "healing": {"rules": [{"name": "any-fault", "actions": ["replace", "human"]}]},
            "bounds": {
                "minRanks": 2,
                "breaker": {"maxDestructive": 100, "window": "1m"},
                "faultBudget": {"failures": 100, "window": "1h", "quarantine": "1h"},
            },
        }


def _serve(redundant: int, most: int) -> tuple[str, ...]:
    """Arguments of `vllm serve` that both profiles share; `redundant` leaves every size from 2 ranks on possible."""
    return (
        *("--served-model-name", "m", "--dtype", "bfloat16", "--max-model-len", "2048"),
        *("--max-num-seqs", str(SEQUENCES), "--no-enable-prefix-caching", "--enable-expert-parallel"),
        *("--enable-eplb", "--enable-elastic-ep", "--elastic-ep-max-dp-size", str(most)),
        *("--enable-fault-tolerance", "--fault-tolerance-config", '{"engine_recovery_timeout_sec":120}'),
    )


def h200(
    work: Path,
    *,
    python: Path,
    site: Path | None,
    gpus: int,
    base_port: int = 8100,
    async_eplb: bool = True,
    fork: bool = False,
) -> Profile:
    """Two GPUs of the Hopper generation, NIXL EP. `python`: an interpreter with vLLM 0.33, or with the CUDA libraries for a
    vLLM in the folder `site`. `fork`: the API server's children begin with what it has imported. Writes the launcher into `work`.
    Raises ElasticError."""
    if not python.exists():
        raise ElasticError(f"{python}: no such interpreter; --vllm-python names the one that runs vLLM")
    launcher = work / "bin/vllm"
    launcher.parent.mkdir(parents=True, exist_ok=True)
    launcher.write_text(LAUNCHER.format(python=python))
    launcher.chmod(0o755)
    experts = CONFIG["num_experts"]
    args = (
        *_serve(experts, 4),
        *("--load-format", "auto", "--seed", "0", "--tensor-parallel-size", "1", "--all2all-backend", "nixl_ep"),
        "--eplb-config",
        f'{{"num_redundant_experts":{experts},"window_size":100,"step_interval":300,'
        f'"use_async":{"true" if async_eplb else "false"},"communicator":"nixl"}}',
        *(
            "--max-num-batched-tokens",
            "256",
            "--kv-cache-memory-bytes",
            "2147483648",
            "--gpu-memory-utilization",
            "0.3",
        ),
        # no torch.compile, and graphs of three sizes: the start is what is waited for here
        "--compilation-config",
        '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[4,8,16]}',
    )
    return Profile(
        name="h200",
        executable=launcher,
        model=work / "model",
        python=python,
        writes_model=True,
        args=args,
        env=_gpu_environment(work, python, site) | ({"VLLM_WORKER_MULTIPROC_METHOD": "fork"} if fork else {}),
        base_port=base_port,
        experts=experts,
        heartbeat_s=0.5,
        start_s=300.0,
        stop_s=36.0,
        settle_s=60.0,
        stock_s=40.0,
        vocabulary=CONFIG["vocab_size"],
        tokens=64,
        streams=16,
        gpus=gpus,
        sizes={
            name: CONFIG[name] for name in ("num_hidden_layers", "hidden_size", "num_experts", "num_experts_per_tok")
        },
    )


def _gpu_environment(work: Path, python: Path, site: Path | None) -> dict[str, str]:
    """One host, no InfiniBand, no NVLink multicast; caches that outlive a rank. Ranks that share a GPU need NCCL's leave on all
    ranks."""
    found = RUNTIME | {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "VLLM_CACHE_ROOT": str(work / "cache"),
        "TRITON_CACHE_DIR": str(work / "cache/triton"),
        "OMP_NUM_THREADS": "4",
        "CC": os.environ.get("CC", "gcc"),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    if site is None:
        return found
    # its own torch, NCCL and NIXL before the CUDA libraries of the interpreter
    libraries = [
        site / "torch/lib",
        site / "nvidia/nccl/lib",
        site / ".nixl_cu13.mesonpy.libs",
        site / "nixl_cu13.libs",
    ]
    nvidia = next(python.parent.parent.glob("lib/python3.*/site-packages/nvidia"), site / "nvidia")
    first = ("cu13", "cudnn", "cusparselt", "nvshmem")
    others = sorted(p.parent.name for p in nvidia.glob("*/lib") if p.parent.name not in (*first, "nccl"))
    libraries += [nvidia / name / "lib" for name in (*first, *others)]
    return found | {
        "PYTHONPATH": str(site),
        "LD_LIBRARY_PATH": ":".join([*map(str, libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
        "NIXL_PLUGIN_DIR": str(site / "nixl_cu13.libs/nixl"),
        "VLLM_NCCL_SO_PATH": str(site / "nvidia/nccl/lib/libnccl.so.2"),
        "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK": "1",
        # not among what a trimmed folder holds
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


def cpu(work: Path, environment: Path, *, base_port: int = 8100) -> Profile:
    """vLLM's own servers with stub workers: proves the scenario, says nothing about a GPU. `environment`: what
    chaos/vllm_cpu/make.sh made. Raises ElasticError."""
    if not (environment / "overlay033").is_dir():
        raise ElasticError(
            f"{environment}: no overlay033 in it; make vllm-env makes one, VLLM_CPU or --vllm-cpu names it"
        )
    faults = work / "faults"
    faults.mkdir(exist_ok=True)
    args = (
        *_serve(SMALL_EXPERTS, 4),
        *("--load-format", "dummy", "--enforce-eager", "--kv-cache-memory-bytes", "64M"),
        *("--eplb-config", f'{{"num_redundant_experts":{SMALL_EXPERTS},"use_async":false}}'),
        *("--worker-cls", "vllm_stub_worker.StubWorker"),
    )
    env = RUNTIME | {
        "PYTHONPATH": f"{STUB}:{environment}/overlay033",
        "VLLM_PLUGINS": "vllm_stub_worker",
        "VLLM_STUB_ALLOW_EPLB": "1",
        "VLLM_STUB_FAULT_DIR": str(faults),
    }
    return Profile(
        name="cpu",
        executable=environment / "venv/bin/vllm",
        model=environment / "tiny-moe",
        python=environment / "venv/bin/python",
        writes_model=False,
        args=args,
        env=env,
        base_port=base_port,
        experts=SMALL_EXPERTS,
        heartbeat_s=1.0,
        start_s=420.0,
        stop_s=10.0,
        settle_s=15.0,
        stock_s=15.0,
        vocabulary=90,
        tokens=24,
        streams=4,
        faults=faults,
    )
