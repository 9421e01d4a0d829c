"""The round loop takes a staged view over between two steps: when, in what order, and who is told."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from elastic.config import GroupConfig
from elastic.placement.maps import Placement
from elastic.protocol import Emitted, Rejected, Resumed, Sampling, Submit
from elastic.rank.engine import Engine
from elastic.rank.gate import Gate, Phase, Takeover
from elastic.rank.scheduler import Batch
from elastic.view import View

VOCAB, SOON_S = 8, 5.0
PLACEMENT = Placement(experts=1, capacity=2, slots_per_rank=1, rows=((0, 0),))
ALONE, BOTH = View(1, (0,), PLACEMENT.only((0,))), View(2, (0, 1), PLACEMENT)


class Rank:
    """An engine whose back end, board and model note what is asked of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.mask_generation = 0
        self.begun_: set[int] = set()
        self.told: list[Resumed] = []
        self.emitted: list[int] = []
        self.runs_behind = False
        self.vocab, self.graphs = VOCAB, SimpleNamespace(captures=0, replays=0, address_changes=0)
        self._rung = threading.Condition()
        self._rings = 0
        config = GroupConfig(name="g", run_dir="r", checkpoint="c", ranks=1, max_ranks=2, slots_per_rank=1)
        self.gate = Gate(self.ring)
        here: Any = self
        self.engine = Engine(config, 0, self.gate, here, here, here, emit=self.emit, tell=self.told.append)
        self.thread = threading.Thread(target=self.engine.run, daemon=True)

    # back end
    def take_over(self, live: Collection[int], base: int) -> int:
        self.calls.append(f"masks {sorted(live)} {base}")
        return self.mask_generation

    def begin_step(self) -> None: ...

    def end_step(self) -> None:
        self.calls.append("end")

    # model
    def stage_placement(self, placement: Placement, live: Collection[int]) -> None:
        self.calls.append("stage")

    def switch_placement(self) -> None:
        self.calls.append("map")

    def run(self, batch: Batch) -> None:
        self.calls.append("step")
        time.sleep(0.002)

    def choose(self, batch: Batch) -> list[int]:
        return [0] * len(batch.samples)

    # board
    def announce(self, round_: int, has_work: bool, peers: Collection[int]) -> None:
        if peers:
            self.calls.append(f"announce {round_}")

    def any_work(self, round_: int, peers: Collection[int]) -> bool:
        return False

    def begun(self, round_: int, peers: Collection[int]) -> bool:
        return round_ in self.begun_

    def ticket(self) -> int:
        return self._rings

    def wait(self, ticket: int, timeout_s: float) -> None:
        with self._rung:
            self._rung.wait_for(lambda: self._rings != ticket, timeout_s)

    def ring(self) -> None:
        with self._rung:
            self._rings += 1
            self._rung.notify_all()

    def emit(self, messages: Sequence[Emitted | Rejected]) -> None:
        self.calls.append("emit")
        self.emitted += [token for m in messages if isinstance(m, Emitted) for token in m.tokens]

    def ask(self, tokens: int) -> None:
        self.engine.inbox.append(
            Submit(
                request="r",
                attempt=0,
                tokens=(1,),
                prompt_len=1,
                max_tokens=tokens,
                sampling=Sampling(),
                stop_ids=(),
            )
        )
        self.ring()

    def switch(self, round_: int) -> "Outcome":
        outcome = Outcome(self)
        assert self.gate.take_over(Takeover(round_, self.engine.switch, outcome.done))
        return outcome


class Outcome:
    """As the agent answers."""

    def __init__(self, rank: Rank) -> None:
        self.applied: list[bool] = []
        self._rank = rank

    def done(self, applied: bool) -> None:
        if applied:
            self._rank.engine.when_launched(lambda: self._told(True))
        else:
            self._told(False)

    def _told(self, applied: bool) -> None:
        self._rank.calls.append("told")
        self.applied.append(applied)


@contextmanager
def serving() -> Iterator[Rank]:
    rank = Rank()
    rank.engine.take_view(ALONE, 1, 0)
    rank.gate.adopt(0)
    rank.gate.resume()
    rank.calls.clear()
    rank.thread.start()
    try:
        yield rank
    finally:
        rank.gate.leave()
        rank.thread.join(SOON_S)
        assert not rank.thread.is_alive()


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.001)


def test_a_busy_rank_wakes_the_joiner_then_changes_and_answers_when_its_step_is_on_its_way() -> None:
    with serving() as rank:
        rank.engine.stage(BOTH, 2, 7)
        rank.ask(tokens=100)
        until(lambda: rank.gate.round > 2)
        at = rank.gate.round + 20
        assert rank.gate.stop_at(at) is None
        outcome = rank.switch(at)
        until(lambda: rank.gate.round > at + 1)
        assert outcome.applied == [True]
        begin = rank.calls.index(f"announce {at}")
        assert rank.calls[begin : begin + 6] == [
            f"announce {at}",
            "masks [0, 1] 7",
            "map",
            f"announce {at}",
            "step",
            "told",
        ]
        assert rank.engine.view == BOTH
        assert {step.epoch for step in rank.engine.steps.since(0.0)} == {1, 2}


def test_an_idle_rank_changes_and_answers_though_there_is_no_step_to_launch() -> None:
    with serving() as rank:
        rank.engine.stage(BOTH, 2, 7)
        until(lambda: rank.gate.idle)
        assert rank.gate.stop_at(0) is None
        outcome = rank.switch(0)
        until(lambda: outcome.applied == [True])
        assert "step" not in rank.calls
        assert rank.engine.view == BOTH
        until(lambda: [t.epoch for t in rank.told if t.idle] == [1, 2])


def test_a_joiner_sleeps_until_a_peer_has_come_to_the_round() -> None:
    """Before that a peer may still run the round before, whose kernels would zero what it sends."""
    rank = Rank()
    rank.gate.phase = Phase.READY
    rank.engine.stage(BOTH, 2, 7)
    rank.thread.start()
    try:
        outcome = rank.switch(40)
        until(lambda: outcome.applied == [True])
        time.sleep(0.05)
        assert "step" not in rank.calls
        rank.begun_.add(40)
        rank.ring()
        until(lambda: "step" in rank.calls)
        assert rank.calls.index("announce 40") > rank.calls.index("masks [0, 1] 7")
    finally:
        rank.gate.leave()
        rank.thread.join(SOON_S)


def test_a_mask_that_changed_before_the_round_keeps_the_old_view_and_the_rank_stands() -> None:
    with serving() as rank:
        rank.engine.stage(BOTH, 2, 7)
        until(lambda: rank.gate.idle)
        rank.mask_generation += 1
        outcome = rank.switch(0)
        until(lambda: outcome.applied == [False])
        assert rank.engine.view == ALONE
        assert rank.gate.phase is Phase.PARKED
        assert "map" not in rank.calls


def test_where_a_step_runs_on_by_itself_the_tokens_of_the_last_one_go_out_while_it_does() -> None:
    with serving() as rank:
        rank.runs_behind = True
        rank.ask(tokens=3)
        until(lambda: len(rank.emitted) == 3)
        until(lambda: rank.gate.idle)
        steps = [call for call in rank.calls if call in ("step", "end", "emit")]
        assert steps[:6] == ["step", "end", "step", "emit", "end", "step"]
        assert steps.count("emit") == 3


def test_no_committed_token_waits_for_a_step_that_does_not_come() -> None:
    with serving() as rank:
        rank.runs_behind = True
        rank.ask(tokens=100)
        until(lambda: len(rank.emitted) > 3)
        parked: list[int] = []
        rank.gate.when_parked(lambda: parked.append(len(rank.emitted)))
        rank.gate.stop_at(rank.gate.round + 5)
        until(lambda: parked)
        assert parked == [rank.engine.tokens]
        rank.gate.resume()
        until(lambda: len(rank.emitted) > parked[0])
    assert len(rank.emitted) == rank.engine.tokens
