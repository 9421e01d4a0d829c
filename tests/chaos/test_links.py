"""Links that fail on purpose: what reaches a peer, and when, under the rules that a scenario sets."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic.errors import ElasticError
from elastic.rank import faults
from elastic.rank.comm.links import FaultyTransport, Links
from elastic.rank.comm.shm import ShmTransport
from elastic.rank.comm.transport import BOARD_EVEN, COMBINE, DISPATCH, Layout

LAYOUT = Layout(capacity=3, experts_per_rank=1, max_tokens=2, hidden=4, top_k=1)


class Wire:
    """Rank 0 behind faulty links, and rank 1, whose memory shows what came."""

    def __init__(self) -> None:
        self.links = Links()
        self.here, self.there = ShmTransport(0, LAYOUT, "g"), ShmTransport(1, LAYOUT, "g")
        self.faulty = FaultyTransport(self.here, self.links)
        self.faulty.connect(1, self.there.endpoint(), deadline_s=5.0)

    def post(self, channel: int, word: int) -> int:
        """What stands at the peer right afterwards."""
        self.faulty.post(1, channel, word)
        return int(self.there.inbox.words[channel, 0])

    def order(self, text: str) -> None:
        name, *values = text.split()
        place = faults.Place(lambda: torch.device("cpu"), lambda: None, self.links)  # type: ignore[arg-type,return-value]
        faults.commit(place, name, [float(v) for v in values])


@pytest.fixture
def wire() -> Any:
    made = Wire()
    yield made
    made.here.close()
    made.there.close()


def until(check: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not check():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_without_a_rule_everything_arrives_at_once(wire: Wire) -> None:
    assert [wire.post(channel, 7) for channel in (DISPATCH, COMBINE, BOARD_EVEN)] == [7, 7, 7]


def test_over_a_lost_link_nothing_arrives_and_after_a_restore_all_does(wire: Wire) -> None:
    wire.order("link-lost 1")
    assert [wire.post(channel, 7) for channel in (DISPATCH, COMBINE, BOARD_EVEN)] == [0, 0, 0]
    wire.order("restore")
    assert wire.post(DISPATCH, 8) == 8


def test_just_as_many_completions_are_swallowed_as_were_ordered(wire: Wire) -> None:
    wire.order("completion-drop 1 2")
    assert [wire.post(DISPATCH, 1), wire.post(COMBINE, 1), wire.post(DISPATCH, 2)] == [0, 0, 2]


def test_a_late_completion_comes_late_and_does_not_hold_up_its_sender(wire: Wire) -> None:
    wire.order("completion-late 1 1")
    began = time.monotonic()
    assert wire.post(DISPATCH, 3) == 0
    assert time.monotonic() - began < 1.0
    until(lambda: wire.there.inbox.words[DISPATCH, 0] == 3)
    assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize("order", ["link-delay 1 0.05", "slow 0.05"])
def test_a_slow_link_and_a_slow_rank_hold_up_their_sender(wire: Wire, order: str) -> None:
    wire.order(order)
    began = time.monotonic()
    assert wire.post(DISPATCH, 4) == 4
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize("order", ["dance", "link-lost", "link-lost 1 2", "slow", "stuck 1"])
def test_an_order_that_makes_no_sense_is_refused(wire: Wire, order: str) -> None:
    with pytest.raises(ElasticError, match="unknown, or with other values"):
        wire.order(order)
    assert wire.links == Links()


def test_a_rank_without_such_links_says_so() -> None:
    place = faults.Place(lambda: torch.device("cpu"), lambda: None, None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ElasticError, match="cannot be made to fail"):
        faults.commit(place, "slow", [math.pi])
