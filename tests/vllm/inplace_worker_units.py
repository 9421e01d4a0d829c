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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.distributed.eplb import async_worker, eplb_utils
from vllm.v1.worker import dp_utils
from vllm.v1.worker.gpu import dp_utils as dp_utils_v2
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from elastic.vllm import groups
from elastic.vllm.worker import dp_sync, experts, meeting, member
from elastic.vllm.worker.meeting import Meeting
from elastic.vllm.worker.slots import Slots


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    dp_sync.replace_sync(parallel_state, dp_utils)


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


def test_the_balancers_thread_makes_no_cuda_call_that_waits_while_a_step_waits_for_a_dead_rank() -> None:
    """A copy to pageable memory behind that step would keep the words from being written that free it."""
    reached, passed = threading.Event(), threading.Event()
    calls = list[str]()

    class Event:
        def query(self) -> bool:
            reached.set()
            return passed.is_set()

        def wait(self, stream: object) -> None:
            calls.append("wait")

    class Waiting(eplb_utils.CpuGpuEvent):
        pass

    experts.replace_waiting(Waiting)
    event = object.__new__(Waiting)
    event._event, event._recorded = Event(), threading.Event()
    event._recorded.set()
    thread = threading.Thread(target=event.wait, daemon=True)
    thread.start()
    assert reached.wait(10)
    assert calls == []
    passed.set()
    thread.join(10)
    assert calls == ["wait"]
    assert not event._recorded.is_set()


# --- the host copy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joins", [False, True])
def test_a_joiner_of_vllms_own_scaling_writes_no_dummies_into_the_host_copy(
    monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """It loads dummy weights and gets its experts from the others, so what it holds then must never be taken for an expert."""
    path = Path(f"/dev/shm/healer-test-dummies-{os.getpid()}")
    monkeypatch.setenv("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", str(int(joins)))
    monkeypatch.setenv(member.COPY_VARIABLE, str(path))
    own = object.__new__(experts.Experts)
    own.rank, own.rows, own.experts, own.copy = 0, 2, 2, None
    own.weights = [[torch.ones(2, 8)]]
    own.model_state = SimpleNamespace(physical_to_logical_map=torch.tensor([[0, 1]]))
    worker = object.__new__(member.Member)
    worker.joining, worker._experts = None, own
    worker.worker = SimpleNamespace(model_config=SimpleNamespace(compute_hash=lambda: "tiny"))
    try:
        worker.keep_copy()
        assert own.copy is not None
        assert own.copy.absent() == (2 if joins else 0)
        own.copy.close()
    finally:
        path.unlink(missing_ok=True)
