"""The two host barriers of a commit: nobody zeroes its words while a peer may still write them, nobody runs before all have."""

import asyncio
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from elastic.client import Traffic, random_prompts
from elastic.config import GroupConfig
from elastic.controller.joining import FROZEN_END_S
from elastic.controller.link import RankLink
from elastic.errors import NeedsReplan
from elastic.placement.maps import Placement
from elastic.protocol import Abort, Commit, Loaded, Peer, Resume
from elastic.rank.address import Address
from elastic.rank.comm.nixl_ep import FROZEN_AFTER_S
from elastic.rank.gate import Gate
from elastic.rank.member import Membership
from elastic.rank.steplog import WorkLog
from elastic.view import View
from tests.controller.test_executor import VOCAB, checkpoint, group, run_dir

__all__ = ["checkpoint", "run_dir"]


async def test_all_stand_before_any_zeroes_its_words_and_all_have_before_any_runs(
    checkpoint: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[type, int, float, float]] = []
    original = RankLink.call

    async def call(self: RankLink, message: Any, answer: Any, *, deadline_s: float) -> Any:
        began = time.monotonic()
        result = await original(self, message, answer, deadline_s=deadline_s)
        if isinstance(message, Abort | Commit | Resume):
            calls.append((type(message), message.epoch, began, time.monotonic()))
        return result

    monkeypatch.setattr(RankLink, "call", call)
    async with group(checkpoint, run_dir) as owner:
        prompts = random_prompts(6, VOCAB, seed=41)
        traffic = Traffic(owner.executor.gateway_http, prompts, 32)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            await traffic.reached(30)
            owner.signal(1, signal.SIGKILL)
        await owner.executor.settled(deadline_s=30)
        (loss,) = [r for r in owner.reports if r.kind == "loss" and r.outcome == "committed"]
    of_loss = {kind: [c for c in calls if c[:2] == (kind, loss.epoch)] for kind in (Abort, Commit, Resume)}
    assert [len(found) for found in of_loss.values()] == [2, 2, 2]
    for before, after in ((Abort, Commit), (Commit, Resume)):
        assert max(end for *_, end in of_loss[before]) <= min(began for _, _, began, _ in of_loss[after])


class Exchange:
    """Notes what a commit does to the EP back end, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.deadlines: list[float] = []

    def connect(self, peers: dict[int, bytes], *, deadline_s: float, give_up: Any) -> None:
        self.calls.append(f"connect {sorted(peers)}")
        self.deadlines.append(deadline_s)

    def disconnect(self, ranks: list[int]) -> None:
        self.calls.append(f"disconnect {sorted(ranks)}")

    def clean(self, base: int) -> None:
        self.calls.append("clean")

    def take_over(self, live: tuple[int, ...], base: int) -> int:
        self.calls.append(f"take over {sorted(live)}")
        return 7


CONFIG = GroupConfig(name="g", run_dir="r", checkpoint="c", ranks=2, max_ranks=3, slots_per_rank=1)


def membership(ep: Exchange, *, in_view: bool) -> tuple[Membership, Gate, Any]:
    gate = Gate(lambda: None)
    engine: Any = SimpleNamespace(view=VIEW if in_view else None, recorder=None, works=WorkLog())
    engine.take_view = lambda view, epoch, generation: (
        ep.calls.append(f"take view at {generation}"),
        setattr(engine, "view", view),
    )
    weights: Any = SimpleNamespace(
        contents=lambda: ((0,),), load_experts=lambda *a, **o: Loaded(), connect=lambda *a, **o: None, disconnect=list
    )
    nothing: Any = SimpleNamespace()
    return Membership(CONFIG, 0, gate, engine, nothing, ep, nothing, weights), gate, engine  # type: ignore[arg-type]


PLACEMENT = Placement(experts=1, capacity=3, slots_per_rank=1, rows=((0, 0, -1),))
VIEW = View(epoch=1, live=(0, 1), placement=PLACEMENT)
PEER = Peer(slot=1, incarnation=1, ep=Address(b"there", "").encode(), weights=b"")
COMMIT = Commit(id=1, epoch=1, view=VIEW, peers=(PEER,), moves=(), round=5, base=1 << 24)


def test_words_are_zeroed_before_any_peer_is_unmasked_and_the_view_comes_last() -> None:
    ep = Exchange()
    commit, gate, _ = membership(ep, in_view=False)
    gate.fence(1)
    commit.commit(COMMIT)
    assert ep.calls == ["connect [1]", "clean", "take over [0, 1]", "take view at 7"]


def test_an_overtaken_commit_changes_neither_words_nor_masks() -> None:
    ep = Exchange()
    commit, gate, _ = membership(ep, in_view=False)
    gate.fence(2)
    with pytest.raises(NeedsReplan):
        commit.commit(COMMIT)
    assert ep.calls == ["connect [1]"]


@pytest.mark.parametrize("in_view", [False, True])
def test_the_deadline_of_a_connect_is_that_of_a_joiner_or_of_those_who_wait_for_it(in_view: bool) -> None:
    ep = Exchange()
    member, _, _ = membership(ep, in_view=in_view)
    member.link(SimpleNamespace(peers=(PEER,), epoch=1))  # type: ignore[arg-type]
    assert ep.deadlines == [CONFIG.link_deadline_s(joins=not in_view)]


@pytest.mark.parametrize(("prepare_s", "ranks"), [(60.0, 4), (60.0, 64), (30.0, 8), (12.0, 6)])
def test_a_stopped_joiner_is_ended_before_those_end_that_are_frozen_in_a_connect_to_it(
    prepare_s: float, ranks: int
) -> None:
    """A frozen joiner ends itself before that; one that is stopped cannot."""
    config = msgspec.structs.replace(CONFIG, prepare_deadline_s=prepare_s, max_ranks=ranks)
    joiner, waiting = (config.link_deadline_s(joins=joins) + FROZEN_AFTER_S for joins in (True, False))
    ended = config.link_deadline_s(joins=True) + FROZEN_END_S
    assert joiner < ended < waiting - 0.5
