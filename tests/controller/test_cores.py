"""Who runs where, and that nobody is moved by mistake."""

import os
import threading

import pytest

from elastic.cores import FEWEST, confine, shares


@pytest.mark.parametrize(("cores", "slots"), [(32, 2), (32, 4), (128, 8), (16, 2), (24, 4)])
def test_no_two_ranks_and_no_controller_share_a_core(cores: int, slots: int) -> None:
    kept, parts = shares(range(cores), slots)
    assert len(parts) == slots
    assert kept
    every = [*kept, *(core for part in parts for core in part)]
    assert len(every) == len(set(every))
    assert set(every) <= set(range(cores))
    assert all(len(part) >= FEWEST for part in parts)


@pytest.mark.parametrize(("cores", "slots"), [(2, 2), (4, 4), (16, 8), (8, 2)])
def test_with_too_few_cores_everybody_may_run_anywhere(cores: int, slots: int) -> None:
    assert shares(range(cores), slots) == ((), ())


def test_cores_that_a_control_group_left_out_are_given_to_nobody() -> None:
    allowed = [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23]
    kept, parts = shares(allowed, 2)
    assert {*kept, *parts[0], *parts[1]} <= set(allowed)


def test_threads_that_run_already_are_moved_too() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    ready, done = threading.Event(), threading.Event()
    found: list[set[int]] = []

    def thread() -> None:
        ready.set()
        done.wait(10)
        found.append(os.sched_getaffinity(0))

    waiting = threading.Thread(target=thread)
    waiting.start()
    ready.wait(10)
    try:
        assert set(confine(one)) == one
        done.set()
        waiting.join()
        assert found == [one]
    finally:
        confine(before)


def test_cores_that_do_not_exist_are_refused_without_harm() -> None:
    before = os.sched_getaffinity(0)
    assert confine({100_000}) == ()
    assert os.sched_getaffinity(0) == before
