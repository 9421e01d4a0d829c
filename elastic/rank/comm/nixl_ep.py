"""The EP backend on NVIDIA GPUs: NIXL EP's low-latency kernels, and the early release of a kernel that waits for a dead peer.

NIXL's kernels read the mask once, before they wait. Masking a peer therefore frees the kernels that follow, not the one that
waits. That one spins on 64-bit words at the start of the local RDMA buffer: two signal regions (used in turn), each of
`capacity * experts_per_rank` words, rounded up to 128 bytes. For peer d, dispatch waits on word `e * capacity + d` for each
local expert e (value n + 1: n tokens came), combine on word `d * experts_per_rank + j` for each of d's experts (not 0: come).
So the releaser writes 1 into these words, from pinned memory on a stream of high priority, again and again until the step
returns: with a wrong result, which the round loop discards because the mask changed. `clean` zeroes both regions between
two barriers, so that no word written here is ever taken for an arrival.

That layout is NIXL's own affair (seen in 1.4.1 and 1.5.1). `self_test` proves it at start-up on this process's own words;
where it does not hold, `release` only masks, and a waiting kernel ends at NIXL's timeout.
"""

import importlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any

import msgspec
import structlog
import torch

from elastic.errors import ElasticError, Unreachable
from elastic.rank.comm.base import ABSENT, LIVE, MASKED, PeerFault, Received, never
from elastic.rank.device import Device

MODULES = ("nixl_ep", "nixl_ep_cu13", "nixl_ep_cu12")
"""The plain name forwards to the wheel that carries the code; bundles may come without the forwarding package."""

HIDDEN_SIZES = (2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
REGION_ALIGN_BYTES = 128
WRITE_EVERY_S = 0.0003
WAITING_AFTER_S = 0.2
"""A step that runs for so long is taken to wait for its peers; the kernels do not say for whom."""

log = structlog.get_logger("elastic.ep")


def load_nixl_ep() -> Any:
    """The NIXL EP module. Raises ElasticError with the reasons: no libcuda, no build for this torch, no wheel."""
    reasons: list[str] = []
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
    raise ElasticError(
        f"NIXL EP cannot be used with torch {torch.__version__} here ({'; '.join(reasons)}); it needs an NVIDIA driver and "
        "a nixl wheel built for this torch: 1.4.1 for torch 2.11 to 2.14, 1.5.1 for torch 2.12 to 2.14"
    )


def refuse_shape(capacity: int, experts_per_rank: int, max_tokens: int, hidden: int, top_k: int) -> None:
    """Raise ElasticError, naming every size, where NIXL EP's kernels do not fit the group."""
    problems: list[str] = []
    if capacity >= 8 and capacity % 8:
        problems.append(f"maxRanks {capacity} must be below 8 or a multiple of 8")
    if hidden not in HIDDEN_SIZES:
        problems.append(f"the model's hidden size {hidden} is none of {', '.join(map(str, HIDDEN_SIZES))}")
    if max_tokens * capacity % 4:
        problems.append(f"maxTokens {max_tokens} x maxRanks {capacity} must be divisible by 4")
    if top_k > 16:
        problems.append(f"the model's top-k {top_k} is above 16")
    if experts_per_rank < 1:
        problems.append("slotsPerRank must be positive")
    if problems:
        raise ElasticError("NIXL EP: " + "; ".join(problems))


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    nixl: bytes
    board: bytes


class _PeerStore:
    """What NIXL uses of a `TCPStore`, over the metadata that the controller brought: nothing here waits."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = bytes(value)

    def wait(self, keys: list[str], _: timedelta) -> None:
        missing = [key for key in keys if key not in self._values]
        if missing:
            raise RuntimeError(f"no metadata for {missing}")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._values[key] for key in keys]

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None


class Signals:
    """The words that the kernels wait on. Pure index arithmetic, so that it can be tested without a GPU."""

    def __init__(self, capacity: int, experts_per_rank: int) -> None:
        self.capacity, self.experts = capacity, experts_per_rank
        size = capacity * experts_per_rank * 8
        self.region = -(-size // REGION_ALIGN_BYTES) * REGION_ALIGN_BYTES // 8
        """Words from one region to the next."""
        self.words = 2 * self.region

    def dispatch_words(self, peer: int) -> range:
        """In a region: one word for each local expert."""
        return range(peer, self.capacity * self.experts, self.capacity)

    def combine_words(self, peer: int) -> range:
        """In a region: one word for each of the peer's experts, neighbours."""
        return range(peer * self.experts, (peer + 1) * self.experts)


class NixlEpBackend:
    """See `EpBackend`. One thread of its own, the releaser; see the module's docstring.

    `Received` is not at one address for all captures: NIXL allocates it in the memory pool of the graph that captures it.
    """

    def __init__(
        self,
        device: Device,
        board: Any,
        *,
        rank: int,
        capacity: int,
        experts_per_rank: int,
        max_tokens: int,
        hidden: int,
        top_k: int,
        timeout_s: float,
    ) -> None:
        """`board` has endpoint, connect, disconnect of the round board, which shares this object's connections. Raises
        ElasticError as `load_nixl_ep` and `refuse_shape`."""
        refuse_shape(capacity, experts_per_rank, max_tokens, hidden, top_k)
        self.rank, self.capacity, self.experts_per_rank = rank, capacity, experts_per_rank
        self.max_tokens, self.hidden = max_tokens, hidden
        self._device, self._board = device, board
        module = load_nixl_ep()
        self._topk_type: torch.dtype = module.topk_idx_t
        self._store = _PeerStore()
        self._experts = capacity * experts_per_rank
        size = module.Buffer.get_rdma_size_hint(max_tokens, hidden, capacity, self._experts)
        self._buffer = module.Buffer(
            rank=rank, explicitly_destroy=True, tcp_store_group=self._store, timeout_ms=max(1, round(timeout_s * 1000))
        )
        self._buffer.update_memory_buffers(
            num_ranks=capacity, num_experts_per_rank=experts_per_rank, num_rdma_bytes=size
        )
        self._endpoint = msgspec.msgpack.encode(
            _Metadata(bytes(self._buffer.runtime.get_local_metadata()), board.endpoint())
        )

        self._layout = Signals(capacity, experts_per_rank)
        self._signals: torch.Tensor = self._buffer.get_local_buffer_tensor(torch.int64, use_rdma_buffer=True)
        self._mask_here = torch.zeros(capacity, dtype=torch.int32, pin_memory=True)
        self._mask_there = device.zeros(capacity, dtype=torch.int32)
        self._ones = torch.ones(experts_per_rank, dtype=torch.int64, pin_memory=True)
        self._side = torch.cuda.Stream(device.place, priority=-1)  # type: ignore[no-untyped-call]
        self._links = torch.cuda.Stream(device.place)  # type: ignore[no-untyped-call]

        self._masks = [ABSENT] * capacity
        self._masks[rank] = LIVE
        self._endpoints: dict[int, bytes] = {}
        self._generation = 0
        self._faults: deque[PeerFault] = deque()
        self._handle: Any = None
        self._stuck = False

        self._state = threading.Condition()
        self._in_step = False
        self._step_began = 0.0
        self._to_release: set[int] = set()
        self._closed = False
        self.releases_early = False
        """Whether the self-test found the words where they are expected."""
        self._thread = threading.Thread(target=self._release_loop, name="ep-release", daemon=True)
        self._thread.start()

    # --- connections ----------------------------------------------------------------------------------------------

    def endpoint(self) -> bytes:
        return self._endpoint

    def connect(self, peers: Mapping[int, bytes], *, deadline_s: float, give_up: Callable[[], bool] = never) -> None:
        """NIXL meets its peers: it returns when they connect to this rank too, and keeps Python's lock meanwhile, so this
        process does nothing else. Who is asked to connect last waits least."""
        new = {p: raw for p, raw in peers.items() if p != self.rank and self._endpoints.get(p) != raw}
        if not new:
            return
        if self._stuck:
            raise ElasticError(f"rank {self.rank}: an earlier connect never came back; the rank must be replaced")
        self.disconnect([p for p in new if p in self._endpoints])
        until = time.monotonic() + deadline_s
        for peer, raw in new.items():
            metadata = msgspec.msgpack.decode(raw, type=_Metadata)
            self._store.set(f"NIXL_EP/{peer}", metadata.nixl)
            self._board.connect(peer, metadata.board, deadline_s=max(0.1, until - time.monotonic()))
        # NIXL may spin for ever where an endpoint never connects (NIXL 2182, 2084): the wait that gives up is out here
        errors: list[BaseException] = []
        thread = threading.Thread(target=self._connect, args=(list(new), errors), daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < until and not give_up():
            thread.join(0.05)
        if thread.is_alive():
            self._stuck = True
            text = f"rank {self.rank}: no connection to ranks {sorted(new)} within {deadline_s:g} s"
            raise Unreachable(text, sorted(new))
        if errors:
            raise ElasticError(f"rank {self.rank}: cannot connect to ranks {sorted(new)}: {errors[0]}") from errors[0]
        for peer, raw in new.items():
            self._endpoints[peer] = raw
            self._masks[peer] = MASKED

    def _connect(self, peers: list[int], errors: list[BaseException]) -> None:
        try:
            self._device.bind()
            with torch.cuda.stream(self._links):
                self._buffer.connect_ranks(peers, activate=False)
                self._links.synchronize()
        except BaseException as error:
            errors.append(error)

    def disconnect(self, ranks: Collection[int]) -> None:
        known = [r for r in ranks if r in self._endpoints]
        if not known:
            return
        self._device.bind()
        with torch.cuda.stream(self._links):
            self._buffer.disconnect_ranks(known)
            self._links.synchronize()
        for peer in known:
            self._board.disconnect(peer)
            del self._endpoints[peer]
            self._set(peer, ABSENT)

    # --- masks ----------------------------------------------------------------------------------------------------

    @property
    def mask_generation(self) -> int:
        return self._generation

    def set_mask(self, rank: int, masked: bool) -> None:
        if rank == self.rank:
            if masked:
                raise ValueError(f"rank {rank} cannot mask itself")
            return
        if rank not in self._endpoints:
            if masked:
                return
            raise ValueError(f"rank {rank} is not connected and cannot be unmasked")
        if self._masks[rank] == (MASKED if masked else LIVE):
            return
        self._device.bind()
        with torch.cuda.stream(self._links):
            self._buffer.update_mask_buffer(rank, masked)
            self._links.synchronize()
        self._set(rank, MASKED if masked else LIVE)

    def masks(self) -> tuple[int, ...]:
        return tuple(self._masks)

    def _set(self, rank: int, mask: int) -> None:
        before, self._masks[rank] = self._masks[rank], mask
        if LIVE in (before, mask) and before != mask:
            self._generation += 1

    # --- a step ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        with self._state:
            self._in_step, self._step_began = True, time.monotonic()

    def end_step(self) -> None:
        """Wait for the step and read the masks: a kernel's timeout shows nowhere else."""
        self._buffer.query_mask_buffer(self._mask_there)
        self._mask_here.copy_(self._mask_there, non_blocking=True)
        torch.cuda.current_stream(self._device.place).synchronize()
        with self._state:
            self._in_step = False
            self._state.notify_all()
        for peer, mask in enumerate(self._mask_here.tolist()):
            if mask == 1 and self._masks[peer] == LIVE:
                self._set(peer, MASKED)
                self._faults.append(PeerFault(peer, "timeout"))

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor) -> Received:
        received, counts, self._handle, _, _ = self._buffer.dispatch(
            x, topk_idx.to(self._topk_type), self.max_tokens, self._experts, use_fp8=False
        )
        return Received(received, counts)

    def combine(self, y: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        self._buffer.combine(y, topk_idx.to(self._topk_type), topk_weights, self._handle, out=out)

    def clean(self, base: int) -> None:
        """NIXL's kernels carry no number: `base` is not used, the zeroed words are what separates the epochs."""
        with self._state:
            # nothing is written any more: no step runs, and the releaser writes under this lock
            self._to_release.clear()
            self._device.bind()
            with torch.cuda.stream(self._links):
                self._signals[: self._layout.words].zero_()
                self._links.synchronize()

    # --- early release --------------------------------------------------------------------------------------------

    def release(self, ranks: Collection[int]) -> None:
        with self._state:
            for rank in ranks:
                if self._masks[rank] == LIVE and rank != self.rank:
                    self._set(rank, MASKED)
                    self._to_release.add(rank)
            self._state.notify_all()

    def _release_loop(self) -> None:
        self._device.bind()
        masked: set[int] = set()
        while True:
            with self._state:
                self._state.wait_for(lambda: self._closed or bool(self._to_release))
                if self._closed:
                    return
                with torch.cuda.stream(self._side):
                    for rank in self._to_release - masked:
                        self._buffer.update_mask_buffer(rank, True)
                    masked = set(self._to_release)
                    if self._in_step and self.releases_early:
                        self._write_words(masked)
                    self._side.synchronize()
                if not self._in_step:
                    # the masks are set and nothing waits; a step that begins now would skip these peers
                    self._to_release.clear()
                    masked = set()
                    continue
                self._state.wait(WRITE_EVERY_S)

    def _write_words(self, peers: Collection[int]) -> None:
        one = self._ones[:1]
        for base in (0, self._layout.region):
            for peer in peers:
                words = self._layout.combine_words(peer)
                self._signals[base + words.start : base + words.stop].copy_(self._ones, non_blocking=True)
                for word in self._layout.dispatch_words(peer):
                    self._signals[base + word : base + word + 1].copy_(one, non_blocking=True)

    def self_test(self) -> bool:
        """With every peer masked, send known numbers of rows to own experts and look for them in the words. Called once,
        before any connect. Returns whether early release may be used; logs why not."""
        layout, k = self._layout, min(2, self.experts_per_rank)
        rows = min(self.max_tokens, 8)
        x = self._device.zeros(rows, self.hidden)
        index = torch.full((rows, k), -1, dtype=torch.int64)
        want = [0] * self.experts_per_rank
        for row in range(rows):
            for j in range(k):
                # expert e gets a number of rows of its own where there are rows enough
                if row < rows - j * 3:
                    index[row, j] = self.rank * self.experts_per_rank + j
                    want[j] += 1
        chosen, weights = self._device.to(index), self._device.zeros(rows, k, dtype=torch.float32)
        self._signals[: layout.words].zero_()
        received = self.dispatch(x, chosen)
        torch.cuda.synchronize(self._device.place)
        found = self._signals[: layout.words].tolist()
        dispatched = any(
            [found[base + word] for word in layout.dispatch_words(self.rank)] == [n + 1 for n in want]
            for base in (0, layout.region)
        )
        self.combine(torch.zeros_like(received.x), chosen, weights, self._device.zeros(rows, self.hidden))
        torch.cuda.synchronize(self._device.place)
        found = self._signals[: layout.words].tolist()
        combined = any(
            all(found[base + word] != 0 for word in layout.combine_words(self.rank)) for base in (0, layout.region)
        )
        self.releases_early = dispatched and combined
        if not self.releases_early:
            log.warning(
                "early release is off: the signal words are not where they were expected; a kernel that waits for a dead "
                "peer ends at the NIXL timeout",
                dispatch=dispatched,
                combine=combined,
            )
        self._signals[: layout.words].zero_()
        torch.cuda.synchronize(self._device.place)
        return self.releases_early

    # --- reports --------------------------------------------------------------------------------------------------

    def waiting_on(self) -> tuple[int, ...]:
        if not self._in_step or time.monotonic() - self._step_began < WAITING_AFTER_S:
            return ()
        return tuple(r for r, mask in enumerate(self._masks) if mask == LIVE and r != self.rank)

    def poll_faults(self) -> list[PeerFault]:
        found: list[PeerFault] = []
        while self._faults:
            found.append(self._faults.popleft())
        return found

    def close(self) -> None:
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join(5.0)
        self._buffer.destroy()
