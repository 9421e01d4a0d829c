from hypothesis import given
from hypothesis import strategies as st

from elastic.gateway.ledger import RankId
from elastic.gateway.router import Candidate, choose, compare, to_hand_over
from elastic.protocol import Route


def rank(slot: int, in_flight: int = 0, told: int = 0, *, admit: bool = True, up: bool = True) -> Candidate:
    return Candidate(
        rank=RankId(slot, 1),
        connected=up,
        admit=admit,
        in_flight=in_flight,
        waiting=told // 2,
        running=told - told // 2,
    )


def route(slot: int, incarnation: int = 1, *, admit: bool = True) -> Route:
    return Route(slot=slot, incarnation=incarnation, address=f"r{slot}.{incarnation}", admit=admit)


def slot_of(*candidates: Candidate, avoid: RankId | None = None) -> int | None:
    chosen = choose(candidates, avoid)
    return chosen.slot if chosen else None


def test_least_loaded_rank_takes_the_request_and_the_lowest_slot_among_equals() -> None:
    assert slot_of(rank(2), rank(0), rank(1)) == 0
    assert slot_of(rank(0, 2), rank(1, 1), rank(2, 1)) == 1
    assert slot_of(rank(0, 0, told=5), rank(1, 1)) == 1, "work that others gave it counts"
    assert slot_of(rank(0, 3, told=0), rank(1, 2, told=2)) == 1, "what the rank says may lag"


def test_no_request_goes_to_a_rank_that_drains_or_is_gone() -> None:
    assert slot_of(rank(0, admit=False), rank(1, up=False)) is None
    assert slot_of(rank(0, admit=False), rank(1, 9)) == 1


def test_rank_that_failed_a_request_gets_it_again_only_when_alone() -> None:
    assert slot_of(rank(0), rank(1, 9), avoid=RankId(0, 1)) == 1
    assert slot_of(rank(0), avoid=RankId(0, 1)) == 0


def test_draining_rank_keeps_its_requests_while_nobody_else_admits() -> None:
    assert to_hand_over([rank(0, 2, admit=False)]) == []
    assert to_hand_over([rank(0, 2, admit=False), rank(1, up=False)]) == []
    assert to_hand_over([rank(0, 2, admit=False), rank(1)]) == [RankId(0, 1)]
    assert to_hand_over([rank(0, 0, admit=False), rank(1, 3)]) == []


def test_route_changes_are_told_apart() -> None:
    current = {0: route(0), 1: route(1), 2: route(2)}
    change = compare(current, [route(0, admit=False), route(1, 2), route(3)])
    assert change.updated == (route(0, admit=False),)
    assert change.opened == (route(1, 2), route(3))
    assert set(change.dropped) == {RankId(1, 1), RankId(2, 1)}


def test_an_older_incarnation_is_never_gone_back_to() -> None:
    change = compare({0: route(0, 3)}, [route(0, 2)])
    assert (change.opened, change.dropped, change.updated) == ((), (), ())


routes = st.lists(st.builds(route, st.integers(0, 4), st.integers(1, 4), admit=st.booleans()), max_size=8)


@given(routes, routes)
def test_routes_after_a_change_are_those_asked_for_at_their_latest_incarnation(
    before: list[Route], after: list[Route]
) -> None:
    held: dict[int, Route] = {}
    for wanted in (before, after):
        change = compare(held, wanted)
        for gone in change.dropped:
            assert held.pop(gone.slot).incarnation == gone.incarnation
        for new in change.opened:
            assert new.slot not in held
            held[new.slot] = new
        for known in change.updated:
            assert held[known.slot].incarnation == known.incarnation
        assert set(held) == {asked.slot for asked in wanted}
        for asked in wanted:
            assert held[asked.slot].incarnation >= asked.incarnation
