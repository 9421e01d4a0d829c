"""NIXL EP's buffer and the store, replaced at their lowest layer, under vLLM's own manager."""

# mypy: disable-error-code="import-not-found, import-untyped"
import threading
from datetime import timedelta
from typing import Any

import torch
from vllm.distributed.device_communicators import all2all

from elastic.vllm.worker import exchange
from elastic.vllm.worker.manager import replace_manager

Manager = all2all.NixlEPAll2AllManager


def install() -> None:
    """Once a process."""
    replace_manager(Manager)
    if not torch.accelerator.is_available():
        torch.accelerator.synchronize = lambda *_: None


class Buffer:
    """NIXL EP's buffer as far as vLLM's manager uses it: which ranks are connected, and a mask (1 masked, -1 never met)."""

    def __init__(self, rank: int, capacity: int) -> None:
        self.rank, self.capacity = rank, capacity
        self.links: set[int] = set()
        self.mask = [-1] * capacity
        self.mask[rank] = 0
        self.memory = torch.zeros(64, dtype=torch.int64)
        self.store: Any = None
        self.calls: list[str] = []
        self.fails = False

    def set_tcp_store_group(self, store: Any) -> None:
        self.store = store

    def connect_ranks(self, ranks: list[int], activate: bool = True) -> None:
        if self.store is not None:
            self.store.multi_get([f"NIXL_EP/{rank}" for rank in ranks])
        for rank in ranks:
            if rank != self.rank:
                assert rank not in self.links, f"rank {rank} is connected already"
                self.links.add(rank)
                self.mask[rank] = 0 if activate else 1
        self.calls.append(f"connect {ranks} {activate}")
        if self.fails:
            raise RuntimeError("Failed: Assertion error nixl_ep.cpp:1350")

    def disconnect_ranks(self, ranks: list[int]) -> None:
        assert set(ranks) <= self.links
        self.links -= set(ranks)
        for rank in ranks:
            self.mask[rank] = 1
        self.calls.append(f"disconnect {ranks}")

    def update_mask_buffer(self, rank: int, mask: bool = False) -> None:
        assert rank != self.rank
        assert mask or rank in self.links, f"rank {rank} is not connected and cannot be unmasked"
        self.mask[rank] = int(mask)

    def clean_mask_buffer(self) -> None:
        self.mask = [0 if rank in self.links or rank == self.rank else 1 for rank in range(self.capacity)]
        self.calls.append("clean mask")

    def query_mask_buffer(self, found: torch.Tensor) -> None:
        found.copy_(torch.tensor(self.mask, dtype=torch.int32))

    def get_local_buffer_tensor(self, dtype: torch.dtype, use_rdma_buffer: bool = False) -> torch.Tensor:
        self.calls.append("zero")
        return self.memory.view(dtype)


class Published:
    """A store in which every address is there."""

    fails = False

    def check(self, keys: list[str]) -> bool:
        return True

    def set(self, key: str, value: bytes) -> None: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...

    def delete_key(self, key: str) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if self.fails:
            raise RuntimeError("Connection reset by peer")
        return [b"metadata"] * len(keys)


class StoreGroup:
    store = Published()


def made(rank: int, size: int, capacity: int, kind: type[Buffer] = Buffer) -> tuple[Any, Buffer]:
    """A manager of a full group whose buffer is made and connected."""
    buffer = kind(rank, capacity)
    buffer.connect_ranks([peer for peer in range(size) if peer != rank])
    Manager._buffer = all2all._NixlEPBufferState(
        buffer=buffer, max_num_ep_ranks=capacity, connected_ep_size=size, active_ep_size=size
    )
    Manager._mask, Manager._last_mask = torch.zeros(capacity, dtype=torch.int32), None  # vLLM makes it on CUDA
    exchange.exchange.__init__()  # type: ignore[misc]
    exchange.exchange.started(rank, range(size))
    return manager(rank, tuple(range(size)), size), buffer


def manager(rank: int, ranks: tuple[int, ...], size: int) -> Any:
    found = object.__new__(Manager)
    found.rank, found.world_size, found.tcp_store_group, found.healer_ranks = rank, size, StoreGroup(), ranks
    return found


class StagingBuffer(Buffer):
    """As NIXL EP 1.5.1: what changes the mask or cuts a link takes up staged views first, and waits for the device to do so."""

    def __init__(self, rank: int, capacity: int) -> None:
        super().__init__(rank, capacity)
        self.staged, self.idle, self.masked = False, threading.Event(), list[int]()
        self.idle.set()

    def _commit(self) -> None:
        if self.staged:
            assert self.idle.wait(3), "the device waits for a word of the thread that waits for the device"
            self.staged = False

    def connect_ranks(self, ranks: list[int], activate: bool = True) -> None:
        super().connect_ranks(ranks, activate)
        self.staged = True
        if activate:
            self._commit()

    def disconnect_ranks(self, ranks: list[int]) -> None:
        self._commit()
        super().disconnect_ranks(ranks)

    def update_mask_buffer(self, rank: int, mask: bool = False) -> None:
        self.masked += [rank] if mask else []
        self._commit()
        super().update_mask_buffer(rank, mask)

    def clean_mask_buffer(self) -> None:
        self._commit()
        super().clean_mask_buffer()
