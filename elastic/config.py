"""What is fixed for the life of a group: sizes, paths, back ends. Sized once, never changed by a reconfiguration."""

import contextlib
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from elastic.errors import ElasticError

EpBackendName = Literal["shm", "nixl", "nixl-ep"]
"""shm: one host's memory; nixl: the NIXL agent with UCX, also between hosts; nixl-ep: NIXL EP on NVIDIA GPUs."""


MAX_RUN_DIR = 70
"""Characters of `run_dir`: the path of a Unix socket below it holds 107 bytes."""


class ModelShape(msgspec.Struct, frozen=True):
    """The part of a checkpoint's config.json that the controller needs."""

    experts: int
    moe_layers: int
    hidden: int
    vocab: int
    max_position: int


SUSPECTS = "suspects.json"
"""In the run directory."""

CPU_MIN_ROWS = 4
"""Below, a CPU's matrix kernels sum in another order, and a row would depend on its batch."""

CAPTURE_STEP = 8


LINK_SHARE = 1 / 4
"""Of the time for a prepare, for a joiner to connect."""
LINK_S, LINK_PEER_S = 3.0, 0.2


def default_capture_sizes(max_tokens: int, min_rows: int = 1) -> tuple[int, ...]:
    """Row counts to capture a step for: 1, 2, 4, then every 8 up to the dispatch limit, which is always the last one.

    The list is vLLM's for CUDA graphs of decode steps (`cudagraph_capture_sizes`): at most 7 rows of padding, 35 sizes at
    256. Sizes below `min_rows` are left out.
    """
    steps = (1, 2, 4, *range(CAPTURE_STEP, max_tokens, CAPTURE_STEP))
    return (*(size for size in steps if min_rows <= size < max_tokens), max_tokens)


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One serving group. `validate` raises ElasticError with every contradiction, naming the field."""

    name: str
    run_dir: str
    """Sockets, logs, group state. Must be short: a Unix socket path holds 107 bytes."""
    checkpoint: str
    """A Hugging Face folder: config.json, *.safetensors, tokenizer.json."""
    ranks: int
    """Live ranks at start."""
    max_ranks: int
    """Slots; the capacity of every buffer."""
    slots_per_rank: int
    """Physical expert slots of a rank, per MoE layer."""
    redundant_experts: int = 0
    """Replicas per layer beyond one of each; total over the group, placed while there is room."""
    max_tokens: int = 32
    """Rows a rank may put into one step: the dispatch limit."""
    max_seqs: int = 16
    """Sequences in a rank's KV cache."""
    max_model_len: int = 256
    """Positions of a sequence, prompt and answer."""
    capture_sizes: tuple[int, ...] = ()
    """Row counts for which a step graph is captured; a step is padded to the next. Ascending up to `max_tokens`, on a CPU
    from CPU_MIN_ROWS. Empty: `default_capture_sizes`, which then stands here."""
    ep_backend: EpBackendName = "shm"
    gpus: tuple[int, ...] = ()
    """GPU index of each slot, repeated as needed; empty: slots in turn over the visible GPUs. Only for nixl-ep."""
    spares: int = 0
    """Booted processes without a rank kept on this host, so that a replacement starts at loading weights."""
    spare_gpus: tuple[int, ...] = ()
    """GPU index of each spare, repeated as needed; empty: spare k stands on the GPU of slot k. Only for nixl-ep."""
    pin_cores: bool = True
    """Each rank on cores of its own, see `elastic.cores`. Only for nixl-ep, and where there are cores enough."""
    ep_timeout_s: float = 30.0
    """After this long a silent peer is masked by the survivor itself: the fallback, never the plan."""
    early_release: bool = True
    """End the wait of a GPU kernel for a lost peer at once. Off, it lasts for `ep_timeout_s`: to measure what that costs.
    Only for nixl-ep; the other back ends always release at once."""
    host_tier: bool = True
    heartbeat_s: float = 0.2
    prepare_deadline_s: float = 60.0
    """For boot, load, connect and capture of a joining rank."""
    commit_deadline_s: float = 5.0
    """For each answer within a commit; a rank that exceeds it is treated as lost."""
    fault_injection: bool = False
    """Ranks commit faults when asked by `healer-chaos`; see `elastic.rank.faults`. Never in production."""
    gateway_host: str = "127.0.0.1"
    gateway_port: int = 0
    """0 picks a free port; the gateway publishes it in `gateway.json`."""
    gateway_max_queued: int = 256
    model_name: str = ""
    """What clients call the model; empty: the name of the checkpoint folder."""

    def __post_init__(self) -> None:
        if not self.capture_sizes:
            msgspec.structs.force_setattr(self, "capture_sizes", default_capture_sizes(self.max_tokens, self.min_rows))

    @property
    def min_rows(self) -> int:
        """Of a step, padding included."""
        return 1 if self.on_gpu else CPU_MIN_ROWS

    @property
    def on_gpu(self) -> bool:
        return self.ep_backend == "nixl-ep"

    @property
    def weight_bytes(self) -> int:
        """Of one weight: bfloat16 on GPUs, float32 on CPUs."""
        return 2 if self.on_gpu else 4

    def link_deadline_s(self, *, joins: bool) -> float:
        """For a rank to connect its exchange: for a joiner 3 s and 0.2 s for each possible peer, where NIXL EP took 7 to 35 ms on an
        H200, or less where a prepare has less time; twice as long for those that wait for it."""
        joiner_s = min(self.prepare_deadline_s * LINK_SHARE, LINK_S + LINK_PEER_S * self.max_ranks)
        return joiner_s if joins else 2 * joiner_s

    @property
    def root(self) -> Path:
        return Path(self.run_dir)

    def problems(self, model: ModelShape) -> Iterator[tuple[str, str]]:
        """Every contradiction: the field to change, and what is wrong with it."""
        for name in ("ranks", "max_ranks", "slots_per_rank", "max_tokens", "max_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                yield name, f"{getattr(self, name)} is not positive"
        for name in ("ep_timeout_s", "heartbeat_s", "prepare_deadline_s", "commit_deadline_s"):
            if getattr(self, name) <= 0:
                yield name, f"{getattr(self, name)} is not positive"
        for name in ("redundant_experts", "spares"):
            if getattr(self, name) < 0:
                yield name, f"{getattr(self, name)} is negative"
        if self.ranks > self.max_ranks:
            yield "ranks", f"{self.ranks} is above the capacity of {self.max_ranks}"
        if self.slots_per_rank > model.experts:
            yield "slots_per_rank", f"{self.slots_per_rank} is above the model's {model.experts} experts"
        room, needed = self.ranks * self.slots_per_rank, model.experts + self.redundant_experts
        if 0 < room < needed:
            yield (
                "slots_per_rank",
                f"{self.ranks} ranks x {self.slots_per_rank} slots = {room} hold fewer than {model.experts} experts + "
                f"{self.redundant_experts} redundant = {needed}",
            )
        sizes = self.capture_sizes
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < self.min_rows or sizes[-1] != self.max_tokens:
            yield (
                "capture_sizes",
                f"{list(sizes)} must ascend from at least {self.min_rows} to the dispatch limit {self.max_tokens}",
            )
        if self.max_model_len > model.max_position:
            yield "max_model_len", f"{self.max_model_len} is above the model's {model.max_position} positions"
        if len(str(self.root.absolute())) > MAX_RUN_DIR:
            yield "run_dir", f"{self.run_dir} is too long for Unix sockets below it ({MAX_RUN_DIR} characters at most)"

    def validate(self, model: ModelShape) -> None:
        if found := [f"{name}: {text}" for name, text in self.problems(model)]:
            raise ElasticError("group configuration: " + "; ".join(found))


def write_suspects(run_dir: Path, slots: Collection[int]) -> None:
    """Say in which slots a rank that starts must prove its device first (`elastic.rank.probe`): all of them, at once. A run
    directory that cannot be written leaves what stood there."""
    path = run_dir / SUSPECTS
    with contextlib.suppress(OSError):
        if not slots:
            path.unlink(missing_ok=True)
            return
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(sorted(slots)))
        part.replace(path)


def is_suspect(run_dir: Path, slot: int) -> bool:
    """Whether a rank in this slot must prove its device; a file that cannot be read speaks against nobody."""
    try:
        found = json.loads((run_dir / SUSPECTS).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, list) and slot in found


def read_model_shape(checkpoint: str | Path) -> ModelShape:
    """Read config.json of a Qwen3-MoE checkpoint. Raises ElasticError naming the file and the key."""
    path = Path(checkpoint) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ElasticError(f"{path}: no such file; `checkpoint` must be a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ElasticError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or config.get("model_type") != "qwen3_moe":
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise ElasticError(f"{path}: model_type is {found!r}, expected 'qwen3_moe'")
    try:
        step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or []
        layers, experts = int(config["num_hidden_layers"]), int(config["num_experts"])
        moe_layers = sum(1 for i in range(layers) if i not in dense and experts > 0 and (i + 1) % step == 0)
        return ModelShape(
            experts=experts,
            moe_layers=moe_layers,
            hidden=int(config["hidden_size"]),
            vocab=int(config["vocab_size"]),
            max_position=int(config["max_position_embeddings"]),
        )
    except KeyError as error:
        raise ElasticError(f"{path}: key {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise ElasticError(f"{path}: {error}") from error
