"""`spec.target` of kind `vllm`: a stock vLLM 0.33 deployment, one `vllm serve` for each rank or one server with Ray."""

from typing import Annotated, Literal

from pydantic import Field

from healer.policy.schema.base import Count, CountOrZero, Duration, Listed, Model, Name, PathText, Window
from healer.policy.schema.target import Gateway, SlotLabels

Words = Annotated[tuple[str, ...], Listed]


class Canary(Model):
    """A short greedy generation from fixed token ids: what proves that a rank computes, and computes rightly."""

    prompt: Annotated[tuple[CountOrZero, ...], Listed, Field(min_length=1, max_length=64)] = (3, 5, 7, 11, 13, 17)
    """Token ids; any that the model knows."""
    tokens: Annotated[int, Field(ge=1, le=256)] = 8
    """How many are generated."""
    interval_s: Duration = 60.0
    """Between two canaries of a rank that serves nobody. A dead peer of an idle group is found by it, no sooner."""
    deadline_s: Duration = 30.0
    """A canary that takes longer has failed."""
    compare: bool = True
    """Its tokens must be those of the first canary after the start. Off where greedy answers may differ between runs."""


class VllmDeadlines(Model):
    """Of the target's own actions; each that passes is a failure with the next step of its own."""

    start_s: Duration = 900.0
    """From the launch of a group, or of joining ranks, until all answer a canary."""
    scale_s: Duration = 900.0
    """From the request to scale to the end of its commit. vLLM itself waits 300 s for joiners and 600 s for a commit."""
    commit_s: Duration = 300.0
    """Of it, for the commit, behind shut gates. Seconds with nixl_ep; other back ends capture their graphs anew in it."""
    gate_s: Duration = 120.0
    """A rank that answers 503 for this long while nothing scales is wedged."""
    retry_s: Duration = 60.0
    """From the instruction `retry` until every rank answers two canaries; below vLLM's engine_recovery_timeout_sec."""
    settle_s: Duration = 45.0
    """After the first rank reports a fault, for the others to report it too; then the group is restarted. A retry does not wait for
    its end, only for the last report. Above NIXL EP's timeout of 30 s: a rank that waits for one which met the fault reports it when
    that is over. Below vLLM's engine_recovery_timeout_sec."""
    stall_s: Duration = 60.0
    """All ranks stand still for this long, though they have requests: the group is started anew."""
    drain_s: Window = 30.0
    """For the requests of a rank that is to leave."""
    end_s: Duration = 15.0
    """Between SIGTERM and SIGKILL: an API server whose engine is dead ignores the first."""


class VllmHooks(Model):
    """Names of spec.hooks that start and end ranks which healer does not launch itself (`mode: attach`)."""

    start: Name | None = None
    """Starts the rank of HEALER_SLOT; HEALER_CAUSE says why."""
    stop: Name | None = None
    """Ends it, whatever state it is in; success means that it is gone."""
    restart: Name | None = None
    """Ends and starts all ranks of the group; HEALER_SLOT is 0."""


class VllmTarget(Model):
    """A vLLM deployment with elastic expert parallelism. docs/vllm.md says what can be healed and what cannot be seen."""

    kind: Literal["vllm"]
    """A vLLM deployment."""
    run_dir: PathText
    """Logs, journal and state; one daemon at a time."""
    mode: Literal["launch", "attach"] = "launch"
    """`launch`: healer starts and ends the ranks, on this host. `attach`: they are there, at `urls`."""
    load_balancing: Literal["external", "internal"] = "external"
    """`external`: one `vllm serve` for each rank, healer's router before them. `internal`: one server with Ray; then its size
    can be changed and its health be read, and nothing else."""
    ranks: Annotated[int, Field(ge=2, le=1_000_000)]
    """Live ranks at start."""
    max_ranks: Annotated[int, Field(ge=2, le=1_000_000)]
    """Slots. Growing beyond `ranks` needs --elastic-ep-max-dp-size of at least this among the arguments."""
    executable: Annotated[str, Field(min_length=1)] = "vllm"
    """The command `vllm`, as a path or a name in PATH."""
    model: str = ""
    """What `vllm serve` is given: a name or a folder. For mode launch."""
    args: Words = ()
    """Further arguments of `vllm serve`, as they stand; those of size, rank, address and port are healer's own."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the ranks, beside that of the daemon."""
    experts: Count | None = None
    """Logical experts of a layer, for the checks of sizes. Absent: read from the model's config.json where it is a folder."""
    base_port: Annotated[int, Field(ge=1024, le=64000)] = 8100
    """The rank in slot s listens on basePort + s, on loopback: vLLM's control endpoints ask nobody for a key."""
    gpus: Annotated[tuple[CountOrZero, ...], Listed] = ()
    """GPU indices, gpusPerRank for each slot in turn. Empty: ranks see what the daemon sees, as is right without GPUs only. Ranks
    may share a GPU where `env` has NCCL_MULTI_RANK_GPU_ENABLE: "1"."""
    gpus_per_rank: Count = 1
    """Tensor parallel size."""
    urls: Words = ()
    """Base URLs, by slot, of the API servers. For mode attach; with internal load balancing one."""
    api_key_file: PathText | None = None
    """Its content is vLLM's --api-key."""
    hooks: VllmHooks = Field(default_factory=VllmHooks)
    canary: Canary = Field(default_factory=Canary)
    deadlines: VllmDeadlines = Field(default_factory=VllmDeadlines)
    in_place: Literal["auto", "off"] = "auto"
    """`auto`: a lost rank is healed inside the running group, and its slot is filled again, where vLLM's interpreter has healer's
    plugin, the plugin knows this vLLM, and the arguments allow it. `off`: vLLM is left stock. docs/vllm-in-place.md."""
    start_attempts: Annotated[int, Field(ge=1, le=100)] = 2
    """Failed starts of a slot's rank before the group goes on without it."""
    spares: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes on this host that have imported vLLM and wait to become a rank: a refill, a joiner or a restart begins after the
    imports. Each costs the memory of an idle vLLM process, and none on a GPU. One that was used is replaced when the group has served
    undisturbed for 5 s. For mode launch, where vLLM's interpreter has healer's package."""
    log_bytes: Annotated[int, Field(ge=65536, le=1 << 40)] = 64 << 20
    """A rank's log is cut over to a second file at this size; the older half is kept as `.1`."""
    slot_labels: Annotated[tuple[SlotLabels, ...], Listed] = ()
    """Labels of slots, for `match.labels` of a rule."""
    gateway: Gateway = Field(default_factory=Gateway)
    """Where healer's router listens. With internal load balancing there is none: clients go to vLLM itself."""

    def labels_of(self, slot: int) -> dict[str, str]:
        """As of the embedded target."""
        found: dict[str, str] = {}
        for entry in self.slot_labels:
            if any(span.holds(slot) for span in entry.slots):
                found.update(entry.labels)
        return found

    def gpus_of(self, slot: int) -> tuple[int, ...]:
        """GPU indices of one slot; empty where none are named."""
        return self.gpus[slot * self.gpus_per_rank : (slot + 1) * self.gpus_per_rank]

    def visible_of(self, slot: int) -> str:
        """CUDA_VISIBLE_DEVICES of the rank in one slot; empty where it is not this policy that says so."""
        return ",".join(map(str, self.gpus_of(slot))) if self.mode == "launch" else ""
