import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.process import start_time
from healer.evidence import Severity
from healer.sensors.processes import ProcessSensor, read_state
from tests.healer.support import FakeClock, member, rank


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def sensor(child: subprocess.Popen[bytes]) -> ProcessSensor:
    found = ProcessSensor(FakeClock())
    found.watch([member(0, os.getpid(), start_time(os.getpid())), member(1, child.pid, start_time(child.pid))])
    found.tick()
    return found


def wait_for_state(pid: int, started: int, states: str) -> None:
    deadline = time.monotonic() + 10
    while (read_state(pid, started) or "?") not in states:
        assert time.monotonic() < deadline, f"state {read_state(pid, started)}, expected one of {states}"


def test_a_killed_rank_is_seen_dead_before_anybody_reaps_it(
    sensor: ProcessSensor, child: subprocess.Popen[bytes]
) -> None:
    started = start_time(child.pid)
    child.send_signal(signal.SIGKILL)
    wait_for_state(child.pid, started, "ZX")
    (seen,) = sensor.tick()
    assert (seen.subject, seen.severity) == (rank(1), Severity.CRITICAL)
    assert seen.value in ("Z", "X")
    assert sensor.tick() == [], "said once"


def test_a_stopped_rank_is_seen_and_so_is_its_return(sensor: ProcessSensor, child: subprocess.Popen[bytes]) -> None:
    started = start_time(child.pid)
    child.send_signal(signal.SIGSTOP)
    wait_for_state(child.pid, started, "T")
    assert [(e.subject, e.value) for e in sensor.tick()] == [(rank(1), "T")]
    child.send_signal(signal.SIGCONT)
    wait_for_state(child.pid, started, "SR")
    assert [e.subject for e in sensor.tick()] == [rank(1)]


def test_running_and_sleeping_in_turns_is_no_news(sensor: ProcessSensor) -> None:
    assert all(sensor.tick() == [] for _ in range(50))


def test_a_look_on_suspicion_always_answers(sensor: ProcessSensor) -> None:
    (seen,) = sensor.look(rank(1))
    assert seen.value in ("S", "R")
    assert sensor.look(rank(5)) == [], "not a rank that is watched"


def test_a_recycled_pid_does_not_pass_for_the_rank(child: subprocess.Popen[bytes]) -> None:
    assert read_state(child.pid, start_time(child.pid) - 1) == "X"


def test_a_process_on_its_way_out_counts_as_gone(tmp_path: Path) -> None:
    # the state and flags of a killed process while the kernel still tears its GPU memory down
    (tmp_path / "42").mkdir()
    fields = ["R", "1", "42", "42", "0", "-1", "4228356", *["0"] * 12, "777"]
    (tmp_path / "42" / "stat").write_text(f"42 (rank (a) b) {' '.join(fields)} 0 0\n")
    assert read_state(42, 777, tmp_path) == "X"


def test_a_proc_that_cannot_be_read_is_neither_life_nor_death(tmp_path: Path) -> None:
    (tmp_path / "42" / "stat").mkdir(parents=True)
    assert read_state(42, 1, tmp_path) is None
    sensor = ProcessSensor(FakeClock(), tmp_path)
    sensor.watch([member(0, 42, 1)])
    assert sensor.tick() == []
    assert sensor.look(rank(0)) == []
