"""Who is to blame when commands to many ranks fail: silence, slowness, or a third rank."""

import time
from typing import Any

import pytest

from elastic.config import GroupConfig, ModelShape
from elastic.controller.group import MISSES, Group, Unresponsive
from elastic.controller.records import RankGone
from elastic.errors import ElasticError, Retryable, Unreachable
from elastic.placement.maps import HOLE
from elastic.protocol import Abort
from elastic.view import Member, View


class Link:
    """What `Group` asks of a link that gave no answer."""

    def __init__(self, *, slot: int = 0, beats: bool = True, gone: bool = False) -> None:
        self.beat_at = time.monotonic() - (0.0 if beats else 60.0)
        self.gone = gone
        self.member = Member(slot, 1, 100 + slot, 1, "")
        self.told: list[Abort] = []

    def next_id(self) -> int:
        return len(self.told)

    def tell(self, order: Abort) -> None:
        self.told.append(order)


def group(**links: Link) -> Group:
    config = GroupConfig(name="g", run_dir="r", checkpoint="c", ranks=4, max_ranks=4, slots_per_rank=1)
    made = Group(config, ModelShape(experts=2, moe_layers=1, hidden=8, vocab=8, max_position=8))
    made.links = {int(name[1:]): link for name, link in links.items()}  # type: ignore[misc]
    return made


def serving() -> tuple[Group, dict[int, Link]]:
    links = {slot: Link(slot=slot) for slot in range(3)}
    made = group(**{f"s{slot}": link for slot, link in links.items()})
    made.view = View(1, (0, 1, 2), made.empty_placement())
    return made, links


@pytest.mark.parametrize(("witness", "state"), [("lifeline", "R"), ("pidfd", "Z"), ("socket", "Z"), ("socket", "X")])
def test_survivors_are_stopped_for_a_dead_process_before_anybody_has_decided(witness: str, state: str) -> None:
    made, links = serving()
    made.hasten_without(RankGone(links[1].member, witness, state, 0.0), ())
    assert [link.told for link in (links[0], links[2])] == [[Abort(id=0, epoch=1, lost=(1,))]] * 2
    assert not links[1].told
    made.hasten([1])  # the verdict on the same rank
    made.hasten_without(RankGone(links[2].member, "lifeline", "Z", 0.0), (1,))
    assert [order.lost for order in links[0].told] == [(1,), (1, 2)]
    assert len({order.epoch for order in links[0].told}) == 2, "a rank that is given an order twice refuses it"


def test_nobody_is_stopped_for_a_process_that_lives_or_has_been_replaced() -> None:
    made, links = serving()
    made.hasten_without(RankGone(links[1].member, "socket", "S", 0.0), ())
    made.hasten_without(RankGone(Member(1, 0, 99, 1, ""), "lifeline", "Z", 0.0), ())
    assert not any(link.told for link in links.values())


async def ends(error: Exception | None = None) -> Any:
    if error is not None:
        raise error
    return "done"


SILENT = Retryable("no answer to Commit within 5 s")


async def test_a_rank_that_neither_answers_nor_beats_is_given_up_and_nobody_else() -> None:
    made = group(s0=Link(), s1=Link(beats=False), s2=Link())
    with pytest.raises(Unresponsive) as raised:
        await made.each({0: ends(SILENT), 1: ends(SILENT), 2: ends()})
    assert raised.value.slots == (1,)


async def test_ranks_that_beat_are_slow_until_they_have_missed_too_many_deadlines() -> None:
    made = group(s0=Link(), s1=Link())
    for _ in range(MISSES - 1):
        with pytest.raises(Retryable) as raised:
            await made.each({0: ends(SILENT), 1: ends()})
        assert not isinstance(raised.value, Unresponsive)
    with pytest.raises(Unresponsive) as given_up:
        await made.each({0: ends(SILENT), 1: ends()})
    assert given_up.value.slots == (0,)


async def test_a_slow_load_that_gets_on_is_never_given_up() -> None:
    made = group(s0=Link())
    for held in range(2):
        made.note_held(made.contents({0: ((held,),)}))
        for _ in range(MISSES - 1):
            with pytest.raises(Retryable) as raised:
                await made.each({0: ends(SILENT)})
            assert not isinstance(raised.value, Unresponsive)
            made.note_held(made.contents({0: ((held,),)}))
    assert made.contents({0: ((HOLE,),)}) == made.empty_placement()


async def test_a_dead_rank_says_more_than_the_silence_of_those_who_wait_for_it() -> None:
    made = group(s0=Link(beats=False), s1=Link(gone=True))
    with pytest.raises(Retryable) as raised:
        await made.each({0: ends(SILENT), 1: ends(Retryable("connection closed"))})
    assert not isinstance(raised.value, Unresponsive)


async def test_ranks_that_could_not_reach_a_third_name_it_and_are_not_blamed() -> None:
    made = group(s0=Link(), s1=Link())
    with pytest.raises(Unreachable) as raised:
        await made.each({0: ends(Unreachable("no way", [3])), 1: ends(Unreachable("no way", [2, 3]))})
    assert raised.value.slots == (2, 3)
    with pytest.raises(ElasticError, match="disk"):
        await made.each({0: ends(ElasticError("disk")), 1: ends()})
