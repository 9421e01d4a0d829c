"""The `nixl_ep` module without a GPU: plain tensors, threads of one process as ranks, and the semantics that were measured.

Kernels are calls: they read the masks once, write rows and signal words into their peers' memory, and spin on their own
words until each live peer's have come or the timeout masks it. Two signal regions are used in turn; a call zeroes the one
that follows. `Layout` says where the words lie: another one is another version of the library.
"""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import torch


class Layout:
    """As in 1.4.1."""

    def __init__(self, capacity: int, experts: int) -> None:
        self.capacity, self.experts = capacity, experts
        self.region = -(-capacity * experts // 16) * 16

    def dispatch_word(self, source: int, expert: int) -> int:
        return expert * self.capacity + source

    def combine_word(self, source: int, expert: int) -> int:
        return source * self.experts + expert


class OtherLayout(Layout):
    """A later version."""

    def dispatch_word(self, source: int, expert: int) -> int:
        return source * self.experts + expert


class Fabric:
    """All buffers of a test."""

    def __init__(self, layout: type[Layout] = Layout) -> None:
        self.layout = layout
        self.buffers: list[Buffer] = []
        self.hold_connect: Callable[[int, list[int]], None] = lambda rank, peers: None
        """Called inside connect, before it meets anybody."""
        self.hold_disconnect: Callable[[int], None] = lambda rank: None

    @property
    def module(self) -> Any:
        """What `load_nixl_ep` returns."""
        fabric = self

        class Bound(Buffer):
            def __init__(self, **options: Any) -> None:
                super().__init__(fabric, **options)

        return SimpleNamespace(topk_idx_t=torch.int64, Buffer=Bound)


class Buffer:
    def __init__(self, fabric: Fabric, *, rank: int, explicitly_destroy: bool, tcp_store_group: Any, timeout_ms: int):
        self.fabric, self.rank, self.store, self.timeout_s = fabric, rank, tcp_store_group, timeout_ms / 1e3
        self.runtime = SimpleNamespace(get_local_metadata=lambda: msgspec.msgpack.encode(self.number))
        self.number = len(fabric.buffers)
        fabric.buffers.append(self)
        self.peers: dict[int, Buffer] = {}
        self.listed: set[int] = set()
        self.calls: list[str] = []
        self.alive = True

    @staticmethod
    def get_rdma_size_hint(max_tokens: int, hidden: int, ranks: int, experts: int) -> int:
        return 1 << 20

    def update_memory_buffers(self, *, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int) -> None:
        self.layout = self.fabric.layout(num_ranks, num_experts_per_rank)
        self.words = torch.zeros(2 * self.layout.region + 64, dtype=torch.int64)
        self.mask = torch.ones(num_ranks, dtype=torch.int32)
        self.mask[self.rank] = 0
        self.rows: dict[tuple[int, str, int, int], torch.Tensor] = {}
        self.turn = 0
        self.peers[self.rank] = self

    def get_local_buffer_tensor(self, dtype: torch.dtype, *, use_rdma_buffer: bool) -> torch.Tensor:
        assert use_rdma_buffer
        assert dtype is torch.int64
        return self.words

    def connect_ranks(self, ranks: list[int], activate: bool) -> None:
        assert not activate
        self.calls.append(f"connect {ranks}")
        # as in 1.4.1: a peer is in the list before it is connected, and one that is in the list counts as connected
        new = [rank for rank in ranks if rank not in self.listed]
        self.listed.update(new)
        if new:
            self.fabric.hold_connect(self.rank, new)
        for rank in new:
            (raw,) = self.store.multi_get([f"NIXL_EP/{rank}"])
            self.peers[rank] = self.fabric.buffers[msgspec.msgpack.decode(raw)]
            self.mask[rank] = 1

    def disconnect_ranks(self, ranks: list[int]) -> None:
        self.calls.append(f"disconnect {ranks}")
        self.fabric.hold_disconnect(self.rank)
        for rank in ranks:
            self.listed.remove(rank)
            self.peers.pop(rank, None)
            self.mask[rank] = 1

    def update_mask_buffer(self, rank: int, mask: bool) -> None:
        assert rank != self.rank
        self.calls.append(f"mask {rank} {mask}")
        self.mask[rank] = int(mask)

    def query_mask_buffer(self, out: torch.Tensor) -> None:
        out.copy_(self.mask)

    def destroy(self) -> None:
        self.alive = False

    # --- kernels --------------------------------------------------------------------------------------------------

    def dispatch(self, x: torch.Tensor, topk: torch.Tensor, max_tokens: int, experts: int, *, use_fp8: bool) -> Any:
        layout, region, live = self._begin()
        sent: dict[int, list[list[int]]] = {peer: [[] for _ in range(layout.experts)] for peer in live}
        for row, chosen in enumerate(topk.tolist()):
            for expert in chosen:
                peer, index = divmod(expert, layout.experts) if expert >= 0 else (-1, 0)
                if peer in sent:
                    sent[peer][index].append(row)
        for peer in live:
            for index in range(layout.experts):
                to, rows = self.peers[peer], x[sent[peer][index]].clone()
                to.put(region, "dispatch", self.rank, index, rows, len(rows) + 1)
        received = torch.full((layout.experts, layout.capacity * max_tokens, x.shape[1]), float("nan"))
        counts = torch.zeros(layout.experts, dtype=torch.int32)
        came: list[list[tuple[int, int]]] = [[] for _ in range(layout.experts)]
        arrived = self._wait(region, live, layout.dispatch_word)
        for index in range(layout.experts):
            for peer in live:
                word = int(arrived.get((peer, index), 0))
                rows = self.rows.pop((region, "dispatch", peer, index), x[:0])[: max(0, word - 1)]
                at = int(counts[index])
                received[index, at : at + len(rows)] = rows
                counts[index] += len(rows)
                came[index].append((peer, len(rows)))
        return received, counts, (came, sent), None, None

    def combine(
        self, y: torch.Tensor, topk: torch.Tensor, weights: torch.Tensor, handle: Any, *, out: torch.Tensor
    ) -> None:
        (came, sent), (layout, region, live) = handle, self._begin()
        for index in range(layout.experts):
            at = 0
            for peer, count in came[index]:
                if peer in live:
                    self.peers[peer].put(region, "combine", self.rank, index, y[index, at : at + count].clone(), 1)
                at += count
        self._wait(region, live, layout.combine_word)
        out.zero_()
        back: dict[tuple[int, int, int], torch.Tensor] = {}
        for peer in live:
            for index in range(layout.experts):
                rows = self.rows.pop((region, "combine", peer, index), y[0, :0])
                for row, values in zip(sent.get(peer, [[]] * layout.experts)[index], rows, strict=False):
                    back[peer, index, row] = values
        for row, chosen in enumerate(topk.tolist()):
            for k, expert in enumerate(chosen):
                values = back.get((*divmod(expert, layout.experts), row)) if expert >= 0 else None
                if values is not None:
                    out[row] += weights[row, k] * values

    def put(self, region: int, kind: str, source: int, index: int, rows: torch.Tensor, word: int) -> None:
        """From the peer `source`: rows first, then the word."""
        self.rows[region, kind, source, index] = rows
        place = self.layout.dispatch_word if kind == "dispatch" else self.layout.combine_word
        self.words[region * self.layout.region + place(source, index)] = word

    def _begin(self) -> tuple[Layout, int, list[int]]:
        """The layout, the region of this call, and the live peers: the masks are read here and nowhere else."""
        region, self.turn = self.turn, 1 - self.turn
        following = self.turn * self.layout.region
        self.words[following : following + self.layout.region] = 0
        live = [peer for peer in sorted(self.peers) if int(self.mask[peer]) == 0]
        return self.layout, region, live

    def _wait(self, region: int, live: list[int], place: Callable[[int, int], int]) -> dict[tuple[int, int], int]:
        end, base = time.monotonic() + self.timeout_s, region * self.layout.region
        arrived: dict[tuple[int, int], int] = {}
        for peer in live:
            for index in range(self.layout.experts):
                at = base + place(peer, index)
                while not (word := int(self.words[at])):
                    if time.monotonic() > end:
                        self.mask[peer] = 1
                        break
                    time.sleep(0.0001)
                arrived[peer, index] = word
        return arrived


class Both:
    """Two or more ranks step at once, each in a thread of its own."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def run(self, *calls: Callable[[], None], deadline_s: float = 20.0) -> None:
        threads = [threading.Thread(target=self._guard, args=(call,), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadline_s)
            assert not thread.is_alive(), "a step does not return"
        if self.errors:
            raise self.errors[0]

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self.errors.append(error)
