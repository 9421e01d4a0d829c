"""What daemon, API server and engine tell each other: one definition for both ends, carried as JSON or msgpack."""

from enum import StrEnum

import msgspec

PREFIX = "/v1/healer/in-place"
"""Of the HTTP routes. vLLM's --api-key guards what begins with /v1 (entrypoints/serve/utils/server_utils.py)."""


NOT_IN_FORCE = "not in force"
"""Begins the answer of an engine, and the message of a 503, where vLLM is stock."""


class GuardState(StrEnum):
    READY = "ready"
    """The plugin is in force."""
    STOCK = "stock"
    """vLLM runs as it is: something in it is not as known. `reason` says what."""
    OFF = "off"
    """Switched off by HEALER_IN_PLACE=0."""


class Requests(StrEnum):
    """What becomes of the requests that a survivor has; `held` weakens it for single requests where it is not safe."""

    KEEP = "keep"
    """They go on with their KV cache, from the last token that was accepted."""
    RECOMPUTE = "recompute"
    """They go on, and their KV cache is computed again."""
    ABORT = "abort"
    """As stock vLLM does: they end with finish_reason `abort`."""


class Phase(StrEnum):
    """Steps of a shrink on one engine, in this order."""

    PARK = "park"
    DRAIN = "drain"
    HOLD = "hold"
    LEAVE = "leave"
    MEET = "meet"
    WORKERS = "workers"
    VOTE = "vote"
    SERVE = "serve"


class Refusal(StrEnum):
    """Why an order was not even begun; each is HTTP 409."""

    STALE = "stale"
    """A higher epoch was seen."""
    CONFLICT = "conflict"
    """Another order of the same epoch was seen."""
    NOT_MEMBER = "not-a-member"
    """This slot is not in the order."""
    DEAD = "dead"
    """A worker of this engine has ended: only a restart of the rank helps."""
    STUCK = "stuck"
    """An earlier order still runs beyond its deadline."""
    WRONG_STATE = "wrong-state"
    """Not in the state that this order needs; the detail says which."""


class ShrinkOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Go on with these slots alone. `survivors` may be all live slots: then the groups are made anew, which is a retry."""

    epoch: int
    """Of every change, shrinks and refills together, grows by at least one."""
    survivors: tuple[int, ...]
    store_host: str
    store_port: int
    """Of the store that the coordination process hosts."""
    timeout_s: float
    requests: Requests = Requests.KEEP


class HeldCounts(msgspec.Struct, frozen=True):
    kept: int = 0
    recomputed: int = 0
    aborted: int = 0
    kept_tokens: int = 0
    """Positions whose KV cache stayed."""
    evicted_blocks: int = 0
    """Blocks that lost their prefix-cache entry: allocated, and not known to be written."""


class ShrinkResult(msgspec.Struct, frozen=True):
    epoch: int
    slot: int
    serves: bool
    phase: Phase
    """Where it ended; SERVE if all went well."""
    detail: str = ""
    refused: Refusal | None = None
    held: HeldCounts = HeldCounts()
    took_s: float = 0.0
    phases_s: dict[str, float] = {}
    """Time in each phase."""


class Bootstrap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a refill: the fields of vLLM's ReconfigureDistributedRequest that are not constant."""

    size: int
    """data_parallel_size, the number of slots; unchanged by a refill."""
    host: str
    port: int
    ports: tuple[int, ...]
    store_port: int
    """Of the refill's own store, at `host`."""


class RefillPrepare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    epoch: int
    live: tuple[int, ...]
    joiners: tuple[int, ...]
    source: int
    timeout_s: float
    bootstrap: Bootstrap


class RefillCommit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    epoch: int
    store_host: str
    store_port: int
    """Of the refill's store, which stock scaling uses from then on."""


class RefillAbort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    epoch: int


class RefillAnswer(msgspec.Struct, frozen=True):
    epoch: int
    slot: int
    ok: bool
    detail: str = ""
    """prepare: the key in the refill's store that says ready; abort: what was dropped."""
    refused: Refusal | None = None
    took_s: float = 0.0
    pause_s: float = 0.0
    """commit: how long this engine scheduled nothing."""


class EngineInfo(msgspec.Struct, frozen=True):
    """Answered by the engine's input thread, also while its loop stands."""

    slot: int
    size: int
    live: tuple[int, ...]
    epoch: int
    """The highest that was seen; 0: none."""
    status: str
    """healthy, unhealthy or dead."""
    fault: str
    """Class of the exception; empty: none."""
    phase: Phase | None
    """Of a shrink that runs now."""
    refill: str
    """State of a refill or scaling; empty: none."""
    refill_error: str
    """Of the last preparation on this engine that failed."""
    wave: int
    running: int
    waiting: int
    max_size: int
    redundant_experts: int
    last: ShrinkResult | None = None


class Info(msgspec.Struct, frozen=True):
    """GET of the prefix."""

    schema: int
    state: GuardState
    reason: str
    vllm: str
    engine: EngineInfo | None
    """None where `state` is not ready or the engine did not answer in time."""


class CoordinationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The coordination process about itself."""

    pid: int
    host: str
    rpc_port: int
    store_port: int
    coordinator_addresses: tuple[str, str, str]
    """Front publish, back output, back publish: as in vLLM's DPCoordinatorProc.run_coordinator."""
    coordinator_pid: int
    """0: not running now."""
    coordinator_starts: int
    expected: tuple[int, ...]
    """Slots whose handshake is awaited, or was when all had ended."""
    hello: tuple[int, ...]
    answered: tuple[int, ...]
    ready: tuple[int, ...]
    trouble: str
    """A handshake that does not fit: another configuration on one rank, or a slot that nobody expects."""
    refill: Bootstrap | None
    refill_epoch: int
    refill_keys: tuple[str, ...]
    """Of `eep_ready/<slot>` in the refill's store: those that are set."""
