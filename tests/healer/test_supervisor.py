"""What the supervisor does about ranks that die, hang, do not start or are complained about; orders, and its own end."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic import process
from elastic.controller.records import PeerFaultSeen, PhaseBegan, RankGone, SequenceKind
from elastic.errors import ElasticError, Infeasible
from elastic.view import Member
from healer.diagnosis import Health
from healer.evidence import What
from healer.journal import Kind
from healer.orders import Scale
from tests.healer.supervised import RULES, Rig, rig
from tests.healer.support import eventually

__all__ = ["rig"]


async def test_a_killed_rank_is_replaced_and_the_whole_story_is_in_the_journal(rig: Rig) -> None:
    rig.executor.signal(0, signal.SIGKILL)
    await rig.healed()
    assert rig.losses() == [("replace", (0,), "process-death")]
    (incident,) = rig.incidents()
    assert (incident.causes, incident.slots, incident.outcome) == (("process-death",), (0,), "healed")
    assert incident.pause_s == pytest.approx(0.012)
    assert incident.moved_bytes["peer"] == 1000
    assert incident.coverage_s is not None
    assert incident.capacity_s is not None
    kinds = rig.kinds()
    order = [kinds.index(k) for k in (Kind.EVIDENCE, Kind.VERDICT, Kind.DECISION, Kind.ACTION, Kind.OUTCOME)]
    assert order == sorted(order)


async def test_an_incident_stays_open_until_its_refill_has_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The view counts the joining rank while the commit is still under way."""
    held: list[Callable[[], None]] = []
    report = rig.executor._report

    def hold(kind: SequenceKind, *rest: Any) -> None:
        if kind == "join":
            rig.executor.on_event(PhaseBegan("join", "commit", 1, (0,), time.monotonic()))
            held.append(lambda: report(kind, *rest))
        else:
            report(kind, *rest)

    def all_healthy() -> bool:
        verdicts = rig.supervisor.status().verdicts
        return len(verdicts) == 4 and all(v.health == Health.HEALTHY for v in verdicts)

    monkeypatch.setattr(rig.executor, "_report", hold)
    rig.executor.signal(0, signal.SIGKILL)
    await eventually(lambda: bool(held) and all_healthy(), "the replacement is seen healthy")
    assert [one.outcome for one in rig.incidents()] == ["open"]
    held[0]()
    await rig.healed()
    assert rig.kinds().count(Kind.OUTCOME) == 2


async def test_a_death_reaches_the_target_within_the_call_that_reports_it(rig: Rig) -> None:
    member = rig.executor.status().slots[1].member
    assert member is not None
    os.kill(member.pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, member.pid, os.WEXITED | os.WNOWAIT)
    rig.supervisor.on_event(RankGone(member, "socket", "Z", time.monotonic()))
    assert ("replace", (1,), "process-death") in rig.losses()


async def test_a_death_reported_by_several_witnesses_is_acted_upon_once(rig: Rig) -> None:
    member = rig.executor.status().slots[1].member
    assert member is not None
    rig.executor.signal(1, signal.SIGKILL)
    await rig.healed()
    for witness in ("pidfd", "lifeline", "socket"):
        rig.supervisor.on_event(RankGone(member, witness, "X", time.monotonic()))
    await asyncio.sleep(0)
    assert len(rig.losses()) == 1
    assert len(rig.incidents()) == 1


async def test_a_stopped_rank_of_an_idle_group_is_replaced(rig: Rig) -> None:
    rig.executor.signal(3, signal.SIGSTOP)
    await rig.healed()
    assert rig.losses() == [("replace", (3,), "stopped")]


async def test_a_stop_shorter_than_the_stall_time_changes_nothing(rig: Rig) -> None:
    member = rig.executor.status().slots[3].member
    assert member is not None
    rig.executor.signal(3, signal.SIGSTOP)
    await eventually(lambda: process.state(member.pid, member.pid_start) == "T", "it is stopped")
    rig.executor.signal(3, signal.SIGCONT)
    await rig.rounds(20)
    await eventually(lambda: rig.supervisor.status().state == "ok", "healthy again")
    assert rig.losses() == []


async def test_two_ranks_killed_at_once_are_one_incident(rig: Rig) -> None:
    rig.executor.signal(1, signal.SIGKILL)
    rig.executor.signal(2, signal.SIGKILL)
    await rig.healed()
    assert sorted(slot for _, slots, _ in rig.losses() for slot in slots) == [1, 2]
    assert rig.incidents()[0].slots == (1, 2)


async def test_the_same_slot_killed_again_and_again_is_healed_again_and_again(rig: Rig) -> None:
    for count in range(1, 6):
        rig.executor.signal(0, signal.SIGKILL)
        await rig.healed(count)
    assert [slots for _, slots, _ in rig.losses()] == [(0,)] * 5
    assert {i.outcome for i in rig.incidents()} == {"healed"}


async def test_a_socket_that_closes_under_a_living_process_gets_nobody_killed_at_once(rig: Rig) -> None:
    member = rig.executor.status().slots[1].member
    assert member is not None
    rig.supervisor.on_event(RankGone(member, "socket", "S", time.monotonic()))
    # not later: a beat that is heard after the daemon itself was late speaks for the rank
    assert rig.supervisor.status().state == "degraded"
    await rig.rounds(20)
    assert rig.losses() == [], "it still beats"


async def test_a_process_that_dies_just_after_its_socket_closed_is_found_without_waiting_for_the_scan(rig: Rig) -> None:
    member = rig.executor.status().slots[1].member
    assert member is not None
    rig.executor._gone = lambda member: None  # type: ignore[method-assign]
    rig.supervisor.on_event(RankGone(member, "socket", "S", time.monotonic()))
    rig.executor.signal(1, signal.SIGKILL)
    await rig.healed()
    assert rig.losses() == [("replace", (1,), "process-death")]


async def test_a_peer_fault_report_of_a_healthy_rank_gets_nobody_killed(rig: Rig) -> None:
    reporter = rig.executor.status().slots[0].member
    assert reporter is not None
    rig.supervisor.on_event(PeerFaultSeen(reporter, 1, "disconnect", "ep", time.monotonic()))
    assert rig.losses() == []
    assert "1 other(s) complain" in rig.supervisor.status().why


async def test_a_replacement_that_never_starts_is_tried_again_and_then_the_group_shrinks(rig: Rig) -> None:
    rig.executor.fails_to_boot[2] = 99
    rig.executor.signal(2, signal.SIGKILL)
    await rig.healed()
    (incident,) = rig.incidents()
    assert incident.outcome == "reduced"
    assert rig.executor.status().target == (0, 1, 3)
    assert [c[1] for c in rig.executor.calls if c[0] == "scale"] == [(0, 1, 2, 3), (0, 1, 3)]


async def test_a_replacement_that_starts_at_the_second_attempt_leaves_the_group_whole(rig: Rig) -> None:
    rig.executor.fails_to_boot[2] = 1
    rig.executor.signal(2, signal.SIGKILL)
    await rig.healed()
    assert rig.incidents()[0].outcome == "healed"
    assert rig.executor.status().live == (0, 1, 2, 3)


async def test_an_action_that_the_target_refuses_is_left_to_a_human_and_not_repeated(rig: Rig) -> None:
    def refuse(target: object, *, reason: str) -> tuple[int, ...]:
        rig.executor.calls.append(("scale", (), reason))
        raise Infeasible("3 ranks hold fewer experts than the model has")

    rig.executor.fails_to_boot[2] = 1
    rig.executor.scale = refuse  # type: ignore[method-assign]
    rig.executor.signal(2, signal.SIGKILL)
    await eventually(lambda: any(c[0] == "scale" for c in rig.executor.calls), "the replacement is asked for")
    await rig.rounds(20)
    assert len([c for c in rig.executor.calls if c[0] == "scale"]) == 1
    assert "needs a human" in rig.supervisor.status().decision
    refused = [e.body["refused"] for e in rig.journal.recent(Kind.OUTCOME, 10) if "refused" in e.body]
    assert refused == ["3 ranks hold fewer experts than the model has"]


async def test_ranks_that_the_executor_gives_up_itself_are_an_incident_too(rig: Rig) -> None:
    for phase in ("park", "commit", "resume"):
        rig.supervisor.on_event(PhaseBegan("loss", phase, 1, (1,), time.monotonic()))
    (incident,) = rig.incidents()
    assert (incident.causes, incident.slots, incident.outcome) == (("executor",), (1,), "open")
    assert rig.kinds().count(Kind.DECISION) == 1, "said once, not for every phase"
    assert rig.losses() == []


async def test_ranks_that_the_executor_gives_up_during_an_incident_belong_to_it(rig: Rig) -> None:
    rig.executor._reach = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    rig.executor.signal(2, signal.SIGKILL)
    await eventually(lambda: len(rig.losses()) == 1, "the loss is handled")
    rig.supervisor.on_event(PhaseBegan("loss", "park", 1, (0,), time.monotonic()))
    (incident,) = rig.incidents()
    assert (incident.causes, incident.slots) == (("process-death", "executor"), (0, 2))


async def test_silence_while_the_daemon_itself_was_stopped_condemns_nobody(rig: Rig) -> None:
    rig.clock.skipped_s += 1.5
    await eventually(
        lambda: any(e.body["what"] == What.TELEMETRY_LOST for e in rig.journal.recent(Kind.EVIDENCE, 50)),
        "the daemon notices that it was late",
    )
    await eventually(lambda: rig.supervisor.status().state == "ok", "healthy again")
    assert rig.losses() == []
    assert rig.incidents() == []


async def test_a_failure_inside_the_daemon_does_not_reach_the_target_and_healing_goes_on(rig: Rig) -> None:
    nobody = Member(1, 99, 1, 1, "")
    rig.supervisor.on_event("no event at all")  # type: ignore[arg-type]
    rig.supervisor.on_event(RankGone(nobody, "no such witness", "Z", time.monotonic()))
    rig.executor.signal(1, signal.SIGKILL)
    await rig.healed()


async def test_a_dry_run_observes_and_never_acts(tmp_path: Path) -> None:
    rig = Rig(tmp_path, RULES + "  dryRun: true\n")
    try:
        await rig.start()
        rig.executor.signal(1, signal.SIGKILL)
        await eventually(lambda: "dry run" in rig.supervisor.status().decision, "it says what it would do")
        with pytest.raises(Infeasible, match="dryRun"):
            rig.supervisor.order(Scale(ranks=2), who="test")
        assert rig.executor.calls == []
    finally:
        await rig.end()


async def test_a_request_to_scale_is_carried_out_within_bounds_only(tmp_path: Path) -> None:
    rig = Rig(tmp_path, RULES + "  bounds: {minRanks: 2}\n")
    try:
        await rig.start()
        assert rig.supervisor.order(Scale(ranks=3), who="test").target == (0, 1, 2)
        for wanted, why in ((1, "below spec.bounds.minRanks 2"), (99, "outside 1..6")):
            with pytest.raises(Infeasible, match=why):
                rig.supervisor.order(Scale(ranks=wanted), who="test")
        await eventually(lambda: rig.executor.status().live == (0, 1, 2), "three ranks")
        assert {"operator", "refused"} <= {e.body["reason"] for e in rig.journal.recent(Kind.DECISION, 10)}
        assert rig.losses() == []
        assert rig.incidents() == [], "a planned change is no incident"
    finally:
        await rig.end()


async def test_an_incident_that_was_open_when_the_daemon_died_is_closed_by_its_successor(tmp_path: Path) -> None:
    first = Rig(tmp_path)
    await first.start()
    first.executor._reach = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    first.executor.signal(1, signal.SIGKILL)
    await eventually(lambda: len(first.losses()) == 1, "the loss is handled")
    await first.end()
    second = Rig(tmp_path)
    try:
        await second.start()
        assert [(i.id, i.outcome) for i in second.incidents()] == [("inc-1", "healed")]
    finally:
        await second.end()


async def test_ending_the_daemon_leaves_serving_untouched_and_stopping_ends_it(tmp_path: Path) -> None:
    for stop in (False, True):
        rig = Rig(tmp_path)
        await rig.start()
        rig.supervisor.end(stop=stop, who="test")
        assert rig.task is not None
        await asyncio.wait_for(rig.task, 30)
        assert (rig.executor.closed, rig.executor.stopped) == (not stop, stop)
        await rig.end()


async def test_a_target_that_cannot_start_ends_the_daemon_with_its_reason(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.executor.start_error = "slot 1 dies at every start: no memory"
    with pytest.raises(ElasticError, match="no memory"):
        await asyncio.wait_for(rig.supervisor.run(), 30)
    assert rig.executor.closed
    await rig.end()
