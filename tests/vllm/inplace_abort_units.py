"""When communicators are aborted, and what is said of a step that stays; run in vLLM's interpreter by
test_inplace_worker_units.py."""

# mypy: disable-error-code="import-not-found, import-untyped"
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.vllm.worker import experts, meeting, member, refill
from elastic.vllm.worker.slots import Slots


def test_an_abort_that_blocks_holds_up_no_other() -> None:
    """vLLM's communicator of one group blocks while graphs live; the device may stand in a kernel of another group."""
    release, aborted = threading.Event(), threading.Event()
    blocking = SimpleNamespace(destroy=lambda: release.wait(60.0))
    silent = SimpleNamespace(abort=lambda: None)
    waited_for = SimpleNamespace(abort=aborted.set)
    thread = meeting.abort_device_groups(coordinator(silent, blocking), None, coordinator(waited_for, blocking))
    try:
        assert aborted.wait(30.0)
        assert thread.is_alive()
    finally:
        release.set()
    thread.join(30.0)
    assert not thread.is_alive()


def coordinator(backend: Any, pynccl: Any) -> Any:
    group = SimpleNamespace(_get_backend=lambda _: backend)
    return SimpleNamespace(device="cuda:0", device_group=group, device_communicator=SimpleNamespace(pynccl_comm=pynccl))


def test_a_communicator_is_aborted_once_however_often_its_group_is_given_up() -> None:
    """ncclCommAbort of the same communicator twice at once is undefined; two deaths at once, or a refill that is given up, ask for it."""
    release, aborts = threading.Event(), list[str]()

    def destroy() -> None:
        aborts.append("pynccl")
        release.wait(60.0)

    held = coordinator(SimpleNamespace(abort=lambda: aborts.append("group")), SimpleNamespace(destroy=destroy))
    later, held.device_group = held.device_group, None  # still being made
    threads = [meeting.abort_device_groups(held)]
    held.device_group = later
    threads += [meeting.abort_device_groups(held) for _ in range(3)]
    threads.append(meeting.retire((held,)))
    release.set()
    for thread in threads:
        thread.join(30.0)
    assert sorted(aborts) == ["group", "pynccl"]


class Released:
    """A worker whose step was released, and what became of it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order, self.aborted = list[str](), threading.Event()
        monkeypatch.setattr(meeting, "abort_device_groups", self._abort)
        monkeypatch.setattr(member.Member, "coordinators", lambda _: {})
        self.worker = object.__new__(member.Member)
        self.worker.epoch, self.worker.slot, self.worker.slots = 0, 0, Slots.full(3)
        self.worker.exchange = SimpleNamespace(
            release=lambda _: self.order.append("release"), words_first=lambda: self.order.append("words")
        )
        self.worker._epoch_lock, self.worker._ended = threading.Lock(), threading.Event()
        self.worker._looking = None

    def _abort(self, *_: object) -> None:
        self.order.append("abort")
        self.aborted.set()


def test_a_step_that_words_do_not_end_is_aborted_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort frees memory, before which CUDA lets nothing new begin: a word would come too late."""
    monkeypatch.setattr(member, "ABORT_AFTER_S", 0.05)
    found = Released(monkeypatch)
    try:
        found.worker._on_dead(1, [2])
        assert found.aborted.wait(10)
        # an order that never reached the worker leaves the step open: the next death must be looked after too
        assert found.worker._looking is not None
        monkeypatch.setattr(member, "STUCK_S", 0.0)
        found.worker._looking.join(10)
        monkeypatch.setattr(member, "STUCK_S", 600.0)
        found.worker._on_dead(2, [1])
        deadline = time.monotonic() + 10
        while found.order.count("abort") < 2:
            assert time.monotonic() < deadline, found.order
            time.sleep(0.01)
    finally:
        found.worker._ended.set()
    assert found.order[:3] == ["release", "words", "abort"]


@pytest.mark.parametrize("shrinks", [False, True])
def test_kernels_of_a_refill_that_is_given_up_are_ended_after_the_step(
    monkeypatch: pytest.MonkeyPatch, *, shrinks: bool
) -> None:
    """The step may wait for a rank that died meanwhile, for words that an abort would hold up."""
    order, ended, aborted = list[str](), threading.Event(), threading.Event()

    def steps_end(wanted: Any) -> None:
        while wanted() and not ended.wait(0.005):
            pass
        order.append("waited")

    def abort(*_: object) -> None:
        order.append("abort")
        aborted.set()

    monkeypatch.setattr(meeting, "abort_device_groups", abort)
    found = object.__new__(refill.Refill)
    found.member = SimpleNamespace(exchange=SimpleNamespace(steps_end=steps_end))
    found._lock, found._cancelled, found._aborted = threading.Lock(), threading.Event(), threading.Event()
    found._through, found._formation = False, SimpleNamespace(made=["a group"])
    found.abort()
    assert not aborted.wait(0.1)
    if shrinks:
        found.abort_kernels()
        assert order[0] == "abort"
        deadline = time.monotonic() + 10
        while order != ["abort", "waited", "abort"]:
            assert time.monotonic() < deadline, order
            time.sleep(0.01)
    else:
        ended.set()
        assert aborted.wait(10)
        assert order == ["waited", "abort"]


def test_a_step_that_stays_shows_where_each_thread_stands(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(member, "STUCK_S", 0.05)
    found, said = Released(monkeypatch), ""
    try:
        found.worker._on_dead(1, [2])
        deadline = time.monotonic() + 10
        while "test_a_step_that_stays" not in said:
            assert time.monotonic() < deadline, said
            said += capfd.readouterr().err
            time.sleep(0.01)
    finally:
        found.worker._ended.set()


@pytest.mark.parametrize("through", [False, True])
def test_a_sum_of_the_balancer_is_aborted_soon_and_one_that_is_through_is_not(
    monkeypatch: pytest.MonkeyPatch, *, through: bool
) -> None:
    monkeypatch.setattr(member, "ABORT_AFTER_S", 600.0)
    monkeypatch.setattr(torch, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: through))
    summed = list[str]()

    class State:
        def _allreduce_list(self, found: str) -> str:
            assert experts.reducing.pending
            summed.append(found)
            return found

    experts.replace_reduction(State)
    assert State()._allreduce_list("loads") == "loads"
    assert experts.reducing.pending is not through
    found = Released(monkeypatch)
    try:
        found.worker._on_dead(1, [2])
        assert found.aborted.wait(0.3 if through else 10) is not through
    finally:
        found.worker._ended.set()
        monkeypatch.setattr(experts.reducing, "_under_way", False)
