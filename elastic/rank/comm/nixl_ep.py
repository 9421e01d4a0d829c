"""The EP backend on NVIDIA GPUs: NIXL EP's low-latency kernels, and the early release of a kernel that waits for a dead peer.

NIXL's kernels read the mask once, before they wait. Masking a peer therefore frees the kernels that follow, not the one that
waits. That one spins on words in its own memory (`nixl_signals` says where). So the releaser writes 1 into the words of the
lost peer, from pinned memory in a queue of high priority, again and again until the step returns: with a wrong result,
which the round loop discards because the mask changed. `clean` zeroes both regions of words between two barriers, so that
no word written here is ever taken for an arrival. Where `self_test` does not find the words in their places, `release` only
masks, and a waiting kernel ends at NIXL's timeout.
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
from elastic.rank.comm.nixl_signals import Signals, found_where_expected, trial
from elastic.rank.device import Device
from elastic.rank.fatal import ExchangeLost, essential, first_line
from elastic.rank.frozen import ends_within

MODULES = ("nixl_ep", "nixl_ep_cu13", "nixl_ep_cu12")
"""The plain name forwards to the wheel that carries the code; bundles may come without the forwarding package."""

HIDDEN_SIZES = (2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
WRITE_EVERY_S = 0.0003
DISCONNECT_S = 10.0
"""15 to 34 ms were seen for each peer on an H200; what takes longer than this never ends."""
FROZEN_AFTER_S = 1.0
"""Beyond the deadline of a connect: a thread that still gets Python's lock has given up by then."""
TAIL_S = 0.5
"""For a connect that was given up: it runs in this process again, or it does not."""
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
        self._mask_here = device.host(capacity, dtype=torch.int32)
        self._mask_there = device.zeros(capacity, dtype=torch.int32)
        self._ones = device.host(experts_per_rank, dtype=torch.int64, value=1)
        self._side, self._links = device.queue(priority=-1), device.queue()

        self._masks = [ABSENT] * capacity
        self._masks[rank] = LIVE
        self._endpoints: dict[int, bytes] = {}
        self._generation = 0
        self._faults: deque[PeerFault] = deque()
        self._handle: Any = None
        self._late: tuple[threading.Thread, list[int]] | None = None
        """A connect that was given up, and its peers."""

        self._state = threading.Condition()
        self._in_step = False
        self._step_began = 0.0
        self._to_release: set[int] = set()
        self._closed = False
        self.releases_early = False
        """Whether the self-test found the words where they are expected."""
        self._thread = threading.Thread(
            target=essential("ep-release", self._release_loop), name="ep-release", daemon=True
        )
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
        self._settle_late()
        self.disconnect([p for p in new if p in self._endpoints])
        until = time.monotonic() + deadline_s
        for peer, raw in new.items():
            metadata = msgspec.msgpack.decode(raw, type=_Metadata)
            self._store.set(f"NIXL_EP/{peer}", metadata.nixl)
            self._board.connect(peer, metadata.board, deadline_s=max(0.1, until - time.monotonic()))
        # NIXL may spin for ever where an endpoint never connects (NIXL 2182, 2084): the wait that gives up is out here
        errors: list[BaseException] = []
        thread = threading.Thread(target=self._connect, args=(list(new), errors), daemon=True)
        with ends_within(max(0.0, until - time.monotonic()) + FROZEN_AFTER_S):
            thread.start()
            while thread.is_alive() and time.monotonic() < until and not give_up():
                thread.join(0.05)
        if thread.is_alive():
            self._late = thread, list(new)
            text = f"rank {self.rank}: no connection to ranks {sorted(new)} within {deadline_s:g} s"
            raise Unreachable(text, sorted(new))
        if errors:
            self._back_out(list(new), errors[0])
            text = f"rank {self.rank}: cannot connect to ranks {sorted(new)}: {errors[0]}"
            raise Unreachable(text, sorted(new)) from errors[0]
        for peer, raw in new.items():
            self._endpoints[peer] = raw
            self._masks[peer] = MASKED

    def _settle_late(self) -> None:
        """A wait that was given up has most often ended since: the call itself, or what comes behind it, was slow."""
        if self._late is None:
            return
        thread, peers = self._late
        thread.join(TAIL_S)
        if thread.is_alive():
            raise ExchangeLost(f"rank {self.rank}: an earlier connect to ranks {sorted(peers)} never came back")
        self._late = None
        self._back_out(peers, Unreachable("it came back when nobody waited for it any more", peers))

    def _connect(self, peers: list[int], errors: list[BaseException]) -> None:
        try:
            with self._links.use():
                self._buffer.connect_ranks(peers, activate=False)
        except BaseException as error:
            errors.append(error)

    def _back_out(self, peers: list[int], error: BaseException) -> None:
        """NIXL enters a peer in its list before it connects, and takes one that is there for connected, whatever came of it
        (1.4.1): kernels would reach into memory that is not theirs. A call for a peer that met an earlier incarnation's greeting
        ends so. Without the peers the list is sound again."""
        try:
            with ends_within(DISCONNECT_S), self._links.use():
                self._buffer.disconnect_ranks(peers)
        except Exception as again:
            text = f"rank {self.rank}: the exchange is in no known state after {error}: {first_line(again)}"
            raise ExchangeLost(text) from again

    def disconnect(self, ranks: Collection[int]) -> None:
        """Raises ExchangeLost."""
        known = [r for r in ranks if r in self._endpoints]
        if not known:
            return
        try:
            with ends_within(DISCONNECT_S), self._links.use():
                self._buffer.disconnect_ranks(known)
        except Exception as error:
            text = f"rank {self.rank}: cannot disconnect ranks {known}, and the exchange is in no known state: "
            raise ExchangeLost(text + first_line(error)) from error
        for peer in known:
            self._board.disconnect(peer)
            del self._endpoints[peer]
            self._set(peer, ABSENT)

    # --- masks ----------------------------------------------------------------------------------------------------

    @property
    def mask_generation(self) -> int:
        return self._generation

    def masks(self) -> tuple[int, ...]:
        return tuple(self._masks)

    def take_over(self, live: Collection[int], base: int) -> int:
        """As `clean`, `base` is not used. No word is zeroed: the last kernel of a step that counted has zeroed the region that
        the next one waits on, so what is found there is of the new view."""
        with self._state:
            if absent := [rank for rank in live if rank != self.rank and rank not in self._endpoints]:
                raise ValueError(f"ranks {absent} are not connected and cannot be unmasked")
            self._device.bind()
            for rank in self._endpoints:
                mask = LIVE if rank in live else MASKED
                if self._masks[rank] != mask:
                    # in the queue of the steps: done before the next one, and not waited for
                    self._buffer.update_mask_buffer(rank, mask == MASKED)
                    self._set(rank, mask)
            return self._generation

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
        self._device.wait_for_step()
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
            with self._links.use():
                self._signals[: self._layout.words].zero_()

    # --- early release --------------------------------------------------------------------------------------------

    def release(self, ranks: Collection[int]) -> None:
        with self._state:
            for rank in ranks:
                if self._masks[rank] == LIVE and rank != self.rank:
                    self._set(rank, MASKED)
                    self._to_release.add(rank)
            self._state.notify_all()

    def _release_loop(self) -> None:
        masked: set[int] = set()
        while True:
            with self._state:
                self._state.wait_for(lambda: self._closed or bool(self._to_release))
                if self._closed:
                    return
                with self._side.use():
                    for rank in self._to_release - masked:
                        self._buffer.update_mask_buffer(rank, True)
                    masked = set(self._to_release)
                    if self._in_step and self.releases_early:
                        self._write_words(masked)
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
        wanted = trial(self._layout, self.rank, self.max_tokens)
        chosen = self._device.to(wanted.rows)
        x, weights = self._device.zeros(len(chosen), self.hidden), torch.zeros_like(chosen, dtype=torch.float32)

        def words() -> list[int]:
            self._device.settle()
            return self._signals[: self._layout.words].tolist()

        def dispatch() -> None:
            self._signals[: self._layout.words].zero_()
            self.dispatch(x, chosen)

        def combine() -> None:
            room = self._device.zeros(self.experts_per_rank, self.capacity * self.max_tokens, self.hidden)
            self.combine(room, chosen, weights, torch.zeros_like(x))

        dispatched, combined = found_where_expected(self._layout, self.rank, wanted, words, dispatch, combine)
        self.releases_early = dispatched and combined
        if not self.releases_early:
            log.warning(
                "early release is off: the signal words are not where they were expected; a kernel that waits for a dead "
                "peer ends at the NIXL timeout",
                dispatch=dispatched,
                combine=combined,
            )
        self._signals[: self._layout.words].zero_()
        self._device.settle()
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
