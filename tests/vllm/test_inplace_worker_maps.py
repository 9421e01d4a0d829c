"""The arithmetic that every survivor of a vLLM group goes through on its own: it must come out the same, and cover everything."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import Infeasible
from elastic.placement.vllm import logical_maps
from elastic.vllm.worker.maps import HOLE, Map, assemble, cover, fill, own_columns, primaries, replicas
from elastic.vllm.worker.slots import Slots, senders


@st.composite
def groups(draw: st.DrawFn) -> tuple[Map, int, int, tuple[int, ...]]:
    """A full map, its experts, rows a rank, and the ranks that are left."""
    ranks, rows = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    experts = draw(st.integers(1, ranks * rows))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers = draw(st.integers(1, 4))
    found = np.stack(
        [
            random.permutation(
                np.concatenate([np.arange(experts), random.integers(0, experts, ranks * rows - experts)])
            )
            for _ in range(layers)
        ]
    ).astype(np.int64)
    live = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1, unique=True))
    return found, experts, rows, tuple(sorted(live))


def left(found: Map, rows: int, live: tuple[int, ...]) -> Map:
    return assemble({rank: found[:, own_columns(rank, rows)] for rank in live}, found.shape[1])


@given(groups())
@settings(deadline=None)
def test_after_a_death_every_expert_has_a_live_copy_or_the_group_says_that_it_cannot(
    group: tuple[Map, int, int, tuple[int, ...]],
) -> None:
    found, experts, rows, live = group
    remaining = left(found, rows, live)
    if len(live) * rows < experts:
        with pytest.raises(Infeasible, match="experts a layer"):
            cover(remaining, experts, live, rows)
        return
    covered = cover(remaining, experts, live, rows)
    assert (replicas(covered.map, experts) > 0).all()
    dead = [
        c for rank in range(found.shape[1] // rows) if rank not in live for c in range(rank * rows, (rank + 1) * rows)
    ]
    assert (covered.map[:, dead] == HOLE).all()


@given(groups())
@settings(deadline=None)
def test_covering_loads_each_lost_expert_once_and_touches_no_other_row(
    group: tuple[Map, int, int, tuple[int, ...]],
) -> None:
    found, experts, rows, live = group
    remaining = left(found, rows, live)
    if len(live) * rows < experts:
        return
    covered = cover(remaining, experts, live, rows)
    orphans = {(int(layer), int(e)) for layer, e in np.argwhere(replicas(remaining, experts) == 0)}
    assert {(load.layer, load.expert) for load in covered.loads} == orphans
    assert len(covered.loads) == len(orphans)
    changed = {(int(layer), int(c)) for layer, c in np.argwhere(covered.map != remaining)}
    assert changed == {(load.layer, load.column) for load in covered.loads}
    assert all(covered.map[load.layer, load.column] == load.expert for load in covered.loads)


@given(groups())
@settings(deadline=None)
def test_survivors_that_hear_the_columns_in_any_order_come_to_one_map(
    group: tuple[Map, int, int, tuple[int, ...]],
) -> None:
    found, experts, rows, live = group
    if len(live) * rows < experts:
        return
    turned = tuple(reversed(live))
    first = assemble({rank: found[:, own_columns(rank, rows)] for rank in live}, found.shape[1])
    second = assemble({rank: found[:, own_columns(rank, rows)] for rank in turned}, found.shape[1])
    assert np.array_equal(cover(first, experts, live, rows).map, cover(second, experts, live, rows).map)


@given(groups())
@settings(deadline=None)
def test_the_maps_that_vllm_derives_name_live_columns_only(group: tuple[Map, int, int, tuple[int, ...]]) -> None:
    found, experts, rows, live = group
    if len(live) * rows < experts:
        return
    covered = cover(left(found, rows, live), experts, live, rows).map
    logical, counts = logical_maps(covered, experts)
    assert (counts >= 1).all()
    named = logical[logical != HOLE]
    assert {int(column) // rows for column in named} <= set(live)


def test_the_experts_of_most_copies_give_up_a_row_and_the_ranks_load_side_by_side() -> None:
    # two ranks are left of three; expert 4 to 7 had their only copies on the third
    found = np.array([[0, 1, 2, 3, 0, 1, 2, 3, HOLE, HOLE, HOLE, HOLE]])
    covered = cover(found, 8, (0, 1), 4)
    ranks = [load.column // 4 for load in covered.loads]
    assert sorted(load.expert for load in covered.loads) == [4, 5, 6, 7]
    assert sorted(ranks) == [0, 0, 1, 1]


def test_a_row_that_holds_nothing_is_used_before_any_copy_is_given_up() -> None:
    found = np.array([[0, 0, 0, HOLE, 1, 2, HOLE, HOLE]])
    assert cover(found, 4, (0, 1), 4).loads == ((0, 3, 3),)


@given(groups())
@settings(deadline=None)
def test_a_refilled_rank_gets_the_experts_that_have_fewest_copies(group: tuple[Map, int, int, tuple[int, ...]]) -> None:
    found, experts, rows, live = group
    if len(live) * rows < experts:
        return
    rank = next(r for r in range(found.shape[1] // rows) if r not in live)
    before = cover(left(found, rows, live), experts, live, rows).map
    after = fill(before, experts, rank, rows)
    counts = replicas(before, experts)
    for layer in range(len(found)):
        got = after.map[layer, own_columns(rank, rows)]
        assert (got != HOLE).all()
        if rows <= experts:
            assert len(set(got.tolist())) == rows
            passed_over = np.setdiff1d(np.arange(experts), got)
            assert counts[layer, got].max() <= counts[layer, passed_over].min(initial=np.iinfo(np.int64).max)
    others = [c for c in range(found.shape[1]) if c // rows != rank]
    assert np.array_equal(after.map[:, others], before[:, others])


def test_of_experts_with_equally_many_copies_the_most_asked_for_are_refilled_first() -> None:
    found = np.array([[0, 1, 2, 3, HOLE, HOLE]])
    assert fill(found, 4, 2, 2, np.array([[1.0, 7.0, 3.0, 9.0]])).map.tolist() == [[0, 1, 2, 3, 1, 3]]


@given(groups())
@settings(deadline=None)
def test_the_first_copies_of_all_ranks_are_every_expert_exactly_once(
    group: tuple[Map, int, int, tuple[int, ...]],
) -> None:
    found, experts, rows, _ = group
    all_of_them = [load for rank in range(found.shape[1] // rows) for load in primaries(found, rank, rows)]
    keys = [(load.layer, load.expert) for load in all_of_them]
    assert len(keys) == len(set(keys)) == found.shape[0] * experts
    assert all(found[load.layer, load.column] == load.expert for load in all_of_them)


def test_ranks_that_publish_different_shapes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="different shapes"):
        assemble({0: np.zeros((2, 4), np.int64), 1: np.zeros((2, 3), np.int64)}, 12)
    with pytest.raises(ValueError, match="rank 3"):
        assemble({3: np.zeros((2, 4), np.int64)}, 12)


@given(st.integers(1, 8), st.data())
def test_dense_numbers_are_those_of_the_live_slots_in_order(size: int, data: st.DataObject) -> None:
    live = tuple(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))))
    tensor_parallel = data.draw(st.integers(1, 3))
    slots = Slots(size, live, tensor_parallel)
    assert [slots.dense(slot) for slot in live] == list(range(len(live)))
    assert sorted(slots.live_ranks + slots.empty_ranks) == list(range(size * tensor_parallel))
    assert slots.only_live(list(range(size * tensor_parallel))) == list(slots.live_ranks)
    assert {empty for empty, _ in slots.stand_ins()} == set(slots.empty)
    assert all(voice in live for _, voice in slots.stand_ins())
    assert all(slots.slot_of_rank(rank) in live for rank in slots.live_ranks)


@pytest.mark.parametrize(("live", "text"), [((), "at least one"), ((1, 0), "ascending"), ((0, 4), "slots 0 to 3")])
def test_an_impossible_set_of_slots_is_refused(live: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Slots(4, live)


def test_each_joiner_has_one_sender_and_the_source_comes_first() -> None:
    assert senders((0, 2, 3), (1,), source=2) == {1: 2}
    assert senders((1, 3), (0, 2, 4), source=3) == {0: 3, 2: 1, 4: 3}
    with pytest.raises(ValueError, match="not live"):
        senders((0, 2), (1,), source=1)
    with pytest.raises(ValueError, match="cannot join"):
        senders((0, 2), (2,), source=0)
