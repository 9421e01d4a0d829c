"""The target over a group whose ranks have the plugin: real processes that speak its routes and hold its rules."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from elastic.controller.records import BootFailed
from elastic.vllm.client import Coordination, NoAnswer
from healer.targets.vllm.machine import State
from tests.vllm.deaths import broken_rules, engines, hang, kill
from tests.vllm.stand import FAKE, Stand, standing

pytestmark = pytest.mark.timeout(120)
PYTHON = """\
#!/bin/sh
case "$1 $2" in
-c*) echo '{{"parts": {{"engine": {{"state": "{state}", "reason": "{reason}"}}}}, "plugins": ["theirs"]}}' ;;
"-m elastic.vllm.coordination") exec {python} -S -E {coordination} "$3" ;;
*) shift; exec {python} -S -E {fake} "$@" ;;
esac
"""
"""In the place of vLLM's interpreter."""


@asynccontextmanager
async def with_plugin(folder: Path, ranks: int = 3, *, state: str = "ready", reason: str = "") -> AsyncIterator[Stand]:
    interpreter = folder / "python"
    coordination = FAKE.with_name("fake_coordination.py")
    interpreter.write_text(
        PYTHON.format(state=state, reason=reason, python=sys.executable, coordination=coordination, fake=FAKE)
    )
    interpreter.chmod(0o755)

    def command(stand: Stand) -> None:
        (folder / "vllm").write_text(f"#!{interpreter}\n")

    async with standing(folder, ranks, prepare=command) as stand:
        yield stand


def orders(folder: Path) -> list[str]:
    return [json.loads(line)["do"] for line in (folder / "group/coordination").read_text().splitlines()]


@pytest.mark.parametrize("slot", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_lost_rank_is_replaced_while_the_others_keep_their_processes_and_requests(
    tmp_path: Path, slot: int
) -> None:
    async with with_plugin(tmp_path) as stand:
        rest = tuple(s for s in (0, 1, 2) if s != slot)
        before = engines(stand, *rest)
        await kill(stand, slot, replace=True)
        await stand.until(lambda: stand.target.observe().live == rest)
        await stand.serves(0, 1, 2)
        assert engines(stand, *rest) == before
        assert stand.incarnations() == dict.fromkeys(rest, 0) | {slot: 1}, "the router would send their requests again"
        assert {h.slot: h.dp_rank for h in stand.target.group.held()} == {0: 0, 1: 1, 2: 2}
        assert [(r.kind, r.outcome) for k in ("loss", "join") for r in stand.reports(k)] == [
            ("loss", "committed"),
            ("join", "committed"),
        ]
        assert [p.name for p in stand.reports("loss")[0].phases] == ["fence", "order", "verify"]
        assert broken_rules(tmp_path) == []
        assert stand.target.group.holes == {}
        assert not stand.target.group.unbalanced


async def test_a_hung_rank_is_ended_before_the_others_go_on(tmp_path: Path) -> None:
    async with with_plugin(tmp_path) as stand:
        await hang(stand, 1, rest=(0, 2))
        assert broken_rules(tmp_path) == []
        assert stand.incarnations() == {0: 0, 2: 0}


async def test_a_rank_that_dies_while_the_others_go_on_is_left_out_too(tmp_path: Path) -> None:
    async with with_plugin(tmp_path, ranks=4) as stand:
        stand.fault("slow_order")
        await kill(stand, 1, replace=False)
        await stand.until(lambda: (tmp_path / "group/orders").exists())
        before = engines(stand, 0, 2)
        await kill(stand, 3, replace=False)
        stand.fault("slow_order", on=False)
        await stand.serves(0, 2)
        assert engines(stand, 0, 2) == before
        assert [r.outcome for r in stand.reports("loss")] == ["committed"]
        assert stand.target.observe().target == (0, 2)


async def test_ranks_that_cannot_go_on_are_started_anew(tmp_path: Path) -> None:
    async with with_plugin(tmp_path) as stand:
        stand.fault("vote_no")
        await kill(stand, 1, replace=True)
        await stand.until(lambda: stand.target.group.machine.state == State.RESTARTING)
        stand.fault("vote_no", on=False)
        await stand.serves(0, 1, 2)
        assert [r.outcome for r in stand.reports("loss")] == ["failed", "committed"]
        assert stand.target.group.holes == {}


async def test_a_rank_that_runs_stock_leaves_the_restart_and_is_sent_no_order(tmp_path: Path) -> None:
    async with with_plugin(tmp_path) as stand:
        stand.fault("stock_2")
        await kill(stand, 1, replace=True)
        await stand.until(lambda: stand.target.group.machine.state == State.RESTARTING)
        await stand.serves(0, 1, 2)
        assert not (tmp_path / "group/orders").exists()


async def test_a_fault_of_one_engine_costs_no_request_and_no_restart(tmp_path: Path) -> None:
    async with with_plugin(tmp_path) as stand:
        before = engines(stand, 0, 1, 2)
        stand.fault("unhealthy_1")
        await stand.until(lambda: stand.reports("loss"))
        assert [r.outcome for r in stand.reports("loss")] == ["committed"]
        assert engines(stand, 0, 1, 2) == before
        assert stand.incarnations() == {0: 0, 1: 0, 2: 0}


async def test_a_joiner_that_fails_costs_the_others_nothing_and_is_counted(tmp_path: Path) -> None:
    async with with_plugin(tmp_path) as stand:
        stand.fault("bad_joiner")
        before = engines(stand, 0, 2)
        await kill(stand, 1, replace=True)
        await stand.until(lambda: any(isinstance(e, BootFailed) and e.slot == 1 for e in stand.events))
        await stand.serves(0, 2)
        assert engines(stand, 0, 2) == before
        assert [r.outcome for r in stand.reports("join")] == ["rolled-back"]
        assert orders(tmp_path)[-1] == "end"


async def test_after_a_commit_that_failed_those_who_live_are_brought_together_again(tmp_path: Path) -> None:
    async with with_plugin(tmp_path) as stand:
        before = engines(stand, 0, 2)
        stand.fault("no_commit_2")
        await kill(stand, 1, replace=True)
        await stand.until(lambda: stand.reports("join"))
        assert stand.reports("join")[0].outcome == "rolled-back"
        assert engines(stand, 0, 2) == before
        assert len(list((tmp_path / "group/orders").iterdir())) == 2, "one for the loss, one after the commit"
        assert broken_rules(tmp_path) == []


async def test_a_rank_that_dies_while_another_is_replaced_comes_first(tmp_path: Path) -> None:
    async with with_plugin(tmp_path, ranks=4) as stand:
        stand.fault("no_boot_1")
        await kill(stand, 1, replace=False)
        await stand.serves(0, 2, 3)
        before = engines(stand, 0, 2)
        stand.fault("no_boot_1", on=False)
        stand.target.scale([0, 1, 2, 3], reason="repaired")
        await stand.until(lambda: stand.target.group.machine.state == State.FILLING)
        await kill(stand, 3, replace=True)
        await stand.serves(0, 1, 2, 3)
        assert engines(stand, 0, 2) == before
        assert broken_rules(tmp_path) == []


async def test_the_next_daemon_fills_the_place_that_the_last_one_left_empty(tmp_path: Path) -> None:
    async with with_plugin(tmp_path) as stand:
        await kill(stand, 1, replace=False)
        await stand.serves(0, 2)
        before = engines(stand, 0, 2)
        await stand.target.close()
        assert await stand.another().start() == "adopted 2 ranks"
        stand.target.scale([0, 1, 2], reason="repaired")
        await stand.serves(0, 1, 2)
        assert engines(stand, 0, 2) == before
        assert orders(tmp_path).count("start") == 1, "the coordination process was adopted"


async def test_a_vllm_that_is_not_the_known_one_is_started_stock_and_healed_by_a_restart(tmp_path: Path) -> None:
    async with with_plugin(tmp_path, state="stock", reason="this is 0.32.0") as stand:
        await kill(stand, 1, replace=True)
        await stand.until(lambda: stand.target.group.machine.state == State.RESTARTING)
        await stand.serves(0, 1, 2)
        assert not (tmp_path / "group/coordination").exists()


async def test_nothing_of_the_coordination_outlives_the_group(tmp_path: Path) -> None:
    async with with_plugin(tmp_path) as stand:
        link = Coordination(tmp_path / "run")
        found = await link.info(deadline_s=5)
    await asyncio.sleep(0)
    with pytest.raises(NoAnswer):
        await link.info(deadline_s=1)
    assert found.pid
    assert stand.target.group.coordinated is False
