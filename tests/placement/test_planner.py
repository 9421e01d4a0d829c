"""The planner, against random maps: what a plan promises to the ranks that carry it out."""

from collections import Counter
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ElasticError, Infeasible
from elastic.placement import HOLE, Move, Placement, Plan, initial, replan
from elastic.placement.planner import losses_survivable


@dataclass(frozen=True)
class Change:
    """A map and a change of who is live; `contents` may hold stale rows of slots that are not present."""

    contents: Placement
    present: frozenset[int]
    live: frozenset[int]
    redundant: int
    restore_redundancy: bool

    def plan(self) -> Plan:
        return replan(
            self.contents,
            present=self.present,
            live=self.live,
            redundant=self.redundant,
            restore_redundancy=self.restore_redundancy,
        )


@st.composite
def changes(draw: st.DrawFn, *, restore_redundancy: bool | None = None) -> Change:
    """Any well-formed map, however uneven, and any change that its sizes allow."""
    capacity = draw(st.integers(1, 6))
    slots_per_rank = draw(st.integers(1, 5))
    live = draw(st.sets(st.integers(0, capacity - 1), min_size=1))
    experts = draw(st.integers(1, len(live) * slots_per_rank))
    present = draw(st.sets(st.integers(0, capacity - 1)))
    held = st.lists(st.integers(-experts, experts - 1), min_size=slots_per_rank, max_size=slots_per_rank).map(
        lambda picks: [e if e >= 0 and e not in picks[:i] else HOLE for i, e in enumerate(picks)]
    )
    row = st.lists(held, min_size=capacity, max_size=capacity).map(lambda ranks: tuple(e for r in ranks for e in r))
    rows = draw(st.lists(row, min_size=1, max_size=3))
    return Change(
        contents=Placement(experts=experts, capacity=capacity, slots_per_rank=slots_per_rank, rows=tuple(rows)),
        present=frozenset(present),
        live=frozenset(live),
        redundant=draw(st.integers(0, 12)),
        restore_redundancy=draw(st.booleans()) if restore_redundancy is None else restore_redundancy,
    )


def moves(plan: Plan) -> tuple[Move, ...]:
    return plan.fills + plan.overwrites


def replay(start: Placement, plan: Plan) -> Placement:
    """What the buffers that the target uses hold once every move has been made, in the worst order."""
    rows = [list(row) for row in start.rows]
    for move in reversed(moves(plan)):
        if move.source_slot != HOLE:
            source = move.source_slot * start.slots_per_rank + move.source_index
            assert rows[move.layer][source] == move.expert, "a source was written before it was read"
        rows[move.layer][move.slot * start.slots_per_rank + move.index] = move.expert
    used = tuple(
        tuple(e if wanted != HOLE else HOLE for e, wanted in zip(row, target, strict=True))
        for row, target in zip(rows, plan.target.rows, strict=True)
    )
    return msgspec.structs.replace(start, rows=used)


def copies(placement: Placement, layer: int) -> Counter[int]:
    return Counter(e for e in placement.rows[layer] if e != HOLE)


def loads(placement: Placement, layer: int, live: frozenset[int]) -> list[int]:
    row = placement.rows[layer]
    return [sum(row[p] != HOLE for p in placement.physical(slot)) for slot in sorted(live)]


@given(changes())
def test_every_expert_has_a_copy_on_a_live_rank_whatever_happened_before(change: Change) -> None:
    target = change.plan().target
    target.check()
    assert target.uncovered(change.live) == []
    assert target.only(change.live) == target, "a slot outside the view holds experts"


@given(changes())
def test_carrying_out_the_moves_gives_the_target(change: Change) -> None:
    plan = change.plan()
    assert replay(change.contents.only(change.present), plan) == plan.target


@given(changes())
def test_no_move_reads_a_lost_rank_or_a_buffer_that_another_move_writes(change: Change) -> None:
    plan = change.plan()
    written = [(m.layer, m.slot, m.index) for m in moves(plan)]
    assert len(set(written)) == len(written)
    holding = change.contents.only(change.present)
    for move in moves(plan):
        assert move.slot in change.live
        if move.source_slot == HOLE:
            assert move.source_index == HOLE
            assert not any(holding.replicas(move.layer, move.expert)), "a live copy was ignored"
        else:
            assert move.source_slot in change.present
            assert (move.layer, move.source_slot, move.source_index) not in written


@given(changes())
def test_fills_never_touch_a_buffer_in_use_and_serving_goes_on_without_the_overwritten(change: Change) -> None:
    plan = change.plan()
    holding = change.contents.only(change.present)
    for move in plan.fills:
        assert holding.rows[move.layer][move.slot * holding.slots_per_rank + move.index] == HOLE
    for move in plan.overwrites:
        assert holding.rows[move.layer][move.slot * holding.slots_per_rank + move.index] != HOLE
    emptied = {(m.layer, m.slot * holding.slots_per_rank + m.index) for m in plan.overwrites}
    assert plan.vacated.rows == tuple(
        tuple(HOLE if (layer, p) in emptied else e for p, e in enumerate(row)) for layer, row in enumerate(holding.rows)
    )
    assert plan.vacated.uncovered(change.present) == holding.uncovered(change.present)


@given(changes(restore_redundancy=True))
def test_redundancy_is_restored_and_never_creeps_up(change: Change) -> None:
    target = change.plan().target
    room = len(change.live) * min(target.slots_per_rank, target.experts)
    for layer in range(len(target.rows)):
        assert sum(copies(target, layer).values()) == min(target.experts + change.redundant, room)


@given(changes(restore_redundancy=True))
def test_every_rank_gets_its_fair_share(change: Change) -> None:
    target = change.plan().target
    for layer in range(len(target.rows)):
        held = loads(target, layer, change.live)
        assert max(held) - min(held) <= 1


@given(changes(restore_redundancy=False))
def test_a_loss_moves_only_what_has_no_copy_left(change: Change) -> None:
    plan = change.plan()
    orphans = change.contents.only(change.present & change.live).uncovered(change.live)
    assert sorted((m.layer, m.expert) for m in moves(plan)) == orphans
    if change.present <= change.live:
        assert all(m.source_slot == HOLE for m in moves(plan))
    for layer in range(len(plan.target.rows)):
        if any(m.layer == layer for m in plan.overwrites):
            held = loads(plan.target, layer, change.live)
            assert min(held) == min(plan.target.slots_per_rank, plan.target.experts), "a replica was lost beside a hole"


@given(changes())
def test_planning_a_settled_map_again_moves_nothing(change: Change) -> None:
    target = change.plan().target
    again = replan(
        target,
        present=change.live,
        live=change.live,
        redundant=change.redundant,
        restore_redundancy=change.restore_redundancy,
    )
    assert moves(again) == ()
    assert again.target == target == again.vacated


@given(changes())
def test_the_same_question_always_gets_the_same_plan(change: Change) -> None:
    assert change.plan() == change.plan()


@given(ranks=st.integers(2, 6), slots_per_rank=st.integers(1, 6), redundant=st.integers(0, 8), data=st.data())
def test_a_loss_and_its_refill_return_to_the_redundancy_and_move_one_share(
    ranks: int, slots_per_rank: int, redundant: int, data: st.DataObject
) -> None:
    experts = data.draw(st.integers(slots_per_rank, (ranks - 1) * slots_per_rank), label="experts")
    lost = data.draw(st.integers(0, ranks - 1), label="lost")
    live = frozenset(range(ranks))
    survivors = live - {lost}
    before = initial(
        experts=experts, layers=3, capacity=ranks, slots_per_rank=slots_per_rank, live=live, redundant=redundant
    )
    covered = replan(before, present=survivors, live=survivors, redundant=redundant, restore_redundancy=False)
    refilled = replan(covered.target, present=survivors, live=live, redundant=redundant)
    for layer in range(3):
        total = sum(copies(before, layer).values())
        assert sum(copies(refilled.target, layer).values()) == total
        at_most = -(-total // ranks)
        assert sum(m.layer == layer for m in moves(refilled) if m.slot == lost) <= at_most


def test_a_new_group_spreads_experts_evenly_in_order() -> None:
    placement = initial(experts=8, layers=2, capacity=4, slots_per_rank=3, live=[0, 2, 3], redundant=0)
    placement.check()
    assert placement.rows[0] == (0, 1, 2, HOLE, HOLE, HOLE, 3, 4, 5, 6, 7, HOLE)
    assert placement.rows[1] == (0, 1, HOLE, HOLE, HOLE, HOLE, 2, 3, 4, 5, 6, 7)


def test_replicas_of_a_new_group_leave_few_orphans_after_any_one_loss() -> None:
    placement = initial(experts=16, layers=4, capacity=4, slots_per_rank=6, live=range(4), redundant=8)
    placement.check()
    for layer in range(4):
        assert loads(placement, layer, frozenset(range(4))) == [6, 6, 6, 6]
        assert max(copies(placement, layer).values()) == 2
    for lost in range(4):
        orphans = Counter(layer for layer, _ in placement.uncovered(set(range(4)) - {lost}))
        assert all(orphans[layer] == 2 for layer in range(4))


def test_full_redundancy_survives_any_loss_without_a_byte() -> None:
    placement = initial(experts=8, layers=3, capacity=4, slots_per_rank=4, live=range(4), redundant=8)
    for lost in range(4):
        survivors = set(range(4)) - {lost}
        plan = replan(placement, present=survivors, live=survivors, redundant=8, restore_redundancy=False)
        assert moves(plan) == ()
        assert plan.target == placement.only(survivors)


def test_orphans_of_a_full_group_overwrite_replicas_only() -> None:
    before = Placement(experts=4, capacity=3, slots_per_rank=2, rows=((0, 1, 2, 3, 0, 2),))
    plan = replan(before, present=[1, 2], live=[1, 2], redundant=2, restore_redundancy=False)
    assert plan.fills == ()
    assert plan.overwrites == (Move(layer=0, expert=1, slot=1, index=0),)
    assert plan.target.rows == ((HOLE, HOLE, 1, 3, 0, 2),)


def test_a_joining_rank_takes_its_share_and_nobody_overwrites_anything() -> None:
    before = initial(experts=12, layers=1, capacity=4, slots_per_rank=6, live=[0, 1, 2], redundant=0)
    plan = replan(before, present=[0, 1, 2], live=range(4), redundant=0)
    assert plan.overwrites == ()
    assert [m.slot for m in plan.fills] == [3, 3, 3]
    assert sorted(m.source_slot for m in plan.fills) == [0, 1, 2]
    assert plan.vacated == before


def test_a_leaving_rank_hands_over_its_sole_copies_and_nothing_else_moves() -> None:
    before = initial(experts=12, layers=2, capacity=4, slots_per_rank=4, live=range(4), redundant=0)
    plan = replan(before, present=range(4), live=[0, 2, 3], redundant=0)
    assert [m.source_slot for m in moves(plan)] == [1] * 6
    assert plan.overwrites == ()
    assert plan.vacated == before


def test_stale_rows_of_a_lost_rank_are_no_copies_when_its_slot_is_refilled() -> None:
    before = Placement(experts=4, capacity=2, slots_per_rank=4, rows=((0, 1, 2, 3, 0, 1, 2, 3),))
    plan = replan(before, present=[0], live=[0, 1], redundant=4)
    assert [(m.expert, m.slot, m.source_slot) for m in plan.fills] == [(3, 1, 0), (2, 1, 0), (1, 1, 0), (0, 1, 0)]


def test_a_hole_for_every_rank_share_is_spread_over_the_loading_ranks() -> None:
    before = initial(experts=24, layers=8, capacity=4, slots_per_rank=8, live=range(4), redundant=0)
    plan = replan(before, present=[0, 1, 2], live=[0, 1, 2], redundant=0, restore_redundancy=False)
    assert Counter(m.slot for m in plan.fills) == {0: 16, 1: 16, 2: 16}


def test_too_few_ranks_are_refused_with_the_numbers() -> None:
    before = initial(experts=9, layers=1, capacity=4, slots_per_rank=3, live=range(3), redundant=0)
    with pytest.raises(Infeasible, match="2 live ranks x 3 slots hold fewer than 9 experts; keep at least 3 ranks"):
        replan(before, present=[0, 1], live=[0, 1], redundant=0)
    with pytest.raises(Infeasible, match="0 live ranks"):
        initial(experts=1, layers=1, capacity=2, slots_per_rank=1, live=[], redundant=0)
    with pytest.raises(Infeasible, match=r"slots \[4, 7\] are outside the capacity of 4"):
        replan(before, present=range(3), live=[0, 1, 2, 7, 4], redundant=0)
    with pytest.raises(ElasticError, match="-1 redundant experts"):
        initial(experts=1, layers=1, capacity=1, slots_per_rank=1, live=[0], redundant=-1)


@pytest.mark.parametrize(
    ("experts", "slots_per_rank", "live", "survivable"),
    [(16, 6, 4, 1), (16, 4, 4, 0), (16, 16, 4, 3), (16, 32, 4, 3), (16, 6, 2, 0), (16, 6, 0, 0), (256, 9, 32, 3)],
)
def test_losses_survivable_counts_whole_ranks(experts: int, slots_per_rank: int, live: int, survivable: int) -> None:
    assert losses_survivable(experts=experts, slots_per_rank=slots_per_rank, live=live) == survivable
