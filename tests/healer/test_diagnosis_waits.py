"""Who is to blame for a wait: only the one smallest set without which nobody waits, and only for a majority."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from healer.diagnosis.waits import cut_off, mutual
from healer.evidence import RankRef
from tests.healer.support import rank

graphs = st.integers(2, 8).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.dictionaries(st.integers(0, n - 1), st.sets(st.integers(0, n - 1), max_size=n), max_size=n),
    )
)


def graph(rows: dict[int, set[int]]) -> dict[RankRef, set[RankRef]]:
    return {rank(s): {rank(p) for p in row if p != s} for s, row in rows.items()}


def found(count: int, rows: dict[int, set[int]]) -> set[int]:
    return {r.slot for r in cut_off(graph(rows), count)}


def covers(rows: dict[int, set[int]], chosen: set[int]) -> bool:
    """Without `chosen` nobody waits for anybody."""
    return not any(p != s and s not in chosen and p not in chosen for s, row in rows.items() for p in row)


def smallest(count: int, rows: dict[int, set[int]]) -> list[set[int]]:
    for size in range(count + 1):
        least = [set(some) for some in combinations(range(count), size) if covers(rows, set(some))]
        if least:
            return least
    raise AssertionError


@given(st.integers(3, 12), st.data())
def test_the_smaller_side_of_any_partition_is_named_and_never_the_larger(count: int, data: st.DataObject) -> None:
    part = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 1))
    rest = set(range(count)) - part
    rows = {s: (rest if s in part else part) for s in range(count)}
    assert found(count, rows) == (min(part, rest, key=len) if len(part) != len(rest) else set())


@given(graphs)
def test_whoever_is_named_is_the_only_smallest_explanation_of_all_waiting(
    case: tuple[int, dict[int, set[int]]],
) -> None:
    count, rows = case
    named = found(count, rows)
    if named:
        assert smallest(count, rows) == [named]
        assert 2 * len(named) < count
        for slot in named:
            witnesses = {s for s, row in rows.items() if s != slot and slot in row}
            assert 2 * len(witnesses) > count, "one accuser, or few, name nobody"


@given(graphs, st.integers(0, 7))
def test_a_rank_that_waits_for_nobody_is_never_called_cut_off(case: tuple[int, dict[int, set[int]]], slot: int) -> None:
    count, rows = case
    assert slot not in found(count, {**rows, slot: set()})


@given(st.integers(3, 12), st.data())
def test_a_dead_link_is_a_mutual_wait_of_its_two_ends_and_names_neither(count: int, data: st.DataObject) -> None:
    a, b = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    rows = {s: {a} for s in range(count) if s not in (a, b)} | {a: {b}, b: {a}}
    assert mutual(graph(rows)) == {rank(a): {rank(b)}, rank(b): {rank(a)}}
    assert found(count, rows) == set()


def test_a_wait_that_the_cut_does_not_explain_keeps_everybody() -> None:
    cut = {0: {4}, 1: {4}, 2: {4}, 3: {4}, 4: {0, 1, 2, 3}}
    assert found(5, cut) == {4}
    assert found(5, {**cut, 0: {4, 1}}) == set()


def test_half_of_a_group_is_no_majority() -> None:
    """Two dead links of one rank out of four: the fourth hears it."""
    assert found(4, {0: {1, 2}, 1: {0}, 2: {0}, 3: set()}) == set()
    assert found(4, {0: {1, 2, 3}, 1: {0}, 2: {0}, 3: {0}}) == {0}
