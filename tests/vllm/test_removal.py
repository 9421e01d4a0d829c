"""Going on without a dead rank by `scale_down` of vLLM pull request 46370, over processes that speak it and hold its rules; and
that a stock vLLM is never sent it."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from healer.targets.vllm.machine import State
from healer.targets.vllm.records import Part
from tests.vllm.deaths import broken_rules, engines, hang, kill
from tests.vllm.stand import Stand, standing

pytestmark = pytest.mark.timeout(120)


@asynccontextmanager
async def able(tmp_path: Path, ranks: int = 3) -> AsyncIterator[Stand]:
    """A group of vLLM with the pull request."""
    features = tmp_path / "group/faults"
    features.mkdir(parents=True)
    (features / "pr46370").touch()
    async with standing(tmp_path, ranks) as stand:
        assert stand.target.group.can_remove
        yield stand


@pytest.mark.parametrize("slot", [0, 1, 2])
async def test_the_others_serve_on_in_the_same_processes_whichever_rank_dies(tmp_path: Path, slot: int) -> None:
    async with able(tmp_path) as stand:
        rest = tuple(s for s in (0, 1, 2) if s != slot)
        before = engines(stand, *rest)
        await kill(stand, slot, replace=False)
        await stand.serves(*rest)
        assert [r.outcome for r in stand.reports("loss")] == ["committed"]
        assert [p.name for p in stand.reports("loss")[0].phases] == ["fence", "detect", "remove", "verify"]
        assert engines(stand, *rest) == before
        assert {h.slot: (h.dp_rank, h.incarnation) for h in stand.target.group.held()} == {s: (s, 1) for s in rest}
        assert broken_rules(tmp_path) == []
        rounds = list((tmp_path / "group/rounds").iterdir())
        assert len(rounds) == 1, "one round, one id"
        assert sorted(int(p.name) for p in rounds[0].iterdir()) == list(rest)


async def test_a_hung_rank_is_ended_before_the_others_are_told_to_go_on_without_it(tmp_path: Path) -> None:
    async with able(tmp_path) as stand:
        await hang(stand, 1, rest=(0, 2))
        assert broken_rules(tmp_path) == []


async def test_a_removed_rank_comes_back_with_a_restart_when_nobody_is_served(tmp_path: Path) -> None:
    async with able(tmp_path) as stand:
        await kill(stand, 1, replace=True)
        await stand.until(lambda: stand.target.group.removed == (1,))
        assert stand.target.observe().target == (0, 1, 2)
        await stand.until(lambda: stand.target.group.machine.state == State.RESTARTING)
        assert "nobody is served" in stand.target.group.machine.why
        await stand.serves(0, 1, 2)
        assert stand.target.group.removed == ()


async def test_an_order_brings_a_removed_rank_back_by_a_restart_and_never_by_a_scaling(tmp_path: Path) -> None:
    async with able(tmp_path) as stand:
        await kill(stand, 1, replace=False)
        await stand.serves(0, 2)
        stand.target.scale([0, 1, 2], reason="repaired")
        await stand.serves(0, 1, 2)
        assert not (tmp_path / "group/posts").exists(), "vLLM's own scaling was asked"
        assert [r.outcome for r in stand.reports("loss")] == ["committed", "committed"]


async def test_a_removal_that_fails_is_final_and_ends_in_a_restart_at_the_size_that_is_left(tmp_path: Path) -> None:
    async with able(tmp_path) as stand:
        stand.fault("cannot_remove_2")
        await kill(stand, 1, replace=False)
        await stand.until(lambda: [r.outcome for r in stand.reports("loss")] == ["failed", "committed"])
        assert "slot 2 cannot go on without the dead ranks: injected" in stand.reports("loss")[0].reason
        await stand.serves(0, 2)
        assert {h.slot: h.dp_rank for h in stand.target.group.held()} == {0: 0, 2: 1}


async def test_a_rank_that_dies_during_a_removal_ends_it_in_a_restart_without_both(tmp_path: Path) -> None:
    async with able(tmp_path, ranks=4) as stand:
        stand.fault("hang_remove")
        await kill(stand, 1, replace=False)
        await stand.until(lambda: (tmp_path / "group/rounds").exists())
        os.kill(stand.pid(3, Part.ENGINE), signal.SIGKILL)
        stand.target.lose([3], cause="process-death", detected=0.0, replace=False)
        await stand.until(lambda: stand.target.group.machine.state == State.RESTARTING)
        await stand.serves(0, 2)
        assert [h.dp_rank for h in stand.target.group.held()] == [0, 1]


async def test_a_daemon_that_dies_within_a_removal_leaves_nothing_half_done(tmp_path: Path) -> None:
    async with able(tmp_path) as stand:
        stand.fault("hang_remove")
        await kill(stand, 1, replace=False)
        await stand.until(lambda: (tmp_path / "group/rounds").exists())
        await stand.target.close()
        stand.fault("hang_remove", on=False)
        assert await stand.another().start() == "started 2 ranks"
        await stand.serves(0, 2)


async def test_the_next_daemon_knows_that_a_rank_was_removed(tmp_path: Path) -> None:
    async with able(tmp_path) as stand:
        await kill(stand, 1, replace=False)
        await stand.serves(0, 2)
        before = engines(stand, 0, 2)
        await stand.target.close()
        assert await stand.another().start() == "adopted 2 ranks"
        group = stand.target.group
        assert (group.removed, group.launch_size, group.can_remove) == ((1,), 3, True)
        assert engines(stand, 0, 2) == before


async def test_two_ranks_are_not_left_with_one(tmp_path: Path) -> None:
    async with able(tmp_path, ranks=2) as stand:
        await kill(stand, 1, replace=True)
        await stand.until(lambda: stand.target.group.machine.state == State.RESTARTING)
        assert "1 ranks are left, 2 are needed" in stand.target.group.machine.why
        await stand.serves(0, 1)


async def test_a_stock_vllm_is_never_told_to_go_on_without_a_rank(tmp_path: Path) -> None:
    async with standing(tmp_path, ranks=3) as stand:
        assert not stand.target.group.can_remove
        await kill(stand, 1, replace=False)
        await stand.serves(0, 2)
        assert "no scale_down" in stand.reports("loss")[0].reason
