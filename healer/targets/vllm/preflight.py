"""Preflight: what in a vLLM deployment's configuration will not work, said before anything is touched, each with its fix.

Each rule is a small function over the deployment; its docstring says where the rule comes from (files of vLLM 0.33.0, or what
was seen with it).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

import msgspec

from elastic.errors import ElasticError
from healer.targets.vllm.arguments import Arguments, environment_flag

MAX_REDUNDANT = 1023
NIXL_TIMEOUT_S = 30.0
"""Of NIXL EP's kernels; vLLM 0.33 sets no other."""


class Level(StrEnum):
    ERROR = "error"
    """vLLM refuses to start, or an action that the policy asks for cannot work."""
    WARNING = "warning"
    """It works, and something that an operator would expect does not."""


class Finding(msgspec.Struct, frozen=True):
    rule: str
    level: Level
    what: str
    fix: str


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What the rules look at."""

    arguments: Arguments
    environment: Mapping[str, str]
    ranks: int
    """At start."""
    min_ranks: int
    max_ranks: int
    experts: int | None
    """Logical experts of the model; None: not known here."""
    vllm: str | None
    """Version that is installed; None: not known here."""
    nixl: str | None
    external: bool = True
    """One `vllm serve` for each rank; False: internal load balancing with Ray."""
    settle_s: float
    stall_after_s: float
    """Of the policy: deadlines.settle, detection.stallAfter."""
    no_command: str = ""
    """The command that ranks are launched by, where this machine has none of that name."""
    no_model: str = ""
    """A folder that the policy names as the model and that is not there."""

    @property
    def redundant(self) -> int:
        value = self.arguments.config("eplb-config").get("num_redundant_experts", 0)
        return value if isinstance(value, int) else 0

    @property
    def backend(self) -> str:
        return self.arguments.text("all2all-backend", "allgather_reducescatter")

    @property
    def tensor(self) -> int:
        return self.arguments.number("tensor-parallel-size", 1) or 1

    @property
    def recovery_s(self) -> float | None:
        """After a fault, until an engine that nobody tells to retry ends by itself; None: not a number."""
        value = self.arguments.config("fault-tolerance-config").get("engine_recovery_timeout_sec", 120)
        return float(value) if isinstance(value, int | float) else None

    @property
    def capacity(self) -> int:
        """GPUs that NIXL EP's buffer is made for."""
        return (self.arguments.number("elastic-ep-max-dp-size") or self.ranks) * self.tensor


Rule = Callable[[Deployment], Iterator[Finding]]


def check(deployment: Deployment) -> tuple[Finding, ...]:
    """Errors first. An option that cannot be read is itself a finding."""
    found: list[Finding] = []
    for rule in RULES:
        try:
            found += rule(deployment)
        except ElasticError as error:
            finding = Finding("argument", Level.ERROR, str(error), "correct the argument")
            if finding not in found:
                found.append(finding)
    return tuple(sorted(found, key=lambda f: f.level))


def present(d: Deployment) -> Iterator[Finding]:
    """A warning: a policy may be checked on another machine than the one that it is for."""
    if d.no_command:
        what = f"spec.target.executable {d.no_command}: not found on this machine, where healer would launch the ranks"
        yield Finding("executable", Level.WARNING, what, "give the path of vLLM's command, such as /opt/vllm/bin/vllm")
    if d.no_model:
        what = f"spec.target.model {d.no_model}: no such folder on this machine"
        yield Finding(
            "model", Level.WARNING, what, "give the folder of the checkpoint, or a name on the Hugging Face Hub"
        )


def elastic_on(d: Deployment) -> Iterator[Finding]:
    """config/parallel.py: growing and shrinking need elastic EP, which needs expert parallelism and EPLB."""
    for name in ("enable-elastic-ep", "enable-expert-parallel", "enable-eplb"):
        if not d.arguments.flag(name):
            what = f"--{name} is not set, so the group can neither grow nor shrink"
            yield Finding("elastic-off", Level.ERROR, what, f"add --{name}")
    if (d.arguments.number("pipeline-parallel-size", 1) or 1) > 1:
        what = "elastic EP does not work with pipeline parallelism"
        yield Finding("pipeline", Level.ERROR, what, "set --pipeline-parallel-size 1")


def fault_tolerance_on(d: Deployment) -> Iterator[Finding]:
    """config/fault_tolerance.py. `--fault-tolerance-config` alone, as text, was seen to be ignored without a word."""
    if d.arguments.flag("enable-fault-tolerance"):
        if d.backend not in ("nixl_ep", "deepep_low_latency"):
            what = f"fault tolerance does not work with the all2all backend {d.backend}"
            yield Finding("fault-tolerance-backend", Level.ERROR, what, "set --all2all-backend nixl_ep")
        return
    also = " (--fault-tolerance-config alone is ignored)" if d.arguments.config("fault-tolerance-config") else ""
    what = f"--enable-fault-tolerance is not set{also}: a transient fault ends every engine, and all is started anew"
    yield Finding("fault-tolerance-off", Level.WARNING, what, "add --enable-fault-tolerance")


def load_balancing(d: Deployment) -> Iterator[Finding]:
    """entrypoints/cli/serve.py: fault tolerance needs an external load balancer; the supervisor of the multi-port variant ends
    all its children when one dies."""
    if d.arguments.flag("data-parallel-multi-port-external-lb"):
        what = "--data-parallel-multi-port-external-lb ends every rank when one dies"
        yield Finding("multi-port", Level.ERROR, what, "remove it; healer starts one `vllm serve` for each rank")
    if d.arguments.flag("data-parallel-hybrid-lb"):
        what = "elastic EP does not work with hybrid load balancing"
        yield Finding("hybrid", Level.ERROR, what, "remove --data-parallel-hybrid-lb")
    servers = d.arguments.number("api-server-count", 1) or 1
    if servers > 1:
        what = f"--api-server-count {servers}: fault tolerance refuses it, elastic EP makes it 1"
        yield Finding("api-servers", Level.ERROR, what, "set --api-server-count 1")
    if not d.external:
        if d.arguments.text("data-parallel-backend", "mp") != "ray":
            what = "scaling with internal load balancing needs Ray; the wrong back end shows only when it is asked to scale"
            yield Finding("ray", Level.ERROR, what, "set --data-parallel-backend ray")
        what = "with internal load balancing the prepare phase is not visible, and a dead engine ends the whole server"
        yield Finding("internal", Level.WARNING, what, "use external load balancing: one `vllm serve` for each rank")


def growth(d: Deployment) -> Iterator[Finding]:
    """config/parallel.py: the largest size is the first one unless --elastic-ep-max-dp-size says more."""
    largest = d.arguments.number("elastic-ep-max-dp-size") or d.ranks
    if d.max_ranks > largest:
        what = f"the policy allows {d.max_ranks} ranks, vLLM at most {largest}"
        yield Finding("max-size", Level.ERROR, what, f"add --elastic-ep-max-dp-size {d.max_ranks}")


def capacity(d: Deployment) -> Iterator[Finding]:
    """NIXL EP asserts that the capacity of its buffer is below 8 or a multiple of 8 (up to 1.5.1)."""
    if d.backend == "nixl_ep" and d.capacity >= 8 and d.capacity % 8:
        best = -(-d.capacity // 8) * 8 // d.tensor
        what = f"NIXL EP's capacity of {d.capacity} GPUs is neither below 8 nor a multiple of 8"
        yield Finding("capacity", Level.ERROR, what, f"set --elastic-ep-max-dp-size {best}")


def graphs(d: Deployment) -> Iterator[Finding]:
    """layers/fused_moe: only nixl_ep keeps kernels and CUDA graphs over a change of size."""
    if d.backend != "nixl_ep":
        what = f"with the all2all backend {d.backend} every rank drops and recaptures its CUDA graphs at each change of size"
        yield Finding("no-graph-reuse", Level.WARNING, what, "set --all2all-backend nixl_ep")


def redundancy(d: Deployment) -> Iterator[Finding]:
    """A size of n ranks holds (E + R) x n / ranks experts: below E it is refused (distributed/elastic_ep)."""
    if d.redundant > MAX_REDUNDANT:
        what = f"num_redundant_experts {d.redundant} is above {MAX_REDUNDANT}"
        yield Finding("redundancy-limit", Level.ERROR, what, f"set it to at most {MAX_REDUNDANT}")
    if d.experts is None:
        return
    total, size = d.experts + d.redundant, d.ranks * d.tensor
    if total % size:
        what = f"{d.experts} experts and {d.redundant} redundant ones do not divide by {size} GPUs"
        fix = f"set num_redundant_experts {d.redundant + size - total % size}"
        yield Finding("divisibility", Level.ERROR, what, fix)
    kept = total * d.min_ranks // d.ranks
    if kept < d.experts:
        needed = -(-d.experts * d.ranks // d.min_ranks) - d.experts
        needed += -(d.experts + needed) % size
        what = f"{d.min_ranks} ranks hold {kept} experts, fewer than the model's {d.experts}: vLLM refuses that size"
        fix = f"set num_redundant_experts {needed}, or spec.bounds.minRanks {-(-d.experts * d.ranks // total)}"
        yield Finding("redundancy", Level.ERROR, what, fix)


def smallest(d: Deployment) -> Iterator[Finding]:
    """v1/engine/core_client.py asserts more than one engine; one rank has no all2all manager."""
    if d.min_ranks * d.tensor < 2 or d.min_ranks < 2:
        what = f"spec.bounds.minRanks {d.min_ranks}: vLLM cannot scale to a single rank"
        yield Finding("single-rank", Level.ERROR, what, "set spec.bounds.minRanks 2")


def timeouts(d: Deployment) -> Iterator[Finding]:
    """The CPU timeout bounds both the detection of a hang and the wait of a joiner for its commit: distributed/utils.py,
    elastic_ep/elastic_state.py. A few seconds end a scale-up with dead engines."""
    seconds = d.arguments.number("cpu-distributed-timeout-seconds")
    if seconds is not None and seconds < 300 and d.arguments.flag("enable-elastic-ep"):
        what = f"--cpu-distributed-timeout-seconds {seconds} also bounds how long a joiner waits: a scale-up would end in it"
        fix = "set it to 600 or more, or remove it; healer finds hangs by itself"
        yield Finding("cpu-timeout", Level.ERROR, what, fix)
    recovery = d.recovery_s
    if recovery is not None and recovery < 60:
        what = f"engine_recovery_timeout_sec {recovery:g} leaves too little time to decide and retry"
        yield Finding("recovery-timeout", Level.WARNING, what, "set it to 120 or more")


def retry_in_time(d: Deployment) -> Iterator[Finding]:
    """Two engines on H200 reported one fault 30 s apart: the second one waited in the exchange until NIXL EP's own timeout. A retry
    needs both reports, before a restart is decided, the rank is given up, or the first engine ends by itself
    (config/fault_tolerance.py)."""
    if not d.arguments.flag("enable-fault-tolerance"):
        return
    best = 1.5 * NIXL_TIMEOUT_S
    if d.backend == "nixl_ep" and d.settle_s <= NIXL_TIMEOUT_S:
        what = f"deadlines.settle {d.settle_s:g} s: engines report one fault up to {NIXL_TIMEOUT_S:g} s apart, so it is never retried"
        yield Finding("settle", Level.ERROR, what, f"set spec.target.deadlines.settle {best:g}s")
    if d.backend == "nixl_ep" and d.stall_after_s <= NIXL_TIMEOUT_S:
        what = (
            f"detection.stallAfter {d.stall_after_s:g} s: a rank is given up before NIXL EP's timeout of {NIXL_TIMEOUT_S:g} s "
            "lets an engine report a fault, so it is never retried"
        )
        fix = f"set spec.detection.stallAfter above deadlines.settle ({max(best, d.settle_s):g}s), or leave out --enable-fault-tolerance"
        yield Finding("stall-after", Level.ERROR, what, fix)
    if d.recovery_s is not None and d.settle_s >= d.recovery_s:
        what = f"deadlines.settle {d.settle_s:g} s: an engine that met a fault ends after engine_recovery_timeout_sec {d.recovery_s:g}"
        yield Finding("settle", Level.ERROR, what, f"set engine_recovery_timeout_sec {d.settle_s + 60:g} or more")


def runner(d: Deployment) -> Iterator[Finding]:
    """Model runner V1 with async scheduling off returns before the mask is checked: wrong tokens are served silently."""
    first = d.environment.get("VLLM_USE_V2_MODEL_RUNNER", "1").strip().lower() in ("0", "false")
    if first and not d.arguments.flag("async-scheduling", True):
        what = "model runner V1 without async scheduling serves the wrong tokens of a masked step"
        yield Finding("model-runner", Level.ERROR, what, "remove VLLM_USE_V2_MODEL_RUNNER=0 or --no-async-scheduling")


def forked(d: Deployment) -> Iterator[Finding]:
    """v1/engine/utils.py: an API server starts its engine while it listens for the handshake, and a forked engine keeps the
    socket; distributed/elastic_ep/external_elastic_ep.py listens there again when the group grows. Seen on vLLM 0.33. Spares fork
    without this variable in the policy, and their children let go of the socket (elastic/vllm/spare.py)."""
    if (
        d.arguments.flag("enable-elastic-ep")
        and d.environment.get("VLLM_WORKER_MULTIPROC_METHOD", "").strip() == "fork"
    ):
        what = "forked engines keep the handshake port, so a scale-up fails (address in use) and becomes a restart"
        yield Finding("fork", Level.WARNING, what, "remove VLLM_WORKER_MULTIPROC_METHOD=fork")


def drafter(d: Deployment) -> Iterator[Finding]:
    """v1/worker/gpu/eplb_utils.py: a drafter with experts of its own is refused; a dense one is not."""
    method = str(d.arguments.config("speculative-config").get("method", ""))
    if "mtp" in method.lower():
        what = f"elastic EP does not work with a draft model that has experts (speculative method {method})"
        yield Finding("drafter", Level.ERROR, what, "remove --speculative-config or use a dense drafter")


def prefix_cache(d: Deployment) -> Iterator[Finding]:
    """A fault leaves hashes of blocks that were never written; only the developer mode has a reset for them."""
    if not d.arguments.flag("enable-fault-tolerance") or not d.arguments.flag("enable-prefix-caching", True):
        return
    if not environment_flag(d.environment, "VLLM_SERVER_DEV_MODE"):
        what = "after a fault the prefix cache may hold wrong blocks, and cannot be reset: healer restarts instead of a retry"
        fix = "add --no-enable-prefix-caching, or set VLLM_SERVER_DEV_MODE=1 on a network that only healer reaches"
        yield Finding("prefix-cache", Level.WARNING, what, fix)


def communicator(d: Deployment) -> Iterator[Finding]:
    """distributed/eplb: what an elastic group can move experts with."""
    config = d.arguments.config("eplb-config")
    chosen, asynchronous = str(config.get("communicator", "") or "auto"), config.get("use_async", True) is not False
    if chosen == "torch_gloo" or (asynchronous and chosen in ("torch_nccl", "pynccl")):
        what = f"eplb-config communicator {chosen} does not work with {'async EPLB' if asynchronous else 'elastic EP'}"
        yield Finding("communicator", Level.ERROR, what, "leave it out, or set it to nixl")


def versions(d: Deployment) -> Iterator[Finding]:
    """NIXL before 1.4.1 sizes the dispatch output by the highest active rank, vLLM 0.33 expects the capacity."""
    if d.vllm is not None and not re.match(r"0\.33(\.|$|\+|rc)", d.vllm):
        what = f"vLLM {d.vllm} is not 0.33: its endpoints may differ from what healer knows"
        yield Finding("vllm-version", Level.WARNING, what, "use vllm 0.33.*, or try on a deployment that may fail")
    if d.backend != "nixl_ep" and d.nixl is None:
        return
    if d.nixl is not None and _version(d.nixl) < (1, 4, 1):
        what = f"NIXL {d.nixl} combines wrongly after the highest rank has left"
        yield Finding("nixl-version", Level.ERROR, what, "install nixl 1.4.1 or newer")


def open_endpoints(d: Deployment) -> Iterator[Finding]:
    """Scale, fault tolerance and developer endpoints ask for no key, whatever --api-key says (entrypoints/serve)."""
    host = d.arguments.text("host")
    if host not in ("127.0.0.1", "localhost", "::1"):
        what = "vLLM's control endpoints ask nobody for a key: whoever reaches the ports can scale or stop the group"
        yield Finding(
            "open-control", Level.WARNING, what, "add --host 127.0.0.1 and let healer's router face the clients"
        )


RULES: tuple[Rule, ...] = (
    present,
    elastic_on,
    fault_tolerance_on,
    load_balancing,
    growth,
    capacity,
    graphs,
    redundancy,
    smallest,
    timeouts,
    retry_in_time,
    runner,
    forked,
    drafter,
    prefix_cache,
    communicator,
    versions,
    open_endpoints,
)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
