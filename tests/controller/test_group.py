"""Who is to blame when commands to many ranks fail: silence, slowness, or a third rank."""

import time
from typing import Any

import pytest

from elastic.config import GroupConfig, ModelShape
from elastic.controller.group import MISSES, Group, Unresponsive
from elastic.errors import ElasticError, Retryable, Unreachable
from elastic.placement.maps import HOLE


class Link:
    """What `Group` asks of a link that gave no answer."""

    def __init__(self, *, beats: bool = True, gone: bool = False) -> None:
        self.beat_at = time.monotonic() - (0.0 if beats else 60.0)
        self.gone = gone


def group(**links: Link) -> Group:
    config = GroupConfig(name="g", run_dir="r", checkpoint="c", ranks=4, max_ranks=4, slots_per_rank=1)
    made = Group(config, ModelShape(experts=2, moe_layers=1, hidden=8, vocab=8, max_position=8))
    made.links = {int(name[1:]): link for name, link in links.items()}  # type: ignore[misc]
    return made


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
