"""The target over real processes that speak vLLM's wire format: what is seen, what is done, and what is left behind."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from elastic import process
from elastic.controller.records import BootFailed, PhaseBegan, RankBeat, RankGone
from elastic.errors import ElasticError, Infeasible
from healer.targets.vllm import scaling
from healer.targets.vllm.endpoints import Gate
from healer.targets.vllm.machine import State
from healer.targets.vllm.records import Part
from tests.vllm.stand import Stand, standing

pytestmark = pytest.mark.timeout(120)


async def test_a_group_starts_answers_canaries_and_ends_without_a_trace(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        await stand.serves(0, 1)
        await stand.until(lambda: {e.member.slot for e in stand.events if isinstance(e, RankBeat)} == {0, 1})
        assert [r.outcome for r in stand.reports("form")] == ["committed"]
        assert stand.target.address().startswith("http://")
        logs = sorted(p.name for p in (tmp_path / "run/logs").glob("rank-*"))
        assert logs == ["rank-0.0.log", "rank-1.0.log"]


async def test_scaling_reaches_three_four_and_two_ranks_and_ends_retired_servers(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        for size in (3, 4, 2):
            assert len(stand.target.scale(size, reason="test")) == size
            await stand.serves(*range(size))
        assert [r.outcome for r in (*stand.reports("join"), *stand.reports("retire"))] == ["committed"] * 3
        assert sorted(h.slot for h in stand.target.group.held()) == [0, 1]
        assert stand.incarnations() == {0: 0, 1: 0}, "who stayed is the same process"
        assert not [e for e in stand.events if isinstance(e, RankGone)], "engines that leave end, and are no loss"


async def test_an_engine_that_dies_while_it_is_to_leave_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "LEAVE_S", 0.5)
    async with standing(tmp_path) as stand:
        stand.target.scale(3, reason="test")
        await stand.serves(0, 1, 2)
        stand.fault("stuck_commit_0")
        stand.target.scale(2, reason="test")
        await stand.until(lambda: any(r.look and r.look.gate == Gate.SCALING for r in stand.target.group.live()))
        os.kill(stand.pid(2, Part.ENGINE), signal.SIGKILL)
        await stand.until(lambda: stand.reports("retire"))
        assert "slot 2 died while the group scaled" in stand.reports("retire")[0].reason
        stand.fault("stuck_commit_0", on=False)
        stand.clean()
        await stand.serves(0, 1)


@pytest.mark.parametrize("part", [Part.API, Part.ENGINE, Part.WORKER, Part.COORDINATOR])
async def test_the_death_of_any_part_of_a_rank_is_seen_at_once_though_health_may_stay_200(
    tmp_path: Path, part: Part
) -> None:
    async with standing(tmp_path) as stand:
        slot = 0 if part == Part.COORDINATOR else 1
        os.kill(stand.pid(slot, part), signal.SIGKILL)
        await stand.until(lambda: any(isinstance(e, RankGone) for e in stand.events), 15.0)
        gone = next(e for e in stand.events if isinstance(e, RankGone))
        assert (gone.member.slot, gone.witness) == (slot, "pidfd")
        stand.target.lose([slot], cause="process-death", detected=gone.at, replace=True)
        await stand.until(lambda: stand.incarnations() == {0: 1, 1: 1})
        await stand.serves(0, 1)
        assert [r.outcome for r in stand.reports("loss")] == ["committed"]


async def test_a_server_that_ignores_sigterm_after_its_engine_died_is_killed(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        stand.fault("deaf")
        old = stand.pid(1)
        start = process.start_time(old)
        os.kill(stand.pid(1, Part.ENGINE), signal.SIGKILL)
        await stand.until(lambda: any(isinstance(e, RankGone) for e in stand.events))
        await stand.target.stop()
        assert not process.is_alive(old, start)


async def test_a_stopped_engine_is_named_by_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        engine = stand.pid(1, Part.ENGINE)
        os.kill(engine, signal.SIGSTOP)
        try:

            def accused() -> bool:
                beats = [e for e in stand.events if isinstance(e, RankBeat) and e.beat.waiting_on]
                return any((e.member.slot, e.beat.waiting_on) == (0, (1,)) for e in beats)

            await stand.until(accused)
            last = max(e.at for e in stand.events if isinstance(e, RankBeat) and e.member.slot == 1)
            await stand.until(lambda: max(e.at for e in stand.events if isinstance(e, RankBeat)) > last + 0.5)
        finally:
            os.kill(engine, signal.SIGCONT)


async def test_a_group_that_hangs_as_a_whole_is_started_anew_although_every_health_is_200(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        stand.fault("hang")
        await stand.until(lambda: stand.target.group.machine.state == State.RESTARTING)
        stand.fault("hang", on=False)
        await stand.until(lambda: stand.incarnations() == {0: 1, 1: 1})
        await stand.serves(0, 1)
        assert any(isinstance(e, PhaseBegan) and e.kind == "loss" and e.slots == (0, 1) for e in stand.events)


async def test_a_transient_fault_is_retried_on_every_rank_in_one_round(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        stand.fault("unhealthy")
        await stand.until(lambda: stand.reports("loss"))
        assert [r.outcome for r in stand.reports("loss")] == ["committed"]
        assert [(tmp_path / f"group/retries/{r}").read_text() for r in (0, 1)] == ["1", "1"]
        assert stand.incarnations() == {0: 1, 1: 1}, "their requests are lost, so they count as new"


@pytest.mark.parametrize("lie", ["stale_1", "late_1", "mute_1"], ids=["wrong", "wrong the second time", "nothing"])
async def test_healthy_after_a_retry_is_not_believed_without_the_right_tokens_twice(tmp_path: Path, lie: str) -> None:
    async with standing(tmp_path) as stand:
        stand.fault(lie)
        stand.fault("unhealthy")
        await stand.until(lambda: stand.reports("loss"))
        stand.fault("unhealthy", on=False)
        stand.fault(lie, on=False)
        await stand.until(lambda: len(stand.reports("loss")) == 2)
        assert [r.outcome for r in stand.reports("loss")] == ["failed", "committed"]
        await stand.serves(0, 1)


async def test_a_fault_after_a_scaling_is_never_retried(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        stand.target.scale(3, reason="test")
        await stand.serves(0, 1, 2)
        stand.fault("unhealthy")
        await stand.until(lambda: stand.target.group.machine.state == State.RESTARTING)
        stand.fault("unhealthy", on=False)
        stand.clean()
        await stand.serves(0, 1, 2)
        assert not (tmp_path / "group/retries").exists()


async def test_wrong_tokens_from_a_rank_that_says_it_is_well_end_in_a_restart(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        stand.fault("wrong_1")
        await stand.until(lambda: stand.target.group.machine.state == State.RESTARTING)
        stand.fault("wrong_1", on=False)
        await stand.until(lambda: stand.incarnations() == {0: 1, 1: 1})
        await stand.serves(0, 1)


async def test_a_wedged_gate_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        stand.fault("wedged_1")
        await stand.until(lambda: stand.target.group.machine.state == State.RESTARTING)
        stand.fault("wedged_1", on=False)
        await stand.until(lambda: stand.incarnations() == {0: 1, 1: 1})


@pytest.mark.parametrize("failure", ["fail", "late_drain"], ids=["500", "408"])
async def test_a_failed_commit_which_leaves_503_for_ever_ends_in_a_restart_at_the_wanted_size(
    tmp_path: Path, failure: str
) -> None:
    async with standing(tmp_path) as stand:
        stand.fault(failure)
        stand.target.scale(3, reason="test")
        await stand.until(lambda: stand.target.group.machine.state == State.RESTARTING)
        stand.fault(failure, on=False)
        stand.clean()
        await stand.serves(0, 1, 2)
        assert [r.outcome for r in stand.reports("join")] == ["failed"]
        assert [r.outcome for r in stand.reports("loss")] == ["committed"]


async def test_a_fault_within_a_commit_that_only_a_log_tells_of_is_not_waited_for(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        stand.fault("stuck_commit")
        stand.target.scale(3, reason="test")
        await stand.until(lambda: stand.target.group.machine.state == State.RESTARTING, 8.0)
        assert "met a fault while the group scaled" in stand.target.group.machine.why
        stand.fault("stuck_commit", on=False)
        stand.clean()
        await stand.serves(0, 1, 2)


async def test_a_joiner_that_never_boots_costs_the_others_nothing(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        stand.fault("no_boot_2")
        stand.target.scale(3, reason="test")
        await stand.until(lambda: any(isinstance(e, BootFailed) for e in stand.events))
        failed = next(e for e in stand.events if isinstance(e, BootFailed))
        assert failed.slot == 2
        assert "injected at start" in failed.why
        await stand.until(lambda: not stand.target.observe().sequence)
        assert stand.target.observe().live == (0, 1)
        assert stand.incarnations() == {0: 0, 1: 0}
        assert not (tmp_path / "group/posts/3").exists(), "vLLM was not asked"


async def test_a_group_whose_slot_cannot_start_goes_on_without_it(tmp_path: Path) -> None:
    stand = Stand(tmp_path, ranks=3)
    stand.fault("no_boot_2")
    try:
        assert await stand.target.start() == "started 2 ranks"
        await stand.serves(0, 1)
        assert [(e.attempt, e.gave_up) for e in stand.events if isinstance(e, BootFailed)] == [(1, False), (2, True)]
        stand.fault("no_boot_2", on=False)
        stand.target.scale([0, 1, 2], reason="repaired")
        await stand.serves(0, 1, 2)
    finally:
        await stand.target.stop()


async def test_a_group_that_cannot_start_leaves_nothing_running_and_says_why(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.fault("no_boot")
    with pytest.raises(ElasticError, match="injected at start"):
        await stand.target.start()
    assert stand.target.group.held() == []

    def left() -> list[int]:
        lines = {p.pid: p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])}
        return [pid for pid, line in lines.items() if any(str(tmp_path) in word for word in line)]

    await stand.until(lambda: not left())


async def test_a_refused_size_changes_nothing(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        stand.fault("refuse")
        stand.target.scale(3, reason="test")
        await stand.until(lambda: stand.reports("join"))
        assert stand.reports("join")[0].outcome == "rolled-back"
        assert stand.incarnations() == {0: 0, 1: 0}
        for wanted in (1, 5, [0, 9], True):
            with pytest.raises(Infeasible):
                stand.target.scale(wanted, reason="test")


async def test_only_the_highest_ranks_may_leave_and_healer_says_so(tmp_path: Path) -> None:
    async with standing(tmp_path, ranks=3) as stand:
        with pytest.raises(Infeasible, match="last ranks only"):
            stand.target.scale([1, 2], reason="test")


async def test_another_controller_makes_healer_stand_still_and_say_so(tmp_path: Path) -> None:
    async with standing(tmp_path, ranks=3) as stand:
        servers = [rank.endpoints for rank in stand.target.group.live()]
        await asyncio.gather(*(server.scale(2, deadline_s=10.0) for server in servers))
        await stand.until(lambda: stand.target.group.machine.state == State.YIELDED)
        assert "another controller" in stand.target.observe().gateway
        with pytest.raises(Infeasible, match="another controller"):
            stand.target.scale(3, reason="test")
        pids = stand.pids()
        stand.target.lose([1], cause="hang", detected=0.0, replace=True)
        await asyncio.sleep(0.5)
        assert stand.pids() == pids


async def test_a_second_daemon_adopts_the_same_processes(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        stand.target.scale(3, reason="test")
        await stand.serves(0, 1, 2)
        before = stand.pids()
        await stand.target.close()
        assert await stand.another().start() == "adopted 3 ranks"
        assert stand.pids() == before
        await stand.serves(0, 1, 2)
        assert stand.target.group.scaled, "so that a fault is not retried"


async def test_a_rank_that_died_while_nobody_looked_is_reported_by_the_next_daemon(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        await stand.target.close()
        os.kill(stand.pid(1), signal.SIGKILL)
        stand.events.clear()
        await stand.another().start()
        await stand.until(lambda: any(isinstance(e, RankGone) and e.member.slot == 1 for e in stand.events))
        stand.target.lose([1], cause="process-death", detected=0.0, replace=True)
        await stand.until(lambda: stand.incarnations() == {0: 1, 1: 1})


async def test_a_group_goes_on_around_a_slot_that_is_given_up_and_takes_it_back_later(tmp_path: Path) -> None:
    async with standing(tmp_path, ranks=3) as stand:
        os.kill(stand.pid(1, Part.WORKER), signal.SIGKILL)
        await stand.until(lambda: any(isinstance(e, RankGone) for e in stand.events))
        stand.target.lose([1], cause="gpu-lost", detected=0.0, replace=False)
        await stand.serves(0, 2)
        assert {h.slot: h.dp_rank for h in stand.target.group.held()} == {0: 0, 2: 1}
        stand.clean()
        stand.target.scale([0, 1, 2], reason="repaired")
        await stand.serves(0, 1, 2)
        assert {h.slot: h.dp_rank for h in stand.target.group.held()} == {0: 0, 1: 2, 2: 1}
        assert stand.target.scale(2, reason="test") == (0, 2), "vLLM can drop its last rank only, which is in slot 1"
        await stand.serves(0, 2)


async def test_the_router_is_told_who_serves_and_drops_a_lost_rank_at_once(tmp_path: Path) -> None:
    def routes() -> dict[int, bool]:
        config = json.loads((tmp_path / "run/routes.json").read_text())
        return {rank["slot"]: rank["admit"] for rank in config["ranks"]}

    async with standing(tmp_path) as stand:
        await stand.until(lambda: routes() == {0: True, 1: True})
        stand.fault("hang")
        os.kill(stand.pid(1, Part.ENGINE), signal.SIGKILL)
        await stand.until(lambda: 1 not in routes(), 15.0)
        stand.fault("hang", on=False)


async def test_a_rank_that_aborts_answers_with_200_is_not_believed(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        stand.fault("abort_1")
        rank = stand.target.group.ranks[1]
        await stand.until(lambda: rank.canary is not None and not rank.canary.ok)
        assert rank.canary is not None
        assert "abort" in rank.canary.why
        stand.target.scale(3, reason="test")
        await asyncio.sleep(1.0)
        assert not (tmp_path / "group/posts/3").exists(), "nobody is asked to scale with such a rank"
        stand.fault("abort_1", on=False)
        await stand.serves(0, 1, 2)


async def test_stop_without_a_daemon_ends_what_one_had_left(tmp_path: Path) -> None:
    async with standing(tmp_path) as stand:
        await stand.until(lambda: (tmp_path / "run/router.json").exists())
        before = stand.pids()
        await stand.target.close()
        command = [sys.executable, "-m", "healer.cli", "stop", "--run-dir", str(tmp_path / "run")]
        done = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        out, _ = await done.communicate()
        assert out.decode() == "no daemon runs here; ended 3 servers that one had left serving\n"
        assert not [pid for pid, start in before if process.is_alive(pid, start)]
