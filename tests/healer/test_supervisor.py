import asyncio
import contextlib
import io
import os
import re
import signal
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from elastic import process
from elastic.controller.records import Event, PeerFaultSeen, PhaseBegan, RankGone, SequenceKind
from elastic.errors import ElasticError, Infeasible
from elastic.view import Member
from healer.clock import SystemClock
from healer.diagnosis import Cause, Hardware, Health
from healer.evidence import Evidence, GpuRef, Severity, Subject, What
from healer.incidents import IncidentSummary, summarise
from healer.journal import Journal, Kind, open_readonly, recent
from healer.machine import Machine
from healer.orders import Scale
from healer.policy.load import parse_policy
from healer.replay import Replay
from healer.sensors import Scribe, SensorCost, SensorState, SensorStatus, ref
from healer.supervisor import Supervisor
from healer.tables import show_status, show_timeline
from healer.targets.embedded import EmbeddedTarget
from healer.trace import EvidenceLine, Recorder, Trace, ViewLine
from tests.healer.scripted import ScriptedExecutor
from tests.healer.stage import HOST, advise, gpu
from tests.healer.support import POLICY, eventually

FAST = "  detection: {heartbeatInterval: 20ms, stallAfter: 300ms, silentAfter: 3s, processInterval: 200ms}\n"
RULES = "  healing: {rules: [{name: all, actions: [replace, scale-down, human], maxAttempts: 2, backoff: 50ms}]}\n"


class SkippingClock(SystemClock):
    """The real one, which can be moved on: as if nobody had run meanwhile."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.skipped_s


class GpuWord(Machine):
    """Four GPUs with a rank on each, and a sensor that says what a test has it say."""

    name = "nvml"

    def __init__(self, clock: SystemClock) -> None:
        super().__init__((self,))
        self.clock, self.scribe = clock, Scribe("nvml", clock)
        self.pending: list[Evidence] = []
        self.asked: list[GpuRef] = []
        self.wake: Callable[[], None] = lambda: None
        self.fails = False
        self.stopped = False

    def start(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    async def stop(self) -> None:
        self.stopped = True

    def watch(self, members: Collection[Member]) -> None: ...

    def tick(self) -> list[Evidence]:
        if self.fails:
            raise RuntimeError("a defect of the sensor")
        found, self.pending = self.pending, []
        return found

    def status(self) -> SensorStatus:
        return SensorStatus(self.name, SensorState.OK, "", 0.0, 1, SensorCost(0.0, 0.0, 0.0))

    def ask(self, gpu: GpuRef, at: float) -> None:
        self.asked.append(gpu)

    def hardware(self, members: Collection[Member]) -> Hardware:
        placed = {ref(m): gpu(m.slot) for m in members if m.slot < 4 and m.incarnation == 0}
        return Hardware(gpus=tuple(gpu(n) for n in range(4)), placed=placed, host=HOST, advise=advise)

    def say(self, of: Subject, what: What, value: str | int | float, severity: Severity = Severity.CRITICAL) -> None:
        self.pending.append(self.scribe.note(of, what, value, severity))
        self.wake()


class Rig:
    """A supervisor in this loop over a scripted executor with real processes."""

    def __init__(self, folder: Path, more: str = RULES, *, record: Path | None = None) -> None:
        self.policy = parse_policy(POLICY + FAST + more, name="p.yaml", base=folder)
        self.clock = SkippingClock()
        self.journal = Journal.open(folder / "journal.db", self.clock)
        self.executors: list[ScriptedExecutor] = []
        self.nvml = GpuWord(self.clock)
        recorder = Recorder(record, self.policy.limits) if record else None
        self.supervisor = Supervisor(
            self.policy, self._make, self.journal, self.clock, machine=self.nvml, recorder=recorder
        )
        self.task: asyncio.Task[None] | None = None

    def _make(self, on_event: Callable[[Event], None]) -> EmbeddedTarget:
        def make(*args: object, **options: object) -> ScriptedExecutor:
            self.executors.append(ScriptedExecutor(self.policy.group(), on_event))
            self.executors[-1].clock = self.clock
            return self.executors[-1]

        return EmbeddedTarget(self.policy.group(), on_event, make)  # type: ignore[arg-type]

    @property
    def executor(self) -> ScriptedExecutor:
        return self.executors[-1]

    async def start(self) -> None:
        self.task = asyncio.create_task(self.supervisor.run())
        await eventually(lambda: self.supervisor.status().state == "ok", "the group is healthy")

    async def rounds(self, count: int) -> None:
        """The supervisor's loop goes round so often, in real time: what it could have done by then it has done."""
        pattern = re.compile(r"^healer_loop_late_seconds_count (\S+)$", re.MULTILINE)

        def gone() -> float:
            found = pattern.search(self.supervisor.metrics.render().decode())
            return float(found[1]) if found else 0.0

        end = gone() + count
        await eventually(lambda: gone() >= end, f"{count} rounds of the loop")

    def losses(self) -> list[tuple[str, tuple[int, ...], str]]:
        return [call for call in self.executor.calls if call[0] != "scale"]

    def incidents(self) -> list[IncidentSummary]:
        return summarise(self.journal.incidents(limit=50))

    async def healed(self, count: int = 1) -> None:
        await eventually(
            lambda: len(self.incidents()) == count and self.supervisor.status().state == "ok", "the group is healed"
        )

    def kinds(self) -> list[str]:
        (incident,) = self.incidents()
        return [entry.kind for entry in self.journal.timeline(incident.id)]

    async def end(self) -> None:
        self.supervisor.end(stop=False, who="test")
        if self.task is not None:
            with contextlib.suppress(ElasticError):
                await asyncio.wait_for(self.task, 30)
        self.executor.end()
        self.journal.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    found = Rig(tmp_path)
    try:
        await found.start()
        yield found
    finally:
        await found.end()


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


async def test_the_intent_is_on_disk_before_the_target_is_told(rig: Rig, tmp_path: Path) -> None:
    seen: list[int] = []

    def lose(*args: object, **kwargs: object) -> None:
        with contextlib.closing(open_readonly(tmp_path / "journal.db")) as reader:
            seen.extend(entry.body["slots"][0] for entry in recent(reader, Kind.ACTION, 5))

    rig.executor.lose = lose  # type: ignore[method-assign]
    rig.executor.signal(2, signal.SIGKILL)
    await eventually(lambda: bool(seen), "the target is told")
    assert seen == [2]


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
    await rig.rounds(20)
    assert rig.losses() == [], "it still beats"
    assert rig.supervisor.status().state == "degraded"


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


async def test_a_healthy_group_is_not_written_about(rig: Rig) -> None:
    before = rig.journal.entries
    await rig.rounds(60)
    assert rig.journal.entries == before


async def test_a_failure_inside_the_daemon_does_not_reach_the_target_and_healing_goes_on(rig: Rig) -> None:
    nobody = Member(1, 99, 1, 1, "")
    rig.supervisor.on_event("no event at all")  # type: ignore[arg-type]
    rig.supervisor.on_event(RankGone(nobody, "no such witness", "Z", time.monotonic()))
    rig.executor.signal(1, signal.SIGKILL)
    await rig.healed()


async def test_a_journal_that_cannot_be_written_never_stops_healing(rig: Rig, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    rig.executor.signal(1, signal.SIGKILL)
    await eventually(lambda: len(rig.losses()) == 1, "the rank is replaced")
    await eventually(lambda: "journal cannot be written" in rig.supervisor.status().why, "it says so")
    other.execute("COMMIT")
    other.close()
    await rig.healed()
    assert Kind.ACTION in rig.kinds()


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


# --- GPUs -------------------------------------------------------------------------------------------------------------


async def test_a_rank_on_a_gpu_that_the_driver_gives_up_is_replaced_for_that_reason(rig: Rig) -> None:
    rig.nvml.say(gpu(2), What.RECOVERY_ACTION, 1)
    await eventually(lambda: rig.losses() == [("replace", (2,), "recovery-action")], "the rank is replaced")
    await rig.healed()
    assert rig.incidents()[0].causes == ("recovery-action",)
    status = rig.supervisor.status()
    assert [(v.subject, v.health) for v in status.gpus if v.health != Health.HEALTHY] == [(gpu(2), Health.UNHEALTHY)]
    assert status.state == "ok", "no rank is on the GPU any more"
    shown = Console(width=100, record=True, file=io.StringIO())
    show_status(shown, msgspec.to_builtins(status))
    show_timeline(shown, msgspec.to_builtins(rig.incidents()[0]), msgspec.to_builtins(rig.journal.timeline("inc-1")))
    text = shown.export_text()
    assert max(map(len, text.splitlines())) <= 100
    for words in ("must not be used", "recovery-action 1, from nvml", f"{gpu(2)}: recovery-action", "0000:3b:00.0"):
        assert words in text, words
    assert f'healer_health{{health="unhealthy",kind="gpu",subject="{gpu(2).uuid}"}} 1.0' in (
        rig.supervisor.metrics.render().decode()
    )


async def test_an_xid_after_the_death_refines_the_incident_and_holds_nothing_up(rig: Rig) -> None:
    rig.executor._reach = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    rig.executor.signal(1, signal.SIGKILL)
    await eventually(lambda: rig.losses() == [("replace", (1,), "process-death")], "the death is acted upon at once")
    rig.nvml.say(gpu(1), What.XID, 31, Severity.WARNING)
    await eventually(lambda: rig.incidents()[0].causes[0] == "xid", "the incident names the XID")
    assert rig.incidents()[0].causes == ("xid", "process-death")
    incident = rig.supervisor.status().incident
    assert incident is not None
    assert incident.cause == Cause.XID
    refined = [e for e in rig.journal.timeline("inc-1") if e.body.get("event") == "incident-refined"]
    assert len(refined) == 1
    assert "lost to XID 31 (MMU fault)" in refined[0].body["sentence"]
    evidence = [e.seq for e in rig.journal.timeline("inc-1") if e.body.get("what") == "xid"]
    assert refined[0].body["entries"] == evidence
    assert rig.losses() == [("replace", (1,), "process-death")], "and nobody is lost twice for it"
    assert rig.nvml.asked == [gpu(1)]
    assert 'healer_xids_total{code="31",gpu="' + gpu(1).uuid in rig.supervisor.metrics.render().decode()


async def test_gpus_that_nobody_can_read_degrade_the_daemon_and_heal_nobody(rig: Rig) -> None:
    for number in range(4):
        rig.nvml.say(gpu(number), What.SENSOR_SILENT, 2.5)
    await eventually(lambda: "gives no reading" in rig.supervisor.status().why, "it says what it does not see")
    await rig.rounds(20)
    assert rig.supervisor.status().state == "degraded"
    assert rig.losses() == []
    assert {v.health for v in rig.supervisor.status().verdicts} == {Health.HEALTHY}
    for number in range(4):
        rig.nvml.say(gpu(number), What.SENSOR_BACK, 3.0, Severity.INFO)
    await eventually(lambda: rig.supervisor.status().state == "ok", "it sees again")


async def test_a_sensor_that_crashes_stops_neither_the_daemon_nor_healing(rig: Rig) -> None:
    rig.nvml.fails = True
    await rig.rounds(3)
    (status,) = [s for s in rig.supervisor.status().sensors if s.name == "nvml"]
    assert (status.state, status.why) == ("silent", "it failed: RuntimeError('a defect of the sensor')")
    metrics = rig.supervisor.metrics.render().decode()
    assert 'healer_errors_total{where="sensor"} 1.0' in metrics, "said once, not in every round"
    assert 'healer_sensor_up{sensor="nvml"} 0.0' in metrics
    rig.executor.signal(1, signal.SIGKILL)
    await rig.healed()
    rig.nvml.fails = False
    await eventually(lambda: all(s.state != "silent" for s in rig.supervisor.status().sensors), "it works again")


async def test_all_sensors_are_stopped_when_the_daemon_ends(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.start()
    await rig.end()
    assert rig.nvml.stopped
    assert {s.state for s in rig.supervisor.status().sensors if s.name != "nvml"} == {"off"}


async def test_a_dead_rank_that_nobody_acts_upon_is_not_counted_as_live(tmp_path: Path) -> None:
    rig = Rig(tmp_path, RULES + "  dryRun: true\n")
    try:
        await rig.start()
        assert "elastic_live_ranks 4.0" in rig.supervisor.metrics.render().decode()
        rig.executor.signal(2, signal.SIGKILL)
        await eventually(lambda: rig.supervisor.status().live == (0, 1, 3), "three live ranks")
        assert "3 of 4 ranks are live" in rig.supervisor.status().why
        assert "elastic_live_ranks 3.0" in rig.supervisor.metrics.render().decode()
        assert rig.supervisor.status().group.live == (0, 1, 2, 3), "the executor has not been told"
    finally:
        await rig.end()


async def test_series_that_alerts_watch_exist_before_anything_happens(rig: Rig) -> None:
    metrics = rig.supervisor.metrics.render().decode()
    for line in (
        'healer_incidents_total{cause="xid"} 0.0',
        'healer_incidents_total{cause="process-death"} 0.0',
        'healer_decisions_total{reason="rule-says-human",step="human"} 0.0',
        'healer_errors_total{where="journal"} 0.0',
        'elastic_sequences_total{kind="loss",outcome="failed"} 0.0',
        'elastic_pause_seconds_count{kind="loss"} 0.0',
        'elastic_moved_bytes_total{source="peer"} 0.0',
        'healer_sensor_up{sensor="nvml"} 1.0',
    ):
        assert line in metrics, line


async def test_a_recorded_run_is_judged_again_as_it_was(tmp_path: Path) -> None:
    rig = Rig(tmp_path, record=tmp_path / "trace.jsonl")
    try:
        await rig.start()
        rig.nvml.say(gpu(1), What.XID, 48, Severity.WARNING)
        rig.nvml.say(gpu(1), What.RECOVERY_ACTION, 1)
        await rig.healed()
    finally:
        await rig.end()
    trace = Trace(tmp_path / "trace.jsonl")
    replay = Replay(trace, lambda view: advise)
    list(replay)
    assert [(i.cause, i.slots) for i in replay.incidents] == [(Cause.XID, (1,))]
    lines = list(trace)
    assert any(isinstance(line, ViewLine) and len(line.live) == 3 for line in lines)
    assert any(isinstance(line, EvidenceLine) and line.evidence.what == What.RECOVERY_ACTION for line in lines)


async def test_the_disk_is_waited_for_after_the_action_and_not_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    seen: list[tuple[int, bool]] = []
    harden = rig.journal.harden

    def watched() -> None:
        seen.append((len(rig.losses()), threading.current_thread() is threading.main_thread()))
        harden()

    monkeypatch.setattr(rig.journal, "harden", watched)
    try:
        await rig.start()
        rig.executor.signal(1, signal.SIGKILL)
        await rig.healed()
        assert seen[0] == (1, False), "handed over first, and in a thread of its own"
    finally:
        await rig.end()


async def test_the_journal_keeps_as_much_as_the_policy_says(tmp_path: Path) -> None:
    rig = Rig(tmp_path, RULES + "  journal: {keepIncidents: 2, keepEntries: 20}\n")
    try:
        await rig.start()
        for n in range(3):
            rig.executor.signal(n, signal.SIGKILL)
            await eventually(
                lambda n=n: rig.incidents()[-1:] != [] and rig.incidents()[-1].id == f"inc-{n + 1}"  # type: ignore[misc]
                and rig.supervisor.status().state == "ok",
                "healed",
            )  # fmt: skip
        await eventually(lambda: [i.id for i in rig.incidents()] == ["inc-2", "inc-3"], "the oldest is forgotten")
        assert len(rig.journal.recent(Kind.LIFECYCLE, 1000)) < 60
    finally:
        await rig.end()
