"""Load rules in the running daemon: supervisor, journal and a scripted executor with real processes."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from healer.clock import SystemClock
from healer.journal import Kind, open_readonly, recent
from healer.policy.recording import frames
from tests.healer.supervised import RULES, Rig
from tests.healer.support import eventually

LOAD = """\
  bounds: {{minRanks: 3}}
  dryRun: {dry}
  load:
    interval: 100ms
    cooldown: {cooldown}
    signals: {{waiting: {{metric: waiting, staleAfter: 5s}}}}
    rules: [{{kind: targetTracking, name: queue, signal: waiting, target: 4}}]
    behavior:
      scaleDown: {{stabilizationWindow: 300ms, policies: [{{type: ranks, value: 8, period: 1s}}]}}
"""


@pytest.fixture
async def rigs(tmp_path: Path) -> AsyncIterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        await rig.end()
        rig.executor.end()


def scalings(rig: Rig) -> list[tuple[str, tuple[int, ...], str]]:
    return [call for call in rig.executor.calls if call[0] == "scale"]


async def test_an_idle_group_shrinks_to_its_least_size_once_and_says_why(rigs: list[Rig], tmp_path: Path) -> None:
    rig = Rig(tmp_path, RULES + LOAD.format(dry="false", cooldown="300ms"))
    rigs.append(rig)
    await rig.start()
    await eventually(lambda: len(scalings(rig)) == 1, "the group shrinks")
    assert scalings(rig)[0][2] == "load rule queue asked for 3 ranks"
    ended = SystemClock().monotonic() + 1.0
    await eventually(lambda: SystemClock().monotonic() > ended, "a second has passed")
    assert len(scalings(rig)) == 1
    rig.journal.flush()
    with open_readonly(tmp_path / "journal.db") as journal:
        told = [e.body for e in recent(journal, Kind.LIFECYCLE, 100) if e.body["event"] == "scaling"]
        assert "load" in {e.body["reason"] for e in recent(journal, Kind.DECISION, 100)}
    assert "scales 4 -> 3 (of 1 wanted): waiting per rank 0 under target 4" in [body["sentence"] for body in told]
    status = rig.supervisor.status()
    assert status.scaling is not None
    assert status.scaling.signals == {"waiting": 0.0}
    page = rig.supervisor.metrics.render().decode()
    assert 'healer_load_signal{signal="waiting"} 0.0' in page
    assert any(frame.load is not None for frame in frames(tmp_path / "journal.db"))


async def test_a_rank_that_dies_is_healed_before_load_changes_the_size(rigs: list[Rig], tmp_path: Path) -> None:
    rig = Rig(tmp_path, RULES + LOAD.format(dry="false", cooldown="1500ms"))
    rigs.append(rig)
    await rig.start()
    rig.executor.signal(1, signal.SIGKILL)
    await rig.healed()
    assert rig.losses() == [("replace", (1,), "process-death")]
    assert not scalings(rig)
    await eventually(lambda: bool(scalings(rig)), "then the group shrinks")


async def test_a_dry_run_only_says_what_it_would_do(rigs: list[Rig], tmp_path: Path) -> None:
    rig = Rig(tmp_path, RULES + LOAD.format(dry="true", cooldown="0s"))
    rigs.append(rig)
    await rig.start()

    def said() -> bool:
        entries = rig.journal.recent(Kind.LIFECYCLE, 100)
        return any(e.body["event"] == "scaling" and "dry run" in e.body["sentence"] for e in entries)

    def flushed() -> bool:
        rig.journal.flush()
        return said()

    await eventually(flushed, "the decision is in the journal")
    assert not scalings(rig)


def test_a_daemon_without_load_rules_does_not_load_what_reads_signals() -> None:
    import subprocess
    import sys

    code = "import sys, healer.supervisor; print([m for m in sys.modules if m.startswith(('healer.load.', 'apscheduler'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
