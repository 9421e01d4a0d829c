"""A rank that is alive and gets nowhere: uninterruptible, growing, stalled."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.process import start_time
from healer.clock import SystemClock
from healer.evidence import Evidence, Severity, What
from healer.sensors import stacks
from healer.sensors.memory import MemoryConfig
from healer.sensors.processes import ProcessSensor
from tests.healer.support import FakeClock, member, rank

MIB = 1 << 20

STALLED = """
import faulthandler, signal, sys, time
if "handler" in sys.argv:
    faulthandler.register(signal.SIGUSR1)
def stands_here():
    print("ready", flush=True)
    time.sleep(600)
stands_here()
"""


class Proc:
    """A /proc of one process."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        (folder / "42").mkdir()
        self.state("S")
        self.memory(100 * MIB)
        self.available(64_000 * MIB)

    def state(self, letter: str) -> None:
        fields = [letter, "1", "42", "42", "0", "-1", "0", *["0"] * 12, "777"]
        (self.root / "42" / "stat").write_text(f"42 (rank) {' '.join(fields)} 0 0\n")

    def memory(self, resident: int) -> None:
        (self.root / "42" / "statm").write_text(f"1000000 {resident // 4096} 0 0 0 0 0\n")

    def available(self, count: int) -> None:
        (self.root / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {count // 1024} kB\n")


class Bench:
    def __init__(self, folder: Path) -> None:
        self.proc, self.clock = Proc(folder), FakeClock()
        self.sensor = ProcessSensor(self.clock, folder, MemoryConfig())
        self.sensor.watch([member(0, 42, 777)])

    def run(self, seconds: float, *, growth_per_s: float = 0.0, resident: int = 100 * MIB) -> list[Evidence]:
        found = []
        for step in range(round(seconds * 2)):
            self.clock.now += 0.5
            self.proc.memory(round(resident + growth_per_s * 0.5 * step))
            found += self.sensor.tick()
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_moment_of_waiting_for_a_disk_is_no_news(bench: Bench) -> None:
    bench.proc.state("D")
    found = bench.run(1.5)
    bench.proc.state("S")
    assert found + bench.run(5.0) == []


def test_a_rank_that_stays_uninterruptible_is_told_once_and_so_is_its_return(bench: Bench) -> None:
    bench.proc.state("D")
    (stuck,) = bench.run(10.0)
    assert (stuck.what, stuck.value, stuck.severity) == (What.PROCESS_STATE, "D", Severity.WARNING)
    bench.proc.state("R")
    (back,) = bench.run(5.0)
    assert (back.value, back.severity) == ("R", Severity.INFO)


def test_a_rank_that_will_use_up_the_hosts_memory_is_told_in_time(bench: Bench) -> None:
    bench.proc.available(4_000 * MIB)
    (seen,) = bench.run(90.0, growth_per_s=20 * MIB)
    assert (seen.what, seen.severity) == (What.MEMORY_GROWS, Severity.WARNING)
    assert float(seen.value) == pytest.approx(20 * MIB, rel=0.05)
    (over,) = bench.run(90.0, resident=2_000 * MIB)
    assert over.severity is Severity.INFO


def test_loading_weights_into_plenty_of_memory_is_no_leak(bench: Bench) -> None:
    assert bench.run(40.0, growth_per_s=500 * MIB) == []
    assert bench.run(200.0, resident=20_000 * MIB) == []


def test_slow_growth_that_never_matters_is_no_news(bench: Bench) -> None:
    assert bench.run(600.0, growth_per_s=1 * MIB) == []


# --- stacks ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["handler", "none"])
def stalled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands in a function of a known name and writes to a log, as ranks do."""
    log = (tmp_path / "rank.log").open("ab")
    made = subprocess.Popen([sys.executable, "-c", STALLED, request.param], stdout=subprocess.PIPE, stderr=log)
    assert made.stdout is not None
    made.stdout.readline()
    yield made
    made.kill()
    made.wait()
    log.close()


async def stack_of(process: subprocess.Popen[bytes], deadline_s: float = 10.0) -> tuple[list[Evidence], ProcessSensor]:
    sensor = ProcessSensor(SystemClock(), stack_deadline_s=deadline_s)
    woken = asyncio.Event()
    sensor.start(woken.set)
    sensor.watch([member(0, process.pid, start_time(process.pid))])
    sensor.look_deeper(rank(0))
    sensor.look_deeper(rank(0))
    end = time.monotonic() + deadline_s + 5
    while not woken.is_set() and not sensor.status().why:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    found = [e for e in sensor.tick() if e.what == What.STACK]
    await sensor.stop()
    return found, sensor


@pytest.mark.skipif(stacks.find_py_spy() is None, reason="needs py-spy")
@pytest.mark.parametrize("stalled", ["none"], indirect=True)
async def test_the_stack_of_a_stalled_rank_names_where_it_stands(stalled: subprocess.Popen[bytes]) -> None:
    found, sensor = await stack_of(stalled)
    if "ermission" in sensor.status().why:
        pytest.skip(sensor.status().why)
    (seen,) = found
    assert (seen.what, seen.subject) == (What.STACK, rank(0))
    assert "stands_here" in seen.detail
    assert int(seen.value) >= 2
    assert stalled.poll() is None


@pytest.mark.parametrize("stalled", ["handler"], indirect=True)
async def test_without_py_spy_the_rank_writes_its_own_stack(
    stalled: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    ((seen,), _) = await stack_of(stalled)
    assert seen.detail.startswith("faulthandler: ")
    assert "stands_here" in seen.detail
    assert int(seen.value) >= 2


@pytest.mark.parametrize("stalled", ["none"], indirect=True)
async def test_a_process_that_would_die_of_the_signal_is_left_alone(
    stalled: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    found, sensor = await stack_of(stalled)
    assert found == []
    assert "SIGUSR1" in sensor.status().why
    assert stalled.poll() is None


@pytest.mark.parametrize("stalled", ["handler"], indirect=True)
async def test_a_stopped_rank_that_cannot_write_its_stack_costs_no_more_than_the_deadline(
    stalled: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    stalled.send_signal(19)
    found, sensor = await stack_of(stalled, deadline_s=0.5)
    assert found == []
    assert "no answer within 0.5 s" in sensor.status().why


@pytest.mark.parametrize("stalled", ["none"], indirect=True)
async def test_a_rank_that_is_gone_has_no_stack(stalled: subprocess.Popen[bytes]) -> None:
    started = start_time(stalled.pid)
    stalled.kill()
    await asyncio.to_thread(stalled.wait)
    with pytest.raises(stacks.NoStack, match="gone"):
        await stacks.capture(stalled.pid, started, deadline_s=1.0, py_spy=None)
