"""What the supervisor sees of GPUs and sensors, and what it writes down: journal, metrics, trace."""

import asyncio
import contextlib
import io
import signal
import sqlite3
import threading
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from healer.diagnosis import Cause, Health
from healer.evidence import Severity, What
from healer.journal import Kind, open_readonly, recent
from healer.replay import Replay
from healer.tables import show_status, show_timeline
from healer.trace import EvidenceLine, Trace, ViewLine
from tests.healer.stage import advise, gpu
from tests.healer.supervised import RULES, Rig, rig
from tests.healer.support import eventually

__all__ = ["rig"]


async def test_the_intent_is_on_disk_before_the_target_is_told(rig: Rig, tmp_path: Path) -> None:
    seen: list[int] = []

    def lose(*args: object, **kwargs: object) -> None:
        with contextlib.closing(open_readonly(tmp_path / "journal.db")) as reader:
            seen.extend(entry.body["slots"][0] for entry in recent(reader, Kind.ACTION, 5))

    rig.executor.lose = lose  # type: ignore[method-assign]
    rig.executor.signal(2, signal.SIGKILL)
    await eventually(lambda: bool(seen), "the target is told")
    assert seen == [2]


async def test_a_healthy_group_is_not_written_about(rig: Rig) -> None:
    # a loop that this machine keeps waiting says so in the journal: that is another story
    for _ in range(50):
        await eventually(lambda: rig.supervisor.status().state == "ok", "healthy")
        before, late = rig.journal.entries, rig.lateness()
        await rig.rounds(20)
        if rig.lateness() == late:
            break
    else:
        pytest.fail("the loop was late in every stretch of 20 rounds")
    assert rig.journal.entries == before


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
