"""Injectors on real processes that stand for ranks: what they do, that they take it back, and what they refuse."""

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from chaos import cli
from chaos.fake_nvml import Script, pci_of
from chaos.injectors import daemons, files, gpus, processes, resources, within
from chaos.injectors.base import Place
from chaos.injectors.resources import Group as ControlGroup
from elastic import process
from elastic.errors import ElasticError
from healer.evidence import What
from healer.sensors.kernel_lines import LineReader
from tests.chaos.test_inject import Group


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path)
    yield made
    made.end()


def place(run_dir: Path, **more: Any) -> Place:
    return Place(run_dir=run_dir, draw=Random(1), **more)


def until(check: Callable[[], object], why: str) -> None:
    end = time.monotonic() + 20
    while not check():
        assert time.monotonic() < end, f"not in time: {why}"
        time.sleep(0.005)


def state(child: "subprocess.Popen[bytes]") -> str:
    return process.state(child.pid, process.start_time(child.pid))


def test_a_stopped_rank_goes_on_when_it_is_taken_back(group: Group) -> None:
    child = group.add(1)
    done = processes.Stop(kind="stop", slots=(1,)).inject(place(group.run_dir))
    assert state(child) == "T"
    assert done.take_back is not None
    done.take_back()
    until(lambda: state(child) in "RS", "it goes on")


def test_nothing_is_sent_where_one_of_two_slots_is_empty(group: Group) -> None:
    child = group.add(1)
    for kind in (processes.Kill(kind="kill", slots=(1, 2)), processes.Terminate(kind="terminate", slots=(1, 2))):
        with pytest.raises(ElasticError, match="no living rank in slot 2"):
            kind.inject(place(group.run_dir))
    assert child.poll() is None


def test_drawn_ranks_are_the_same_for_the_same_seed_and_always_alive(group: Group) -> None:
    for slot in range(4):
        group.add(slot)
    group.children[2].kill()
    group.children[2].wait()
    picks = {tuple(processes.Stop(kind="stop", random=2).chosen(place(group.run_dir))) for _ in range(3)}
    assert len(picks) == 1
    assert 2 not in picks.pop()
    with pytest.raises(ElasticError, match="4 ranks are to be drawn, 3 live"):
        processes.Stop(kind="stop", random=4).chosen(place(group.run_dir))


def test_a_rank_whose_pid_belongs_to_another_is_not_touched(group: Group) -> None:
    child = group.add(1, pid_start_off_by=1)
    with pytest.raises(ElasticError, match="no living rank"):
        resources.Throttle(kind="throttle", slots=(1,)).inject(place(group.run_dir))
    assert state(child) in "RS"


def _needs(group: Group, controller: str) -> None:
    made = ControlGroup.make(group.members[0], controller)
    if made is None:
        pytest.skip("no control group can be made here")
    made.remove()


BUSY = "while True: pass"
EATER = "import time\nkept = []\nwhile True:\n    kept.append(bytearray(b'x' * 4096))\n    time.sleep(0.0005)"


def spawn(group: Group, code: str, slot: int) -> "subprocess.Popen[bytes]":
    made = subprocess.Popen([sys.executable, "-c", code])
    group.spawn = lambda: group.children.append(made) or made  # type: ignore[method-assign,func-returns-value]
    return group.add(slot)


@pytest.mark.parametrize("way", ["control group", "signals"])
def test_a_throttled_rank_gets_its_share_of_a_core_and_all_of_it_afterwards(
    group: Group, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = spawn(group, BUSY, 1)
    if way == "signals":
        monkeypatch.setattr(ControlGroup, "make", lambda *_: None)
    else:
        _needs(group, "cpu")
    done = resources.Throttle(kind="throttle", slots=(1,), share=0.1).inject(place(group.run_dir))
    seen = psutil.Process(child.pid)
    first, began = sum(seen.cpu_times()[:2]), time.monotonic()
    time.sleep(3.0)
    used = (sum(seen.cpu_times()[:2]) - first) / (time.monotonic() - began)
    assert used < 0.6
    assert done.take_back is not None
    done.take_back()
    until(lambda: state(child) == "R", "it runs")
    assert not list(Path("/sys/fs/cgroup").glob("*/healer-chaos-*"))


def test_memory_is_taken_away_until_the_rank_is_dead(group: Group) -> None:
    child = spawn(group, EATER, 1)
    _needs(group, "memory")
    resources.Oom(kind="oom", slots=(1,)).inject(place(group.run_dir))
    assert child.wait(10) == -signal.SIGKILL
    assert not list(Path("/sys/fs/cgroup").glob("*/healer-chaos-*"))


def test_a_group_that_does_not_allow_it_is_told_no_fault(group: Group) -> None:
    group.add(1)
    with pytest.raises(ElasticError):
        within.Slow(kind="slow", slots=(1,)).inject(place(group.run_dir))
    assert not list(group.run_dir.glob("fault-*"))


def test_a_checkpoint_that_was_torn_is_whole_again(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(range(200)))
    with weights.open("rb") as mapped:
        done = files.CheckpointTorn(kind="checkpoint-torn", kept=0.25).inject(place(tmp_path, checkpoint=tmp_path))
        assert weights.read_bytes() == bytes(range(50))
        assert mapped.read() == bytes(range(200)), "who has it open keeps what it has"
    assert done.take_back is not None
    done.take_back()
    assert weights.read_bytes() == bytes(range(200))
    with pytest.raises(ElasticError, match="a checkpoint of its own"):
        files.CheckpointMissing(kind="checkpoint-missing").inject(place(tmp_path))


def test_a_file_system_that_is_not_the_runs_own_is_never_filled(tmp_path: Path) -> None:
    with pytest.raises(ElasticError, match="a group with `disk: SIZE`"):
        daemons.DiskFull(kind="disk-full").inject(place(tmp_path))
    with pytest.raises(ElasticError, match="no file system of its own"):
        daemons.DiskFull(kind="disk-full").inject(place(tmp_path, own_disk=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_locked_journal_can_be_written_again_afterwards(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "journal.db") as other:
        other.execute("CREATE TABLE t (x)")
    done = daemons.JournalLocked(kind="journal-locked").inject(place(tmp_path))
    with (
        pytest.raises(sqlite3.OperationalError, match="locked"),
        sqlite3.connect(tmp_path / "journal.db", timeout=0.01) as other,
    ):
        other.execute("INSERT INTO t VALUES (1)")
    assert done.take_back is not None
    done.take_back()
    with sqlite3.connect(tmp_path / "journal.db", timeout=5) as other:
        other.execute("INSERT INTO t VALUES (1)")


def test_a_gpu_that_the_stand_in_does_not_have_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script"
    Script.healthy(script, 2)
    before = script.read_text()
    with pytest.raises(ElasticError, match="GPUs 0 to 1, no 5"):
        gpus.Nvml(kind="nvml", gpu=5, fault="lost").inject(place(tmp_path, gpu_script=script))
    assert script.read_text() == before
    with pytest.raises(ElasticError, match="gpus: true"):
        gpus.Nvml(kind="nvml", gpu=0, fault="lost").inject(place(tmp_path))


def test_a_kernel_line_is_one_that_the_daemon_reads(group: Group) -> None:
    log = group.run_dir / "log"
    log.touch()
    group.add(1)
    gpus.KernelLine(kind="kernel-line", gpu=1, xid=79).inject(place(group.run_dir, kernel_log=log))
    (fact,) = LineReader().read(log.read_text().partition(";")[2])
    assert (fact.what, fact.value, fact.pci) == (What.XID, 79, pci_of(1))


def test_by_hand_what_lasts_is_taken_back_when_its_time_is_over(group: Group) -> None:
    child = group.add(1)
    command = [
        "inject",
        "throttle",
        "--slot",
        "1",
        "--set",
        "share=0.5",
        "--for",
        "300ms",
        "--run-dir",
        str(group.run_dir),
    ]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert "stands for 300ms" in done.output
    until(lambda: state(child) == "S", "it is not stopped")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["terminate", "--slot", "7"], 1, "no living rank in slot 7"),
        (["terminate"], 2, "expected either slots"),
        (["throttle", "--slot", "1", "--set", "share"], 2, "expected KEY=VALUE"),
        (["throttle", "--slot", "1", "--set", "share=2"], 2, "less than 1"),
        (["link-lost", "--slot", "1"], 2, "peer"),
        (["daemon-stop"], 1, "no daemon runs"),
        (["gateway-kill"], 1, "no such file"),
    ],
)
def test_by_hand_a_wrong_fault_is_refused_in_one_line(
    group: Group, arguments: list[str], code: int, words: str
) -> None:
    child = group.add(1)
    done = CliRunner().invoke(cli.app, ["inject", *arguments, "--run-dir", str(group.run_dir)])
    assert done.exit_code == code, done.output
    assert words in " ".join(done.output.replace("│", " ").split())
    assert "Traceback" not in done.output
    assert child.poll() is None
