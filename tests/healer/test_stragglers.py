"""A rank for which the others wait round after round is named, with how much; one that is slow once is not."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healer.evidence import Evidence, What
from healer.sensors.stragglers import StragglerConfig, StragglerSensor, ratios, shares
from tests.healer.support import FakeClock, beat, member, rank

CONFIG = StragglerConfig()


class Group:
    def __init__(self, slots: int = 4, seed: int = 1) -> None:
        self.clock, self.slots, self.draw = FakeClock(), slots, random.Random(seed)
        self.sensor = StragglerSensor(self.clock, CONFIG)
        self.sensor.watch([member(s) for s in range(slots)])
        self.told: list[Evidence] = []

    def run(self, windows: int, chance: dict[int, float], *, base: float = 0.05, idle: bool = False) -> None:
        """At each beat the sender waits for each peer with the peer's chance."""
        for _ in range(round(windows * (CONFIG.window_s / 0.2 + 1))):
            self.clock.now += 0.2
            for slot in range(self.slots):
                waits = tuple(p for p in range(self.slots) if p != slot and self.draw.random() < chance.get(p, base))
                self.sensor.heard(beat(slot, self.clock.now, waiting_on=waits, idle=idle))
            self.told += self.sensor.tick()

    def said(self) -> list[tuple[int, What]]:
        return [(e.subject.slot, e.what) for e in self.told]  # type: ignore[union-attr]


def test_a_rank_that_is_late_round_after_round_is_named_with_the_ratio_and_taken_back_when_it_keeps_up() -> None:
    group = Group()
    group.run(1, {2: 0.6})
    assert group.said() == [], "one slow window is no straggler"
    group.run(1, {2: 0.6})
    assert group.said() == [(2, What.STRAGGLES)]
    assert float(group.told[0].value) > 5
    assert "of the time" in group.told[0].detail
    group.run(CONFIG.windows, {})
    assert group.said()[-1] == (2, What.KEEPS_UP)


def test_a_group_that_waits_for_all_alike_has_no_straggler() -> None:
    group = Group()
    group.run(4, dict.fromkeys(range(4), 0.5))
    assert group.said() == []


def test_waits_too_short_to_cost_anything_name_nobody() -> None:
    group = Group()
    group.run(4, {1: 0.06}, base=0.001)
    assert group.said() == []


def test_an_idle_group_has_no_straggler() -> None:
    group = Group()
    group.run(4, {1: 0.9}, idle=True)
    assert group.said() == []


def test_a_change_of_the_group_begins_a_new_window() -> None:
    group = Group()
    group.run(1, {2: 0.6})
    group.sensor.watch([member(s) for s in (0, 1, 2)])
    group.sensor.watch([member(s) for s in range(4)])
    group.run(1, {2: 0.6})
    assert group.said() in ([], [(2, What.STRAGGLES)])
    group.sensor.watch([member(s, incarnation=1 if s == 2 else 0) for s in range(4)])
    before = len(group.told)
    group.run(1, {2: 0.6})
    assert len(group.told) == before, "the replacement does not inherit what was said of its predecessor"


def test_two_ranks_cannot_tell_which_of_them_is_slow() -> None:
    group = Group(slots=2)
    group.run(4, {1: 0.9})
    assert group.said() == []


@settings(max_examples=20)
@given(st.integers(3, 8), st.integers(0, 7), st.integers(0, 10_000))
def test_only_the_slow_rank_is_ever_named(slots: int, slow: int, seed: int) -> None:
    group = Group(slots, seed)
    group.run(3, {slow % slots: 0.7})
    assert {slot for slot, what in group.said() if what == What.STRAGGLES} == {slow % slots}


def test_shares_and_ratios_are_those_of_the_definition() -> None:
    beats = {rank(s): 100 for s in range(3)}
    waits = {
        rank(0): {rank(2): 40, rank(1): 10},
        rank(1): {rank(2): 60, rank(0): 10},
        rank(2): {rank(0): 10, rank(1): 10},
    }
    found = shares(beats, waits, 40)
    assert found == pytest.approx({rank(0): 0.1, rank(1): 0.1, rank(2): 0.5})
    assert ratios(found)[rank(2)] == pytest.approx((0.5, 5.0))
    assert shares(beats | {rank(0): 3, rank(1): 3}, waits, 40) == {}, "too few beats say nothing"
