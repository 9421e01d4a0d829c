"""The EP backend between real processes, over both transports: right results, and no wait that a dead peer can hold."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from elastic.rank.comm.base import ABSENT, LIVE, MASKED
from tests.rank.comm_group import Group, RemoteError, Shape, a_group

NEVER_S = 600.0
"""A timeout of the backend that no test lives to see."""

both = pytest.mark.parametrize("name", ["shm", "nixl"])


def until(what: str, condition: Callable[[], bool], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s} s: {what}"
        time.sleep(0.01)


def waits_for(group: Group, rank: int, *peers: int) -> None:
    until(f"rank {rank} waits for {peers}", lambda: group.peers[rank].call("ep", "waiting_on") == peers)


def masks(group: Group, rank: int) -> tuple[int, ...]:
    found: tuple[int, ...] = group.peers[rank].call("ep", "masks")
    return found


@both
def test_every_row_comes_back_from_its_experts(name: str) -> None:
    with a_group(name, Shape()) as group:
        group.form(range(4))
        group.check_steps(0, 20, range(4))


def test_empty_slots_between_live_ones_change_nothing() -> None:
    with a_group("shm", Shape(capacity=7, experts_per_rank=3, hidden=2, top_k=5)) as group:
        group.form((0, 3, 6))
        assert masks(group, 3) == (LIVE, ABSENT, ABSENT, LIVE, ABSENT, ABSENT, LIVE)
        group.check_steps(0, 20, (0, 3, 6))


@pytest.mark.parametrize(("name", "how"), [("shm", signal.SIGKILL), ("shm", signal.SIGSTOP), ("nixl", signal.SIGSTOP)])
def test_release_frees_survivors_that_wait_for_a_dead_or_hanging_rank(name: str, how: signal.Signals) -> None:
    with a_group(name, Shape(timeout_s=NEVER_S)) as group:
        group.form(range(3))
        group.check_steps(0, 3, range(3))
        os.kill(group.peers[1].pid, how)
        group.begin((0, 2), "steps", 3, 1, (0, 2))
        waits_for(group, 0, 1)
        waits_for(group, 2, 1)
        for rank in (0, 2):
            group.peers[rank].call("ep", "release", [1])
        for found in group.finish((0, 2)).values():
            assert "step 3: the masks changed" in found
        for rank in (0, 2):
            assert masks(group, rank)[1] == MASKED
            group.peers[rank].begin("ep", "disconnect", [1])
            group.peers[rank].finish()
        group.commit((0, 2), base=1000)
        group.check_steps(3, 10, (0, 2))


@both
def test_a_hanging_rank_is_masked_after_the_timeout_though_nobody_says_so(name: str) -> None:
    with a_group(name, Shape(timeout_s=0.3)) as group:
        group.form(range(3))
        os.kill(group.peers[0].pid, signal.SIGSTOP)
        group.begin((1, 2), "steps", 0, 1, (1, 2))
        for rank, found in group.finish((1, 2)).items():
            assert "step 0: the masks changed" in found
            assert masks(group, rank)[0] == MASKED
            assert (0, "timeout") in [tuple(fault) for fault in group.peers[rank].call("ep", "poll_faults")]
        group.commit((1, 2), base=1000)
        for rank in (1, 2):
            group.peers[rank].begin("ep", "disconnect", [0])
            group.peers[rank].finish()
        group.check_steps(1, 5, (1, 2))


def test_nixl_reports_a_killed_rank_by_itself() -> None:
    with a_group("nixl", Shape(timeout_s=NEVER_S)) as group:
        group.form(range(2))
        group.check_steps(0, 2, range(2))
        os.kill(group.peers[1].pid, signal.SIGKILL)
        group.begin((0,), "steps", 2, 1, (0,))
        group.finish((0,))
        assert masks(group, 0) == (LIVE, MASKED, ABSENT, ABSENT)
        assert [tuple(fault) for fault in group.peers[0].call("ep", "poll_faults")] == [(1, "disconnect")]


@both
def test_a_replacement_connects_while_the_others_step_and_then_takes_part(name: str) -> None:
    with a_group(name, Shape(timeout_s=NEVER_S)) as group:
        group.form(range(3))
        group.check_steps(0, 3, range(3))
        group.peers[0].end()
        for rank in (1, 2):
            group.peers[rank].begin("ep", "disconnect", [0])
            group.peers[rank].finish()
        group.commit((1, 2), base=1000)

        group.begin((1, 2), "steps", 3, 400, (1, 2))
        group.launch(0)
        group.check_steps(0, 3, (0,))
        for rank in range(3):
            group.connect(rank, range(3))
            group.connect(rank, range(3))
        assert {rank: masks(group, rank) for rank in range(3)} == {
            0: (LIVE, MASKED, MASKED, ABSENT),
            1: (MASKED, LIVE, LIVE, ABSENT),
            2: (MASKED, LIVE, LIVE, ABSENT),
        }
        assert group.finish((1, 2)) == {1: [], 2: []}

        group.commit(range(3), base=2000)
        group.check_steps(403, 10, range(3))
        assert all(len(group.peers[rank].call("runner", "addresses")) == 2 for rank in range(3))


@both
def test_masks_that_only_one_side_set_cost_tokens_but_hold_nobody_up(name: str) -> None:
    with a_group(name, Shape(timeout_s=0.3)) as group:
        group.form(range(3))
        group.peers[0].begin("ep", "release", [1])
        group.peers[0].finish()
        group.begin((0,), "steps", 0, 1, (0, 2))
        group.begin((2,), "steps", 0, 1, range(3))
        group.begin((1,), "steps", 0, 1, (1, 2))
        found = group.finish(range(3))
        assert found[0] == []
        assert "step 0: the masks changed" in found[1]
        assert masks(group, 0)[:3] == (LIVE, MASKED, LIVE)
        assert masks(group, 1)[0] == MASKED
        group.commit(range(3), base=1000)
        group.check_steps(1, 5, range(3))


@both
def test_words_of_a_discarded_step_are_never_taken_for_arrivals(name: str) -> None:
    with a_group(name, Shape(timeout_s=NEVER_S)) as group:
        group.form(range(2))
        group.check_steps(0, 4, range(2))
        group.peers[1].begin("runner", "commit", range(2), 1000)
        group.peers[1].finish()
        # rank 0 still runs a step of the old numbering: its words reach rank 1 after rank 1 has cleaned
        group.begin((0,), "steps", 4, 1, range(2))
        waits_for(group, 0, 1)
        group.peers[0].call("ep", "release", [1])
        group.peers[0].finish()
        group.peers[0].begin("runner", "commit", range(2), 1000)
        group.peers[0].finish()

        group.begin((1,), "steps", 5, 1, range(2))
        waits_for(group, 1, 0)
        group.begin((0,), "steps", 5, 1, range(2))
        assert group.finish(range(2)) == {0: [], 1: []}
        with pytest.raises(RemoteError, match="ValueError: base 1000 is below"):
            group.commit((0,), base=1000)


@pytest.fixture(scope="module", params=["shm", "nixl"])
def idle_pair(request: pytest.FixtureRequest) -> Iterator[Group]:
    with a_group(request.param, Shape()) as group:
        group.form(range(3))
        yield group


def test_idle_ranks_sleep_until_one_has_work_and_all_agree_on_it(idle_pair: Group) -> None:
    group = idle_pair
    for round_, busy in enumerate([(False, False, False), (False, True, False), (False, False, False)], start=7):
        group.begin((0, 2), "idle_until_begun", round_, range(3), 60.0)
        for rank in (1, 0, 2):
            others = [peer for peer in range(3) if peer != rank]
            if rank != 1:
                assert group.peers[rank].finish() is True
            group.peers[rank].begin("board", "announce", round_, busy[rank], others)
            group.peers[rank].finish()
        # the announcement travels before the first dispatch of its round, so a complete round has all of them
        group.check_steps(round_, 1, range(3))
        agreed = {rank: group.peers[rank].call("runner", "group_has_work", round_, busy[rank]) for rank in range(3)}
        assert agreed == {rank: any(busy) for rank in range(3)}


def test_ring_ends_the_sleep_of_the_own_loop(idle_pair: Group) -> None:
    peer = idle_pair.peers[0]
    peer.begin("runner", "sleep_once", 60.0)
    until("the loop sleeps", lambda: peer.call("runner", "asleep"))
    peer.call("board", "ring")
    peer.finish(within_s=20.0)


def test_a_commit_forgets_what_was_announced_before_it(idle_pair: Group) -> None:
    peers = idle_pair.peers
    peers[1].begin("board", "announce", 40, True, [0, 2])
    peers[1].finish()
    until("rank 0 sees it", lambda: peers[0].call("board", "begun", 40, [1]))
    idle_pair.commit(range(3), base=5000)
    assert not peers[0].call("board", "begun", 40, [1, 2])


@both
def test_mistakes_are_refused_by_name(name: str) -> None:
    with a_group(name, Shape()) as group:
        first = group.launch(0)
        with pytest.raises(RemoteError, match=r"ValueError: ranks \[1\] are not connected"):
            first.call("ep", "take_over", [0, 1], 1)
        with pytest.raises(RemoteError, match="ElasticError: rank 2: its endpoint is none of the"):
            first.call("ep", "connect", {2: b"\x01"}, deadline_s=5.0)
        second = group.launch(1)
        end = second.call("ep", "endpoint")
        second.end()
        with pytest.raises(RemoteError, match=r"Unreachable: rank 1: cannot"):
            first.call("ep", "connect", {1: end}, deadline_s=1.0)
        with pytest.raises(RemoteError, match="ValueError: topk_idx names the same expert twice"):
            first.call("runner", "route", [[3, 3]])
        with pytest.raises(RemoteError, match=r"ValueError: topk_idx is outside -1\.\.15"):
            first.call("runner", "route", [[3, 16]])
        assert masks(group, 0) == (LIVE, ABSENT, ABSENT, ABSENT)
        group.check_steps(0, 2, (0,))


def test_killed_ranks_leave_nothing_in_shared_memory() -> None:
    before = set(os.listdir("/dev/shm"))
    with a_group("shm", Shape()) as group:
        group.form(range(2))
        group.check_steps(0, 1, range(2))
    assert {entry for entry in set(os.listdir("/dev/shm")) - before if "-ep-" in entry} == set()
