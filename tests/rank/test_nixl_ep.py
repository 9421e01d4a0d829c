"""The NIXL EP back end over a `nixl_ep` module without a GPU: real threads, real waits, the product's own code above it."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic.errors import ElasticError, Unreachable
from elastic.rank.comm import nixl_ep
from elastic.rank.comm.base import ABSENT, LIVE, MASKED
from elastic.rank.comm.nixl_ep import NixlEpBackend, refuse_shape
from elastic.rank.comm.nixl_signals import Signals, trial
from elastic.rank.device import CPU
from elastic.rank.fatal import ExchangeLost
from tests.rank.fake_nixl_ep import Both, Fabric, OtherLayout

HIDDEN, TOKENS, EXPERTS, TOP_K = 2048, 8, 3, 2
SOON_S = 5.0
"""Far below NIXL's timeout, far above a step."""


class Board:
    """The round board's connections."""

    def endpoint(self) -> bytes:
        return b"board"

    def connect(self, peer: int, raw: bytes, *, deadline_s: float) -> None:
        assert raw == b"board"

    def disconnect(self, peer: int) -> None: ...


class Group:
    """Ranks of one process; a step is two layers, each row weighted with its expert's number plus one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int, *, timeout_s: float = 30.0, **fabric: Any) -> None:
        self.fabric = Fabric(**fabric)
        monkeypatch.setattr(nixl_ep, "load_nixl_ep", lambda: self.fabric.module)
        self.capacity, self.timeout_s = max(4, ranks), timeout_s
        self.ranks = {rank: self.open(rank) for rank in range(ranks)}
        for rank in self.ranks:
            self.link(rank)
        self.commit(1)

    def open(self, rank: int) -> NixlEpBackend:
        backend = NixlEpBackend(
            CPU,
            Board(),
            rank=rank,
            capacity=self.capacity,
            experts_per_rank=EXPERTS,
            max_tokens=TOKENS,
            hidden=HIDDEN,
            top_k=TOP_K,
            timeout_s=self.timeout_s,
        )
        backend.self_test()
        return backend

    def link(self, rank: int) -> None:
        peers = {peer: other.endpoint() for peer, other in self.ranks.items() if peer != rank}
        self.ranks[rank].connect(peers, deadline_s=SOON_S)

    def commit(self, base: int) -> None:
        """All stand; words are zeroed on all before any goes on."""
        for backend in self.ranks.values():
            backend.clean(base)
        for backend in self.ranks.values():
            backend.take_over(self.ranks, base)

    def routes(self, seed: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed)
        live = torch.tensor(sorted(self.ranks))
        ranks = live[torch.randint(len(live), (TOKENS, TOP_K), generator=draw)]
        return ranks * EXPERTS + torch.randint(EXPERTS, (TOKENS, TOP_K), generator=draw)

    def step(self, rank: int, results: dict[int, torch.Tensor], layers: int = 2) -> Callable[[], None]:
        backend, topk = self.ranks[rank], self.routes(rank)
        x, weights = rows(rank), torch.full((TOKENS, TOP_K), 0.5)

        def run() -> None:
            backend.begin_step()
            out = x
            for _ in range(layers):
                received = backend.dispatch(out.contiguous(), topk)
                factor = 1.0 + rank * EXPERTS + torch.arange(EXPERTS)[:, None, None]
                result = torch.zeros(TOKENS, HIDDEN)
                backend.combine(received.x * factor, topk, weights, result)
                out = result
            backend.end_step()
            results[rank] = out

        return run

    def want(self, rank: int, layers: int = 2) -> torch.Tensor:
        factor = (0.5 * (1.0 + self.routes(rank))).sum(1, keepdim=True)
        return rows(rank) * factor**layers

    def all_step(self) -> None:
        results: dict[int, torch.Tensor] = {}
        Both().run(*(self.step(rank, results) for rank in self.ranks))
        for rank in self.ranks:
            torch.testing.assert_close(results[rank], self.want(rank))


def rows(rank: int) -> torch.Tensor:
    return torch.arange(TOKENS * HIDDEN, dtype=torch.float32).view(TOKENS, HIDDEN).remainder(7.0) + rank


def within(deadline_s: float, call: Callable[[], None]) -> float:
    """Run in a thread; the seconds it took."""
    began = time.monotonic()
    Both().run(call, deadline_s=deadline_s)
    return time.monotonic() - began


# --- layout -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "experts"), [(2, 8), (4, 3), (6, 5), (8, 1), (16, 9)])
def test_every_word_belongs_to_one_peer_and_regions_do_not_touch(capacity: int, experts: int) -> None:
    signals = Signals(capacity, experts)
    for words in (signals.dispatch_words, signals.combine_words):
        owned = [word for peer in range(capacity) for word in words(peer)]
        assert sorted(owned) == list(range(capacity * experts))
        assert {len(words(peer)) for peer in range(capacity)} == {experts}
    assert signals.region >= capacity * experts
    assert 8 * signals.region % 128 == 0
    assert 8 * signals.region - 8 * capacity * experts < 128
    assert signals.words == 2 * signals.region


def test_the_words_of_a_peer_are_where_the_kernels_of_nixl_ep_1_4_1_wait() -> None:
    """Capacity 2, 8 experts a rank, peer 1: seen on a GPU."""
    signals = Signals(2, 8)
    assert signals.region == 16
    assert list(signals.dispatch_words(1)) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert list(signals.combine_words(1)) == [8, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("experts", [1, 2, 5])
def test_the_trial_tells_experts_apart_and_fits_the_dispatch_limit(experts: int) -> None:
    wanted = trial(Signals(4, experts), rank=2, max_tokens=8)
    chosen = wanted.rows[wanted.rows >= 0]
    assert len(wanted.rows) <= 8
    assert chosen.min() >= 2 * experts
    assert chosen.max() < 3 * experts
    assert [int((chosen == 2 * experts + e).sum()) for e in range(experts)] == list(wanted.counts)
    assert len(set(wanted.counts[:2])) == min(2, experts)


# --- steps and releases -------------------------------------------------------------------------------------------------


def test_rows_come_back_from_their_experts_and_empty_slots_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, 3)
    assert all(backend.releases_early for backend in group.ranks.values())
    group.all_step()
    group.all_step()


@pytest.mark.parametrize("sent", [0, 1], ids=["dispatch", "combine"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_kernel_that_waits_for_a_dead_peer_is_freed_and_its_step_does_not_count(
    monkeypatch: pytest.MonkeyPatch, layers: int, sent: int
) -> None:
    """The peer dies before it has sent anything, or with its rows sent and the results of its experts owed."""
    group = Group(monkeypatch, 3)
    group.all_step()
    if sent:
        threading.Thread(target=lambda: group.ranks[1].dispatch(rows(1), group.routes(1)), daemon=True).start()
    survivors = [group.ranks[0], group.ranks[2]]
    before = [backend.mask_generation for backend in survivors]
    results: dict[int, torch.Tensor] = {}
    waiting = [threading.Thread(target=group.step(rank, results, layers), daemon=True) for rank in (0, 2)]
    for thread in waiting:
        thread.start()
    time.sleep(0.1)
    assert not results
    for backend in survivors:
        backend.release([1])
    for thread in waiting:
        thread.join(SOON_S)
        assert not thread.is_alive(), "the step still waits for the dead peer"
    assert all(b.mask_generation > generation for b, generation in zip(survivors, before, strict=True))
    assert [b.masks()[1] for b in survivors] == [MASKED, MASKED]
    # the same rows again after a commit: nothing of the discarded step is left
    del group.ranks[1]
    group.commit(2)
    group.all_step()


def test_a_word_of_a_released_step_is_never_taken_for_an_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replacement's first rows would be taken for none; only zeroed words make its first step right."""
    group = Group(monkeypatch, 2)
    results: dict[int, torch.Tensor] = {}
    thread = threading.Thread(target=group.step(0, results), daemon=True)
    thread.start()
    time.sleep(0.05)
    group.ranks[0].release([1])
    thread.join(SOON_S)
    assert not thread.is_alive()
    buffer = group.fabric.buffers[0]
    left = int(buffer.words[: group.ranks[0]._layout.words].sum())
    assert left > 0, "the test needs words that were written early"
    group.ranks[0].disconnect([1])
    assert group.ranks[0].masks()[1] == ABSENT
    group.ranks[1] = group.open(1)
    for rank in (0, 1):
        group.link(rank)
    # every rank zeroes its own before any goes on, whatever the other has already sent: the first of two barriers
    group.commit(2)
    assert int(buffer.words[: group.ranks[0]._layout.words].sum()) == 0
    group.all_step()
    group.all_step()


def test_with_another_layout_the_self_test_fails_and_the_timeout_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words written into the wrong places could complete somebody else's wait: nothing is written at all."""
    group = Group(monkeypatch, 2, timeout_s=0.5, layout=OtherLayout)
    assert not group.ranks[0].releases_early
    assert "early release is off" in capsys.readouterr().out
    group.all_step()
    buffer, results = group.fabric.buffers[0], dict[int, torch.Tensor]()
    thread = threading.Thread(target=group.step(0, results), daemon=True)
    thread.start()
    time.sleep(0.05)
    words = buffer.words.clone()
    group.ranks[0].release([1])
    time.sleep(0.05)
    assert torch.equal(buffer.words, words)
    thread.join(SOON_S)
    assert not thread.is_alive()
    del group.ranks[1]
    group.commit(2)
    group.all_step()


def test_a_peer_that_is_silent_beyond_the_timeout_is_masked_reported_and_the_step_discarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group(monkeypatch, 2, timeout_s=0.2)
    backend, results = group.ranks[0], dict[int, torch.Tensor]()
    before = backend.mask_generation
    assert within(SOON_S, group.step(0, results)) >= 0.2
    assert backend.mask_generation > before
    assert backend.masks() == (LIVE, MASKED, ABSENT, ABSENT)
    assert [(fault.peer, fault.what) for fault in backend.poll_faults()] == [(1, "timeout")]
    assert backend.poll_faults() == []


def test_a_release_between_two_steps_masks_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, 2)
    backend, buffer = group.ranks[0], group.fabric.buffers[0]
    backend.release([1])
    end = time.monotonic() + SOON_S
    while int(buffer.mask[1]) == 0:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert int(buffer.words.sum()) == 0
    within(SOON_S, group.step(0, {}))


# --- connections --------------------------------------------------------------------------------------------------------


def test_new_peers_stay_masked_and_a_new_incarnation_replaces_the_old(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, 2)
    generation = group.ranks[0].mask_generation
    group.ranks[2] = group.open(2)
    for rank in (0, 1, 2):
        group.link(rank)
    assert group.ranks[0].masks() == (LIVE, LIVE, MASKED, ABSENT)
    assert group.ranks[0].mask_generation == generation
    group.commit(2)
    group.all_step()
    group.ranks[2] = group.open(2)
    for rank in (0, 1, 2):
        group.link(rank)
    assert [c for c in group.fabric.buffers[0].calls if "connect" in c][-2:] == ["disconnect [2]", "connect [2]"]
    group.commit(3)
    group.all_step()


def test_a_connect_that_never_returns_is_given_up_at_its_deadline_and_the_next_one_finds_the_exchange_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group(monkeypatch, 2)
    held = threading.Event()
    group.ranks[2] = group.open(2)
    group.fabric.hold_connect = lambda rank, peers: held.wait(60.0) and None
    endpoint = group.ranks[2].endpoint()
    began = time.monotonic()
    with pytest.raises(Unreachable) as raised:
        group.ranks[0].connect({2: endpoint}, deadline_s=0.3)
    assert time.monotonic() - began < SOON_S
    assert raised.value.slots == (2,)
    # the present view goes on
    late = group.ranks.pop(2)
    group.all_step()
    with pytest.raises(ExchangeLost, match=r"connect to ranks \[2\] never came back"):
        group.ranks[0].connect({2: endpoint}, deadline_s=0.3)
    held.set()
    assert late.rank == 2


def test_a_connect_that_came_back_too_late_is_undone_and_the_next_one_is_real(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, 2)
    held = threading.Event()
    group.ranks[2] = group.open(2)
    group.fabric.hold_connect = lambda rank, peers: held.wait(60.0) and None
    with pytest.raises(Unreachable):
        group.ranks[0].connect({2: group.ranks[2].endpoint()}, deadline_s=0.1)
    held.set()
    for rank in (0, 1, 2):
        group.link(rank)
    assert [c for c in group.fabric.buffers[0].calls if "connect" in c][-3:] == [
        "connect [2]",
        "disconnect [2]",
        "connect [2]",
    ]
    group.commit(2)
    group.all_step()


def fails(*_: object) -> None:
    raise RuntimeError("Failed: Assertion error nixl_ep.cpp:1350 'prepMemView(remote_descs)'")


def test_a_connect_that_fails_leaves_nothing_behind_and_the_next_one_is_real(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, 2)
    group.ranks[2] = group.open(2)
    group.fabric.hold_connect = fails
    with pytest.raises(Unreachable, match="prepMemView") as raised:
        group.link(0)
    assert raised.value.slots == (2,)
    group.fabric.hold_connect = lambda rank, peers: None
    for rank in (0, 1, 2):
        group.link(rank)
    group.commit(2)
    group.all_step()


def test_an_exchange_that_can_neither_connect_nor_go_back_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, 2)
    group.ranks[2] = group.open(2)
    group.fabric.hold_connect = group.fabric.hold_disconnect = fails
    with pytest.raises(ExchangeLost, match=r"no known state after .*prepMemView"):
        group.link(0)


def test_an_exchange_that_fails_while_it_lets_go_of_a_peer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, 3)
    group.fabric.hold_disconnect = fails
    with pytest.raises(ExchangeLost, match=r"cannot disconnect ranks \[2\]"):
        group.ranks[0].disconnect([2])


def test_a_connect_that_was_overtaken_is_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, 2)
    held = threading.Event()
    group.ranks[2] = group.open(2)
    group.fabric.hold_connect = lambda rank, peers: held.wait(60.0) and None
    began = time.monotonic()
    with pytest.raises(Unreachable):
        group.ranks[0].connect({2: group.ranks[2].endpoint()}, deadline_s=60.0, give_up=lambda: True)
    assert time.monotonic() - began < SOON_S
    held.set()


FROZEN = """
import ctypes, threading, time
from elastic.lifeline import Lifeline
from elastic.rank.frozen import ends_within
print(Lifeline().path, flush=True)
def connect():
    ctypes.PyDLL(None).sleep(600)   # keeps Python's lock, as the real one does
with ends_within(0.5):
    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
"""


def test_a_connect_that_freezes_the_whole_process_ends_it_and_its_stack_is_in_the_log() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", FROZEN], capture_output=True, text=True, timeout=60)
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    assert "in connect" in done.stderr


def test_a_call_that_comes_back_in_time_ends_nothing() -> None:
    program = "import time\nfrom elastic.rank.frozen import ends_within\nwith ends_within(0.2): pass\ntime.sleep(0.5)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"capacity": 10}, "maxRanks 10 must be below 8 or a multiple of 8"),
        ({"hidden": 1000}, "hidden size 1000 is none of 2048"),
        ({"max_tokens": 3, "capacity": 3}, "maxTokens 3 x maxRanks 3 must be divisible by 4"),
        ({"top_k": 17}, "top-k 17 is above 16"),
    ],
)
def test_sizes_that_the_kernels_cannot_do_are_named(sizes: dict[str, int], words: str) -> None:
    fits = {"capacity": 4, "experts_per_rank": 8, "max_tokens": 32, "hidden": 7168, "top_k": 8}
    refuse_shape(**fits)
    with pytest.raises(ElasticError, match=words):
        refuse_shape(**(fits | sizes))


def test_ranks_take_a_view_over_one_after_the_other_and_the_first_joint_step_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No barrier: who comes to the round first begins it, and its rows wait where nobody zeroes them."""
    group = Group(monkeypatch, 2)
    group.all_step()
    group.ranks[2] = group.open(2)
    for rank in group.ranks:
        group.link(rank)
    group.ranks[2].clean(2)
    results: dict[int, torch.Tensor] = {}

    def late(rank: int, wait_s: float) -> Callable[[], None]:
        run = group.step(rank, results)

        def take_over_and_run() -> None:
            time.sleep(wait_s)
            group.ranks[rank].take_over(group.ranks, 2)
            run()

        return take_over_and_run

    Both().run(late(0, 0.0), late(1, 0.1), late(2, 0.05))
    for rank in group.ranks:
        torch.testing.assert_close(results[rank], group.want(rank))
    # and down again, the leaver takes part in nothing any more
    del group.ranks[2]
    results.clear()
    Both().run(late(0, 0.1), late(1, 0.0))
    for rank in group.ranks:
        torch.testing.assert_close(results[rank], group.want(rank))


def test_a_peer_that_is_released_after_the_view_was_taken_over_spoils_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, 2)
    generation = group.ranks[0].take_over([0, 1], 2)
    assert group.ranks[0].mask_generation == generation
    group.ranks[0].release([1])
    assert group.ranks[0].mask_generation > generation


def test_a_view_with_a_rank_that_is_not_connected_is_refused_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group(monkeypatch, 2)
    before = group.ranks[0].masks()
    with pytest.raises(ValueError, match=r"ranks \[3\] are not connected"):
        group.ranks[0].take_over([0, 3], 2)
    assert group.ranks[0].masks() == before
