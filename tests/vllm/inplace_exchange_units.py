"""The exchange of the worker's side and the release of waiting kernels, against vLLM's own manager; run in vLLM's interpreter by
test_inplace_worker_units.py."""

# mypy: disable-error-code="import-not-found, import-untyped"
import os
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators import all2all

from elastic.vllm.worker import exchange
from elastic.vllm.worker.interface import send_release
from elastic.vllm.worker.manager import replace_manager
from elastic.vllm.worker.release import Listener, WordWriter

Manager = all2all.NixlEPAll2AllManager


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    replace_manager(Manager)
    if not torch.accelerator.is_available():
        torch.accelerator.synchronize = lambda *_: None


# --- the exchange ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("dead", [0, 1, 3])
def test_any_rank_can_be_dropped_and_its_loss_is_no_fault_of_later_steps(dead: int) -> None:
    rank = 2
    found, buffer = made(rank, 4, 8)
    buffer.mask[dead] = 1  # as the early release or a kernel's timeout does
    assert bool(found.query_fault())
    buffer.memory.fill_(7)
    exchange.exchange.drop([dead])
    assert not bool(found.query_fault())
    assert buffer.links == {0, 1, 3} - {dead}
    assert int(buffer.memory.abs().sum()) == 0
    order = [call.split()[0] for call in buffer.calls]
    assert order.index("disconnect") < order.index("zero") < order.index("clean")
    assert [buffer.mask[r] for r in range(4)] == [int(r == dead) for r in range(4)]
    other = next(r for r in (0, 1, 3) if r != dead)
    buffer.mask[other] = 1
    assert bool(found.query_fault()), "a second fault must be seen"


def test_a_rank_that_connects_for_a_refill_disturbs_no_step_until_it_is_switched_on() -> None:
    found, buffer = made(0, 3, 4)
    exchange.exchange.drop([1])
    joined = manager(0, (0, 1, 2), 3)
    joined.stage_ep_size()
    assert buffer.mask[1] == 1
    assert not bool(found.query_fault())
    assert not bool(joined.query_fault())
    joined.commit_ep_size()
    assert buffer.mask[:3] == [0, 0, 0]
    assert not bool(joined.query_fault())
    buffer.mask[1] = 1
    assert bool(joined.query_fault())


def test_a_refill_that_is_given_up_leaves_the_exchange_as_it_was() -> None:
    _, buffer = made(0, 3, 4)
    exchange.exchange.drop([1])
    before = (set(buffer.links), list(buffer.mask))
    manager(0, (0, 1, 2), 3).stage_ep_size()
    exchange.exchange.disconnect([1])
    exchange.exchange.disconnect([1])
    assert (set(buffer.links), list(buffer.mask)) == before


def test_a_connect_that_fails_leaves_the_exchange_as_it_was_and_the_next_one_connects() -> None:
    _, buffer = made(0, 3, 4)
    exchange.exchange.drop([1])
    before = (set(buffer.links), list(buffer.mask))
    buffer.fails = True
    with pytest.raises(RuntimeError, match="Assertion"):
        manager(0, (0, 1, 2), 3).stage_ep_size()
    assert (set(buffer.links), list(buffer.mask)) == before
    buffer.fails = False
    manager(0, (0, 1, 2), 3).stage_ep_size()
    assert buffer.links == {1, 2}


def test_a_store_that_fails_before_anybody_is_connected_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, buffer = made(0, 3, 4)
    exchange.exchange.drop([1])
    monkeypatch.setattr(Published, "fails", True)
    with pytest.raises(RuntimeError, match="reset by peer"):
        manager(0, (0, 1, 2), 3).stage_ep_size()
    assert buffer.links == {2}
    assert "disconnect [1]" not in buffer.calls[-1]


def test_a_death_while_a_joiner_is_connected_does_not_switch_the_joiner_on() -> None:
    _, buffer = made(0, 4, 4)
    exchange.exchange.drop([1])
    manager(0, (0, 1, 2, 3), 4).stage_ep_size()
    exchange.exchange.drop([3])
    assert buffer.mask == [0, 1, 0, 1]


def test_the_highest_live_rank_bounds_what_is_read_of_the_mask() -> None:
    found, _ = made(0, 4, 8)
    exchange.exchange.drop([2])
    assert found.query_active_mask().shape == (4,)
    exchange.exchange.drop([3])
    assert found.query_active_mask().shape == (2,)


def test_stock_scaling_up_and_down_connects_and_masks_as_vllm_does() -> None:
    _, buffer = made(0, 2, 4)
    larger = manager(0, (0, 1, 2, 3), 4)
    larger.stage_ep_size()
    assert buffer.calls[-1] == "connect [2, 3] False"
    larger.commit_ep_size()
    assert buffer.mask == [0, 0, 0, 0]
    assert Manager._buffer.active_ep_size == Manager._buffer.connected_ep_size == 4
    assert not bool(larger.query_fault())
    smaller = manager(0, (0, 1), 2)
    smaller.stage_ep_size()
    assert buffer.links == {1, 2, 3}
    smaller.commit_ep_size()
    assert buffer.links == {1}
    assert Manager._buffer.active_ep_size == Manager._buffer.connected_ep_size == 2
    assert not bool(smaller.query_fault())


def test_warming_up_masks_the_peers_that_are_there_and_no_others() -> None:
    found, buffer = made(2, 4, 4)
    exchange.exchange.drop([1])
    alone = manager(2, (0, 2, 3), 4)
    with alone.mask_remote_ranks():
        assert buffer.mask == [1, 1, 0, 1]
    assert buffer.mask == [0, 1, 0, 0]
    del found


# --- release -----------------------------------------------------------------------------------------------------------------


class Kernel:
    """A kernel that waits for the words of a dead rank, in a thread; and what was masked."""

    def __init__(self, dead: int) -> None:
        self.dead, self.words = dead, dict[int, int]()
        self.signed, self.masked, self.masks = False, list[int](), True
        self.returned = threading.Event()
        threading.Thread(target=self._spin, daemon=True).start()

    def _spin(self) -> None:
        while not self.words.get(self.dead):
            time.sleep(0.001)
        self.returned.set()

    def sign(self) -> None:
        self.signed = True

    def mask(self, rank: int) -> bool:
        if self.masks:
            self.masked.append(rank)
        return self.masks

    def write(self, ranks: Any) -> None:
        assert self.signed
        for rank in ranks:
            self.words[rank] = 1


class Side:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_a_word_of_the_engine_frees_a_kernel_while_the_main_thread_answers_nobody() -> None:
    kernel = Kernel(3)
    writer = WordWriter(kernel.sign, kernel.mask, kernel.write, Side)
    listener = Listener(os.getpid(), 0, lambda epoch, dead: writer.release(dead))
    try:
        assert send_release(os.getpid(), 1, 5, [3]) == 1
        assert kernel.returned.wait(10)
        writer.end()
        assert kernel.masked == [3]
        rounds = writer.written
        kernel.words.clear()
        time.sleep(0.05)
        assert writer.written == rounds, "a word written after the step's end would be taken for an arrival"
    finally:
        listener.close()


def test_a_rank_that_cannot_be_masked_yet_is_masked_as_soon_as_it_can() -> None:
    kernel = Kernel(3)
    kernel.masks = False
    writer = WordWriter(kernel.sign, kernel.mask, kernel.write, Side)
    writer.release([3])
    assert kernel.returned.wait(10)
    assert kernel.masked == []
    kernel.masks = True
    rounds = writer.written
    until(lambda: writer.written > rounds + 2)
    writer.end()
    assert kernel.masked == [3]


def test_who_waits_for_the_first_word_waits_for_it_and_not_much_longer() -> None:
    kernel, through = Kernel(3), threading.Event()

    def write(ranks: Any) -> None:
        through.wait(10)
        kernel.write(ranks)

    writer = WordWriter(kernel.sign, kernel.mask, write, Side)
    began = time.monotonic()
    writer.wait_for_words(10)
    assert time.monotonic() - began < 5, "nothing is being written"
    writer.release([3])
    writer.wait_for_words(0.05)
    assert writer.written == 0, "a word that cannot be written holds nobody up for long"
    through.set()
    writer.wait_for_words(10)
    assert writer.written > 0
    writer.end()


def until(reached: Any) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


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


class Steps:
    """The device of a rank whose step waits for words, and what a check of the step's result says when the first one is there."""

    def __init__(self, found: Any, buffer: StagingBuffer) -> None:
        self.found, self.buffer, self.freed = found, buffer, threading.Event()
        self.before_words = list[bool]()
        self.mask_at_words = list[list[int]]()
        exchange.exchange._writer = exchange.exchange._writer_of(buffer, self._write, Side)

    def begin(self) -> None:
        self.buffer.idle.clear()
        self.freed.clear()

    def _write(self, ranks: Any) -> None:
        if not self.freed.is_set():
            self.before_words.append(bool(self.found.query_fault()))
            self.mask_at_words.append(list(self.buffer.mask))
        self.buffer.idle.set()
        self.freed.set()

    def settle(self) -> None:
        assert self.freed.wait(2), "the step was not freed"
        exchange.exchange.settled()


def stepping(rank: int = 0, size: int = 4) -> tuple[Any, StagingBuffer, Steps]:
    found, buffer = made(rank, size, size, StagingBuffer)
    assert isinstance(buffer, StagingBuffer)
    return found, buffer, Steps(found, buffer)


def test_a_second_death_while_a_joiner_is_staged_is_released_at_once_and_its_step_is_thrown_away() -> None:
    found, buffer, steps = stepping()
    exchange.exchange.drop([1])
    manager(0, (0, 1, 2, 3), 4).stage_ep_size()
    assert not bool(found.query_fault())
    buffer.masked.clear()
    steps.begin()
    exchange.exchange.release([3])
    steps.settle()
    assert buffer.masked == [], "NIXL waits for the device before it masks"
    assert steps.before_words == [True], "a word without a sign: the step would be taken as right"
    assert bool(found.query_fault())
    exchange.exchange.drop([3])
    assert not bool(found.query_fault())
    assert buffer.mask == [0, 1, 0, 1]


def test_a_death_with_nothing_staged_is_masked_before_its_words_so_that_later_kernels_skip_it() -> None:
    found, buffer, steps = stepping()
    for dead in (3, 1):
        buffer.masked.clear()
        steps.begin()
        exchange.exchange.release([dead])
        steps.settle()
        assert buffer.masked == [dead]
        assert steps.mask_at_words[-1][dead] == 1
        assert steps.before_words[-1]
        exchange.exchange.drop([dead])
        assert not bool(found.query_fault())


@pytest.mark.parametrize("ended", ["commit", "given up", "shrink", "failed", "scaled down"])
def test_masks_are_set_again_when_nothing_is_staged_any_more(ended: str) -> None:
    _, buffer, steps = stepping()
    exchange.exchange.drop([1])
    joined = manager(0, (0, 1, 2, 3), 4)
    buffer.fails = ended == "failed"
    if buffer.fails:
        with pytest.raises(RuntimeError, match="Assertion"):
            joined.stage_ep_size()
    else:
        joined.stage_ep_size()
    if ended == "commit":
        joined.commit_ep_size()
    elif ended == "given up":
        exchange.exchange.disconnect([1])
    elif ended == "shrink":
        exchange.exchange.drop([])
    elif ended == "scaled down":
        manager(0, (0, 2, 3), 4).commit_ep_size()
    assert not buffer.staged
    buffer.masked.clear()
    steps.begin()
    exchange.exchange.release([3])
    steps.settle()
    assert buffer.masked == [3]


def test_a_refill_that_is_given_up_while_a_step_waits_for_the_dead_holds_up_no_release() -> None:
    """The order to give it up may come before the word of the death: nothing is released yet, and the step waits already."""
    _, buffer, steps = stepping()
    exchange.exchange.drop([1])
    manager(0, (0, 1, 2, 3), 4).stage_ep_size()
    exchange.exchange._step_stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=buffer.idle.is_set))
    steps.begin()
    giving_up = threading.Thread(target=exchange.exchange.disconnect, args=([1],))
    giving_up.start()
    giving_up.join(0.1)
    assert giving_up.is_alive()
    assert 1 in buffer.links
    exchange.exchange.release([3])
    steps.settle()
    exchange.exchange.drop([3])
    giving_up.join(10)
    assert not giving_up.is_alive()
    assert buffer.links == {2}
    assert buffer.mask == [0, 1, 0, 1]


def test_a_store_that_fails_stages_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, buffer, steps = stepping()
    exchange.exchange.drop([1])
    monkeypatch.setattr(Published, "fails", True)
    with pytest.raises(RuntimeError, match="reset by peer"):
        manager(0, (0, 1, 2, 3), 4).stage_ep_size()
    buffer.masked.clear()
    steps.begin()
    exchange.exchange.release([2])
    steps.settle()
    assert buffer.masked == [2]


def test_a_release_is_told_of_a_joiner_before_nixl_is() -> None:
    _, buffer, steps = stepping()
    exchange.exchange.drop([1])
    connect, buffer.masked = buffer.connect_ranks, []

    def connect_ranks(ranks: list[int], activate: bool = True) -> None:
        steps.begin()
        buffer.staged = True
        exchange.exchange.release([3])
        steps.settle()
        connect(ranks, activate)

    buffer.connect_ranks = connect_ranks  # type: ignore[method-assign]
    manager(0, (0, 1, 2, 3), 4).stage_ep_size()
    assert buffer.masked == []


@pytest.mark.parametrize("staged", [False, True])
def test_a_death_that_is_released_at_a_commit_is_a_fault_of_the_next_step(*, staged: bool) -> None:
    found, _, steps = stepping()
    exchange.exchange.drop([1])
    joined = manager(0, (0, 1, 2, 3), 4)
    if staged:
        joined.stage_ep_size()
    steps.begin()
    exchange.exchange.release([3])
    steps.settle()
    joined.commit_ep_size()
    assert bool(joined.query_fault())
    exchange.exchange.drop([3])
    assert not bool(found.query_fault())


def test_a_release_that_goes_on_while_an_earlier_death_is_cleaned_up_stays_a_fault() -> None:
    found, _, steps = stepping()
    steps.begin()
    exchange.exchange.release([3])
    assert steps.freed.wait(2)
    writer = exchange.exchange._writer
    assert writer is not None
    exchange.exchange.drop([1])
    rounds = writer.written
    until(lambda: writer.written > rounds + 1)
    assert bool(found.query_fault())
    exchange.exchange.settled()
    exchange.exchange.drop([3])
    assert not bool(found.query_fault())


def test_a_retry_with_every_rank_ends_a_release() -> None:
    found, buffer, steps = stepping()
    steps.begin()
    exchange.exchange.release([3])
    assert steps.freed.wait(2)
    assert bool(found.query_fault())
    found.clean_buffers()
    time.sleep(0.02)
    assert not bool(found.query_fault())
    assert buffer.mask == [0, 0, 0, 0]


def test_the_check_of_a_step_reads_no_value_from_the_device() -> None:
    found, _, _ = stepping()
    exchange.exchange._released = torch.zeros((), dtype=torch.bool, device="meta")  # reading its value raises
    fault = found.query_fault()
    assert (fault.device.type, fault.dtype, fault.shape) == ("meta", torch.bool, ())


def test_stale_and_damaged_words_are_ignored_and_the_next_one_is_heard() -> None:
    heard, done = list[tuple[int, list[int]]](), threading.Event()

    def on_dead(epoch: int, dead: list[int]) -> None:
        heard.append((epoch, dead))
        if epoch == 9:
            done.set()
        if epoch == 8:
            raise RuntimeError("whatever")

    listener = Listener(os.getpid(), 1, on_dead)
    try:
        from elastic.vllm.worker.interface import release_address

        send_release(os.getpid(), 2, 7, [1])
        send_release(os.getpid(), 2, 6, [2])
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as raw:
            raw.sendto(b"{]", release_address(os.getpid(), 1))
        send_release(os.getpid(), 2, 8, [1])
        send_release(os.getpid(), 2, 9, [1])
        assert done.wait(10)
        assert heard == [(7, [1]), (8, [1]), (9, [1])]
    finally:
        listener.close()
