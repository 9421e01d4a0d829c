"""The release of kernels that wait for a dead rank, also while a joiner is staged; run in vLLM's interpreter by
test_inplace_worker_units.py."""

# mypy: disable-error-code="import-not-found, import-untyped"
import os
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.vllm.worker import exchange
from elastic.vllm.worker.interface import send_release
from elastic.vllm.worker.release import Listener, WordWriter
from tests.vllm.inplace_exchange_fakes import (
    Published,
    StagingBuffer,
    install,
    made,
    manager,
)


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    install()


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
