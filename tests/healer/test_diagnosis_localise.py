"""Who no longer hears whom: a rank, a link, a partition, or it cannot be told. Never a healthy rank where it is ambiguous."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from healer.diagnosis.localise import Finding, Kind, Suspicions, localise
from healer.evidence import RankRef
from tests.healer.support import rank

TOGETHER_S = 1.0
sizes = st.integers(3, 12)


def ranks(count: int) -> frozenset[RankRef]:
    return frozenset(rank(s) for s in range(count))


def find(
    count: int,
    rows: Mapping[int, set[int]],
    *,
    unheard: set[int] = frozenset(),
    late: Mapping[int, set[int]] | None = None,
) -> Finding:  # type: ignore[assignment]
    """`rows`: whom each slot misses from second 10 on; `late`: whom it misses from second 20 on."""
    since: dict[RankRef, dict[RankRef, float]] = {}
    for at, matrix in ((20.0, late or {}), (10.0, rows)):
        for slot, row in matrix.items():
            since.setdefault(rank(slot), {}).update(dict.fromkeys((rank(p) for p in row), at))
    heard = ranks(count) - {rank(s) for s in unheard}
    return localise(Suspicions(ranks(count), heard, since), TOGETHER_S)


def named(found: Finding) -> set[int]:
    return {r.slot for r in found.ranks}


@given(sizes, st.data())
def test_one_dead_rank_that_all_others_miss_is_named(count: int, data: st.DataObject) -> None:
    dead = data.draw(st.integers(0, count - 1))
    found = find(count, {s: {dead} for s in range(count) if s != dead}, unheard={dead})
    assert (found.kind, named(found)) == (Kind.RANKS, {dead})


@given(st.integers(5, 12), st.data())
def test_two_dead_ranks_that_a_majority_misses_are_both_named(count: int, data: st.DataObject) -> None:
    dead = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=2))
    found = find(count, {s: dead for s in range(count) if s not in dead}, unheard=dead)
    assert (found.kind, named(found)) == (Kind.RANKS, dead)


@given(sizes, st.data())
def test_a_slow_rank_for_which_all_others_wait_is_named_and_those_who_wait_are_not(
    count: int, data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, count - 1))
    found = find(count, {s: {slow} for s in range(count) if s != slow})
    assert (found.kind, named(found)) == (Kind.RANKS, {slow})


@given(st.integers(4, 12), st.booleans(), st.data())
def test_a_dead_link_names_its_ends_as_a_link_and_accuses_nobody(
    count: int, both_ways: bool, data: st.DataObject
) -> None:
    a, b = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    found = find(count, {a: {b}} | ({b: {a}} if both_ways else {}))
    assert found.kind == Kind.LINKS
    assert found.ranks == ()
    assert (rank(b), rank(a)) in found.links
    assert len(found.links) == 1 + both_ways


@given(st.integers(5, 12), st.data())
def test_those_who_only_wait_behind_a_dead_link_do_not_hide_it(count: int, data: st.DataObject) -> None:
    a, b = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    others = {s: {a, b} for s in range(count) if s not in (a, b)}
    found = find(count, {a: {b}, b: {a}}, late=others)
    assert (found.kind, found.ranks) == (Kind.LINKS, ())


@given(st.integers(3, 12), st.data())
def test_a_partition_is_called_one_and_no_half_is_named(count: int, data: st.DataObject) -> None:
    part = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 1))
    rest = set(range(count)) - part
    found = find(count, {s: (rest if s in part else part) for s in range(count)})
    assert (found.kind, found.ranks) == (Kind.PARTITION, ())
    assert {frozenset(r.slot for r in p) for p in found.parts} == {frozenset(part), frozenset(rest)}


def test_half_of_a_group_never_condemns_the_other_half() -> None:
    found = find(4, {0: {2, 3}, 1: {2, 3}}, unheard={2, 3})
    assert found.kind == Kind.CANNOT_TELL
    assert find(2, {0: {1}}, unheard={1}).kind == Kind.CANNOT_TELL, "one word against another"


def test_a_group_that_misses_nobody_has_no_fault() -> None:
    assert find(4, {}).kind == Kind.NOTHING
    assert find(4, {}, unheard={1}).kind == Kind.NOTHING


def test_the_only_rank_that_nobody_was_asked_about_is_not_named_by_what_an_unheard_one_once_said() -> None:
    assert find(4, {1: {0, 2, 3}}, unheard={1}).kind == Kind.NOTHING


matrices = sizes.flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.dictionaries(st.integers(0, n - 1), st.sets(st.integers(0, n - 1), max_size=n), max_size=n),
        st.sets(st.integers(0, n - 1), max_size=n),
        st.dictionaries(st.integers(0, n - 1), st.sets(st.integers(0, n - 1), max_size=n), max_size=n),
    )
)


@given(matrices)
def test_a_rank_is_named_only_if_more_than_half_of_all_are_witnesses_and_all_of_them_agree(
    case: tuple[int, dict[int, set[int]], set[int], dict[int, set[int]]],
) -> None:
    count, rows, unheard, late = case
    found = find(count, rows, unheard=unheard, late=late)
    if not found.ranks:
        return
    # the later words count only where nobody spoke before
    first = {s: row - {s} for s, row in rows.items() if s not in unheard}
    if not any(first.values()):
        first = {s: row - {s} for s, row in late.items() if s not in unheard}
    witnesses = [s for s in range(count) if s not in unheard and s not in named(found)]
    assert 2 * len(witnesses) > count
    assert all(first.get(s, set()) == named(found) for s in witnesses)
    for slot in named(found):
        assert slot in unheard or not first.get(slot)


@given(matrices, st.integers(0, 11))
def test_a_rank_that_any_healthy_reporter_still_hears_is_never_named(
    case: tuple[int, dict[int, set[int]], set[int], dict[int, set[int]]], friend: int
) -> None:
    count, rows, unheard, _ = case
    friend %= count
    rows = {**rows, friend: set()}
    found = find(count, rows, unheard=unheard - {friend})
    assert named(found) <= {friend}, "its word stands against every accusation but one of itself"


@given(st.integers(4, 12), st.data())
def test_a_dead_rank_and_one_wrong_accusation_name_no_healthy_rank(count: int, data: st.DataObject) -> None:
    dead, liar, victim = data.draw(st.lists(st.integers(0, count - 1), min_size=3, max_size=3, unique=True))
    rows = {s: {dead} for s in range(count) if s != dead}
    rows[liar] = {dead, victim}
    assert named(find(count, rows, unheard={dead})) <= {dead}
