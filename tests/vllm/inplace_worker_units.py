"""Parts of the worker's side against vLLM's own functions, without a model; run in vLLM's interpreter by
test_inplace_worker_units.py."""

# mypy: disable-error-code="import-not-found, import-untyped"
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import all2all
from vllm.distributed.eplb import async_worker, eplb_utils
from vllm.v1.worker import dp_utils
from vllm.v1.worker.gpu import dp_utils as dp_utils_v2
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from elastic.vllm import groups
from elastic.vllm.worker import dp_sync, exchange, experts, meeting
from elastic.vllm.worker.interface import send_release
from elastic.vllm.worker.meeting import Meeting
from elastic.vllm.worker.release import Listener, WordWriter
from elastic.vllm.worker.slots import Slots

Manager = all2all.NixlEPAll2AllManager


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    dp_sync.replace_sync(parallel_state, dp_utils)
    exchange.replace_manager(Manager)
    if not torch.accelerator.is_available():
        torch.accelerator.synchronize = lambda *_: None


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


# --- the table of every step -------------------------------------------------------------------------------------------------


class Rank0:
    def rank(self) -> int:
        return 0


class Graphs:
    """Of vLLM's CUDA graph manager: one that has a graph for every size up to 32."""

    def dispatch(self, num_reqs: int, num_tokens: int, uniform: int | None, **_: Any) -> BatchExecutionDescriptor:
        size = 1 << max(0, num_tokens - 1).bit_length()
        return BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=size, num_reqs=size)


class Coordinator(parallel_state.GroupCoordinator):
    def __init__(self, others: list[tuple[int, int, int]]) -> None:
        """`others`: (slot, tokens, requests) of the ranks that this process plays."""
        self.others = others


def v2_step(slots: Slots, tokens: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own agreement of model runner V2 on slot 0, the other live slots' columns added as their sum would be."""

    def add(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        for slot in slots.live[1:]:
            tensor[:, slot] = torch.tensor([tokens[slot], CUDAGraphMode.FULL.value, 1, 1, 0, tokens[slot], 0])
        return tensor

    monkeypatch.setattr(parallel_state, "cpu_all_reduce_", add)
    coordinator = Coordinator([])
    coordinator.cpu_group = coordinator.cpu_timeout = None
    monkeypatch.setattr(dp_utils_v2, "get_dp_group", lambda: coordinator)
    dp_sync.table.set(slots)
    wanted = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=tokens[0], num_reqs=tokens[0])
    return dp_utils_v2.sync_cudagraph_and_dp_padding(
        Graphs(), wanted, tokens[0], tokens[0], 1, slots.size, 0, max_query_len=1
    )


def test_graphs_stay_in_use_while_a_slot_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor, state = v2_step(Slots(4, (0, 2, 3)), {0: 3, 2: 7, 3: 5}, monkeypatch)
    assert descriptor.cg_mode == CUDAGraphMode.FULL
    assert not state.eager
    assert state.uniform_token_count == 1
    assert descriptor.num_tokens == 8
    assert state.num_tokens_across_dp.tolist() == [8] * 4


def test_without_the_stand_in_all_survivors_would_run_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dp_sync.Table, "fill", lambda self, table: table)
    descriptor, state = v2_step(Slots(4, (0, 2, 3)), {0: 3, 2: 7, 3: 5}, monkeypatch)
    assert descriptor.cg_mode == CUDAGraphMode.NONE
    assert state.eager


def test_a_whole_group_agrees_as_stock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor, state = v2_step(Slots.full(3), {0: 3, 1: 2, 2: 4}, monkeypatch)
    assert (descriptor.cg_mode, descriptor.num_tokens) == (CUDAGraphMode.FULL, 4)
    assert state.num_reqs == 4


def test_model_runner_v1_keeps_its_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        data_parallel_size, data_parallel_rank, disable_nccl_for_dp_synchronization, num_ubatches = 3, 0, True, 2

    class Group:
        device, device_group, cpu_group = "cpu", None, None

    def add(tensor: torch.Tensor, group: Any = None) -> None:
        tensor[:, 2] = torch.tensor([5, 8, 0, 2])

    monkeypatch.setattr(dp_utils, "get_dp_group", Group)
    monkeypatch.setattr(dp_utils.dist, "all_reduce", add)
    dp_sync.table.set(Slots(3, (0, 2)))
    ubatch, tokens, mode = dp_utils._synchronize_dp_ranks(3, 4, False, 2, Config())
    assert (ubatch, tokens.tolist(), mode) == (False, [8, 8, 8], 2)


def test_a_step_after_the_group_was_left_is_an_error_and_not_a_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    dp_sync.table.left = True
    with pytest.raises(dp_sync.LeftGroup, match="waits for an order"):
        Coordinator([]).cpu_all_reduce_(torch.zeros(7, 2))
    dp_sync.table.set(Slots.full(2))


# --- groups ------------------------------------------------------------------------------------------------------------------

PEER = """
import os, sys, time, torch
from datetime import timedelta
import vllm.distributed.utils  # takes long, and nobody may wait for it in a rendezvous
from elastic.vllm.worker import meeting
rank, port, size, then = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
at = meeting.Meeting("127.0.0.1", port, "peers", 120.0)
class Coordinator:
    cpu_group = at.gloo("dp", rank, tuple(range(size)), time.monotonic() + 120.0)
    device_communicator = None
print("met", flush=True)
if then == "leave":
    sys.stdin.readline()
    meeting.leave(Coordinator)
    print("left", flush=True)
sys.stdin.readline()
"""


def peer(rank: int, port: int, size: int, then: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PEER, str(rank), str(port), str(size), then]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class Holder:
    cpu_group: Any = None
    device_communicator = None


def test_a_rank_that_leaves_frees_the_peer_that_waits_for_it(store: TCPStore) -> None:
    """A survivor that has failed must not keep another one waiting: stock vLLM's hangs for ever."""
    other = peer(1, store.port, 2, "leave")
    try:
        at = Meeting("127.0.0.1", store.port, "peers", 120.0)
        group = at.gloo("dp", 0, (0, 1), time.monotonic() + 120.0)
        assert other.stdin is not None
        threading.Timer(0.3, lambda: (other.stdin.write(b"\n"), other.stdin.flush())).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="Connection closed"):
            group.recv([torch.zeros(2)], 1, 5).wait(timedelta(seconds=30))
        assert time.monotonic() - began < 10
    finally:
        other.kill()
        other.wait(10)


def test_a_group_that_was_left_is_closed_although_the_error_of_its_step_is_still_held(store: TCPStore) -> None:
    """The frames of the error name the group: as long as they live its sockets stay open and the peers wait."""
    middle, last = peer(1, store.port, 3, "stay"), peer(2, store.port, 3, "stay")
    try:
        at, holder = Meeting("127.0.0.1", store.port, "peers", 120.0), Holder()
        holder.cpu_group = at.gloo("dp", 0, (0, 1, 2), time.monotonic() + 120.0)
        dp_sync.table.set(Slots.full(3))
        dp_sync.table.on_fault = lambda: meeting.leave(holder)

        def step() -> None:
            work = holder.cpu_group.recv([torch.zeros(2)], 2, 5)
            work.wait(timedelta(seconds=30))

        threading.Timer(0.3, last.kill).start()
        with pytest.raises(RuntimeError, match="data-parallel sync failed") as kept:
            dp_sync._synced(step)
        assert holder.cpu_group.size() == 1
        sockets = [fd for fd in os.listdir("/proc/self/fd") if _is_gloo(fd, store.port)]
        assert kept.value is not None
        assert sockets == []
    finally:
        dp_sync.table.on_fault = None
        dp_sync.table.set(Slots.full(3))
        for process in (middle, last):
            process.kill()
            process.wait(10)


def _is_gloo(descriptor: str, store_port: int) -> bool:
    """An established TCP connection of this process that is not one to the store."""
    try:
        found = socket.fromfd(int(descriptor), socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return False
    with found:
        try:
            return found.family == socket.AF_INET and store_port not in (found.getpeername()[1], found.getsockname()[1])
        except OSError:
            return False


def test_members_that_do_not_come_are_named_and_nobody_waits_longer_than_told(store: TCPStore) -> None:
    at, began = Meeting("127.0.0.1", store.port, "short", 1.0), time.monotonic()
    with pytest.raises(groups.NotMet, match=r"slots \[4, 9\] did not come"):
        at.gloo("dp", 2, (2, 4, 9), time.monotonic() + 1.0)
    assert time.monotonic() - began < 10


def test_a_group_that_was_left_is_a_group_of_one_and_may_be_left_again() -> None:
    holder = Holder()
    for _ in range(2):
        meeting.leave(holder, None)
        assert holder.cpu_group.size() == 1


# --- the balancer ------------------------------------------------------------------------------------------------------------


def test_the_balancers_thread_ends_without_a_word_that_would_be_taken_for_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(async_worker.logger, "exception", lambda text, *_: said.append(text))
    monkeypatch.setattr(async_worker, "get_eplb_group", lambda: SimpleNamespace(device_group=Rank0()))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: "cpu")
    monkeypatch.setattr(torch, "Stream", lambda **_: None)
    event = object.__new__(eplb_utils.CpuGpuEvent)
    event._event, event._recorded = None, threading.Event()
    config = SimpleNamespace(eplb_config=SimpleNamespace(use_async=True))
    state = SimpleNamespace(device_index=0, is_async=True, rearrange_event=event, parallel_config=config)
    state.async_worker = async_worker.start_async_worker(state)
    found = object.__new__(experts.Experts)
    found.state, found._runner = state, SimpleNamespace(eep_eplb_suppressed=False)
    found.model_state = SimpleNamespace(rebalanced=True, pending_result=None)
    assert found.may_balance is False
    assert found.stop_balancing()
    assert found._runner.eep_eplb_suppressed
    assert found.may_balance
    assert (state.async_worker, said) == (None, [])


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


def made(rank: int, size: int, capacity: int) -> tuple[Any, Buffer]:
    """A manager of a full group whose buffer is made and connected."""
    buffer = Buffer(rank, capacity)
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
        self.dead, self.masked, self.words = dead, list[int](), dict[int, int]()
        self.returned = threading.Event()
        threading.Thread(target=self._spin, daemon=True).start()

    def _spin(self) -> None:
        while not self.words.get(self.dead):
            time.sleep(0.001)
        self.returned.set()

    def write(self, ranks: Any) -> None:
        for rank in ranks:
            self.words[rank] = 1


class Side:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_a_word_of_the_engine_frees_a_kernel_while_the_main_thread_answers_nobody() -> None:
    kernel = Kernel(3)
    writer = WordWriter(kernel.masked.append, kernel.write, Side)
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
