"""What a rank remembers of its steps, and of what may have held them up."""

import gc
import time

import pytest

from elastic.rank import steplog
from elastic.rank.steplog import StepLog, WorkLog


def test_steps_are_given_in_order_and_only_those_after_the_moment() -> None:
    log = StepLog(8)
    for i in range(5):
        log.add(10.0 + i, 3 + i, 0.1, 0.2, 0.3, 0.4)
    found = log.since(0.0)
    assert [(step.end, step.epoch) for step in found] == [(10.0 + i, 3 + i) for i in range(5)]
    assert {(s.build_s, s.launch_s, s.wait_s, s.settle_s) for s in found} == {(0.1, 0.2, 0.3, 0.4)}
    assert [step.end for step in log.since(12.0)] == [13.0, 14.0]
    assert log.since(14.0) == ()


def test_a_full_log_keeps_the_newest_and_never_one_that_is_being_replaced() -> None:
    log = StepLog(4)
    for i in range(10):
        log.add(float(i), 1, 0.0, 0.0, 0.0, 0.0)
    assert [step.end for step in log.since(-1.0)] == [7.0, 8.0, 9.0]


def test_works_are_told_with_their_times_also_those_that_failed() -> None:
    log, began = WorkLog(), time.monotonic()
    with log.note("load"):
        pass
    with pytest.raises(RuntimeError, match="no answer"), log.note("connect"):
        raise RuntimeError("no answer")
    works = log.since(began)
    assert [work.what for work in works] == ["load", "connect"]
    assert all(began <= work.begin <= work.end for work in works)
    assert log.since(time.monotonic()) == ()


def test_a_long_collection_of_garbage_is_a_work(monkeypatch: pytest.MonkeyPatch) -> None:
    log, began = WorkLog(), time.monotonic()
    monkeypatch.setattr(steplog, "GC_S", -1.0)
    log.watch_garbage()
    try:
        gc.collect()
    finally:
        gc.callbacks.pop()
    assert "garbage of generation 2" in [work.what for work in log.since(began)]
