"""`spec.target` and `spec.api`: the group that is kept healthy, and where the daemon listens."""

from typing import Annotated, Literal

from pydantic import Field

from healer.policy.schema.base import Count, CountOrZero, Duration, Listed, Model, Numbers, PathText, Port

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class Gateway(Model):
    """Where clients send their requests."""

    host: str = "127.0.0.1"
    """Address to listen on. The API does not ask clients who they are: off loopback, put something before it that does."""
    port: Port = 8000
    """0: any free port, published in `gateway.json` of the run directory."""
    max_queued: Count = 256
    """Requests that may wait for a rank; the next one is refused with 429."""
    model_name: str = ""
    """What clients call the model; empty: the name of the checkpoint folder."""


class SlotLabels(Model):
    """Labels of some slots, for rules to match."""

    slots: Annotated[tuple[Numbers, ...], Listed, Field(min_length=1)]
    """Slot numbers and ranges, such as `[0, 4-7]`."""
    labels: dict[str, str]
    """Any names and values, such as `{rack: a}`. A later entry wins over an earlier one."""


class Target(Model):
    """What is kept healthy: a group of the embedded executor. Sized once: a change needs a new group."""

    kind: Literal["embedded"]
    """The embedded executor."""
    checkpoint: PathText
    """A Hugging Face folder with config.json, `*.safetensors` and tokenizer.json."""
    run_dir: PathText
    """Sockets, logs, journal and state of the group; one daemon at a time."""
    ranks: Count
    """Live ranks at start."""
    max_ranks: Count
    """Slots; the capacity of every buffer. Memory is taken for all of them."""
    slots_per_rank: Count
    """Expert slots of a rank in each MoE layer; ranks x slotsPerRank must hold experts + redundantExperts."""
    redundant_experts: CountOrZero = 0
    """Replicas in each MoE layer beyond one copy of each expert. More of them: fewer bytes to load after a loss."""
    max_tokens: Annotated[int, Field(ge=4, le=65536)] = 32
    """Rows that a rank may put into one step: the dispatch limit."""
    max_seqs: Count = 16
    """Sequences in a rank's KV cache."""
    max_model_len: Annotated[int, Field(ge=2)] = 256
    """Positions of a sequence, prompt and answer."""
    capture_sizes: Annotated[tuple[Count, ...], Listed] = ()
    """Row counts for which a step graph is captured, ascending up to maxTokens; a step is padded to the next. Empty: 1, 2,
    4, then every 8 (on a CPU from 4). More of them: less padding, a longer boot and more memory."""
    ep_backend: Literal["shm", "nixl", "nixl-ep"] = "shm"
    """The exchange between ranks: one host's memory, NIXL with UCX, or NIXL EP on NVIDIA GPUs."""
    ep_timeout_s: Duration = 30.0
    """Ranks mask a silent peer by themselves after this. A fallback: the daemon is meant to be earlier, and a short one
    masks honest pauses."""
    early_release: bool = True
    """Ends the wait of a GPU kernel for a lost peer at once; without it, the wait lasts for epTimeout. For nixl-ep only."""
    fault_injection: bool = False
    """Ranks commit faults when `healer-chaos inject fault` asks them to: for tests, never for production."""
    host_tier: bool = True
    """Keeps every expert in host memory too, so that the only copy on a dead rank need not come from disk."""
    gpus: Annotated[tuple[CountOrZero, ...], Listed] = ()
    """GPU index of each slot, repeated as needed; empty: slots in turn over the visible GPUs. For nixl-ep only."""
    spares: Annotated[int, Field(ge=0, le=1024)] = 0
    """Booted processes without a rank on each host: a replacement starts at loading weights. Each costs a process's
    memory, and on a GPU a context. One that was used is replaced when the group has not changed for 5 s."""
    spare_gpus: Annotated[tuple[CountOrZero, ...], Listed] = ()
    """GPU index of each spare, repeated as needed; empty: spare k is on the GPU of slot k. For nixl-ep only."""
    pin_cores: bool = True
    """Each rank on cores of its own, the daemon and spares on a quarter of all, so that what the kernel does for a process that
    begins or ends holds up no other. For nixl-ep only, and where each rank can have 4. Groups that share a host need cores of
    their own from its control groups, or `false`."""
    slot_labels: Annotated[tuple[SlotLabels, ...], Listed] = ()
    """Labels of slots, for `match.labels` of a rule."""
    gateway: Gateway = Field(default_factory=Gateway)

    def labels_of(self, slot: int) -> dict[str, str]:
        """The labels of one slot; of two entries that set the same label, the later one counts."""
        found: dict[str, str] = {}
        for entry in self.slot_labels:
            if any(span.holds(slot) for span in entry.slots):
                found.update(entry.labels)
        return found


class Api(Model):
    """The daemon's own HTTP API."""

    host: str = "127.0.0.1"
    """Address to listen on; off loopback tokenFile is required."""
    port: Port = 8470
    """0: any free port, published in `healer.json` of the run directory."""
    token_file: PathText | None = None
    """Where it is set, control calls need its content as a bearer token. Required when `host` is not loopback."""
