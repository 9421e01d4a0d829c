"""The boundary between two rounds: who stops there, who takes another view over there, and who is told."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic.rank.gate import Gate, Order, Phase, Takeover

SOON_S = 5.0


class Loop:
    """Runs rounds as the engine does, one each time that it is let."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.ran: list[int] = []
        self._may = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self.gate.next() is not Order.EXIT:
            self._may.acquire()
            if self.gate.enter():
                self.ran.append(self.gate.round)
                self.gate.committed()

    def run(self, rounds: int) -> None:
        wanted = len(self.ran) + rounds
        for _ in range(rounds):
            self._may.release()
        until(lambda: len(self.ran) == wanted)

    def end(self) -> None:
        self.gate.leave()
        self._may.release()
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.001)


@contextmanager
def serving(round_: int = 5) -> Iterator[tuple[Gate, Loop]]:
    gate = Gate(lambda: None)
    gate.adopt(round_)
    gate.resume()
    loop = Loop(gate)
    try:
        yield gate, loop
    finally:
        loop.end()


class Change:
    """A takeover, and what became of it."""

    def __init__(self, round_: int, applies: bool = True) -> None:
        self.applied: list[int] = []
        self.outcomes: list[bool] = []
        self.order = Takeover(round_, lambda at: self.applied.append(at) is None and applies, self.outcomes.append)


def test_a_loop_that_is_told_in_time_takes_over_at_the_round_and_never_stands() -> None:
    with serving() as (gate, loop):
        order = Change(7)
        assert gate.stop_at(7) is None
        assert gate.take_over(order.order)
        loop.run(4)
        assert loop.ran == [5, 6, 7, 8]
        assert (order.applied, order.outcomes) == ([7], [True])
        assert gate.phase is Phase.SERVING


def test_a_loop_that_stands_before_the_round_already_takes_over_and_runs_on() -> None:
    with serving() as (gate, loop):
        order = Change(6)
        assert gate.stop_at(6) is None
        loop.run(1)
        until(lambda: gate.phase is Phase.PARKED)
        assert gate.take_over(order.order)
        loop.run(2)
        assert loop.ran == [5, 6, 7]
        assert order.outcomes == [True]


def test_without_the_second_order_everybody_stands_and_may_be_told_to_run_on() -> None:
    with serving() as (gate, loop):
        assert gate.stop_at(6) is None
        loop.run(1)
        until(lambda: gate.phase is Phase.PARKED)
        gate.resume()
        loop.run(1)
        assert loop.ran == [5, 6]


def test_a_change_that_is_given_up_before_its_round_stops_nobody() -> None:
    with serving() as (gate, loop):
        assert gate.stop_at(7) is None
        gate.resume()
        loop.run(4)
        assert loop.ran == [5, 6, 7, 8]


def test_a_joiner_begins_with_the_round_of_the_others() -> None:
    gate = Gate(lambda: None)
    gate.phase = Phase.READY
    loop, order = Loop(gate), Change(42)
    try:
        assert gate.take_over(order.order)
        loop.run(2)
        assert loop.ran == [42, 43]
        assert order.outcomes == [True]
    finally:
        loop.end()


def test_a_loss_before_the_round_takes_the_order_back() -> None:
    with serving() as (gate, loop):
        order, parked = Change(7), threading.Event()
        assert gate.take_over(order.order)
        gate.halt()
        assert order.outcomes == [False]
        gate.when_parked(parked.set)
        loop._may.release()
        assert parked.wait(SOON_S)
        assert (loop.ran, order.applied) == ([], [])


def test_a_round_that_has_passed_or_a_loop_that_was_halted_cannot_take_over() -> None:
    with serving() as (gate, loop):
        loop.run(2)
        late = Change(6)
        assert not gate.take_over(late.order)
        gate.halt()
        assert not gate.take_over(Change(8).order)
        assert late.outcomes == []


def test_a_loop_that_cannot_take_the_view_over_stands_and_says_so() -> None:
    with serving() as (gate, loop):
        order = Change(6, applies=False)
        assert gate.take_over(order.order)
        loop.run(1)
        until(lambda: order.outcomes == [False])
        assert gate.phase is Phase.PARKED
        assert loop.ran == [5]


def test_who_asks_whether_a_standing_loop_stands_is_told_at_once() -> None:
    gate, told = Gate(lambda: None), []
    gate.phase = Phase.READY
    gate.when_parked(lambda: told.append(True))
    assert told == [True]
