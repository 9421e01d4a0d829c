"""What happens to the daemon when NVML itself fails: it hangs, crashes, refuses, or answers nonsense. Case numbers:
docs/diagnosis.md."""

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from healer.clock import SystemClock
from healer.evidence import HostRef, Severity, What
from healer.sensors import STOP_DEADLINE_S, SensorState
from healer.sensors.nvml import NvmlConfig, NvmlSensor, wire
from healer.sensors.nvml.child import Child
from tests.healer.nvml_rig import NvmlRig, gpu


def probe(rig: NvmlRig) -> psutil.Process:
    assert rig.sensor.probe_pid is not None
    return psutil.Process(rig.sensor.probe_pid)


async def test_case_2_a_driver_call_that_never_returns_makes_one_gpu_unknown_and_the_rest_go_on(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=8, restart_s=20.0, restart_max_s=20.0) as rig:
        await rig.ready()
        hung = rig.sensor.probe_pid
        rig.script.call(5, "nvmlDeviceGetTemperature", "hang")
        (silent,) = await rig.sees(What.SENSOR_SILENT)
        assert (silent.subject, silent.severity) == (gpu(5), Severity.WARNING)
        assert hung is not None
        await rig.until(lambda: not psutil.pid_exists(hung), "the probe that hangs is killed")
        await rig.until(lambda: rig.sensor.starts == 2, "and started again at once")
        # the new one hangs in the same call: the other seven are read all the same, and it is left to do so
        rig.script.field(6, 230, 2)
        await rig.sees(What.RECOVERY_ACTION, 6)
        await rig.rounds(150)
        assert rig.sensor.starts == 2
        assert len([e for e in rig.of(What.SENSOR_SILENT) if e.subject == gpu(5)]) == 1, "said once"
        rig.script.call(5, "nvmlDeviceGetTemperature", "ok")
        (back,) = await rig.sees(What.SENSOR_BACK, 5)
        assert float(back.value) > 0


async def test_case_2_a_driver_that_hangs_for_all_gpus_is_tried_again_ever_more_slowly(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=2) as rig:
        await rig.ready()
        rig.script.call("*", "nvmlDeviceGetFieldValues", "hang")
        await rig.sees(What.SENSOR_SILENT, 0)
        await rig.sees(What.SENSOR_SILENT, 1)
        starts: list[float] = []

        def started() -> bool:
            while len(starts) < rig.sensor.starts:
                starts.append(time.monotonic())
            return len(starts) >= 6

        await rig.until(started, "it is started again")
        assert starts[5] - starts[4] >= 0.9, "the time between two starts grows up to its limit"
        assert len(rig.of(What.SENSOR_SILENT)) == 2
        rig.script.call("*", "nvmlDeviceGetFieldValues", "ok")
        await rig.sees(What.SENSOR_BACK, 0)


async def test_nvml_that_never_opens_is_silence_of_the_host(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path, gpus=1, start_deadline_s=0.5)
    rig.script.call("*", "nvmlInit", "hang")
    async with rig:
        (seen,) = await rig.sees(What.SENSOR_SILENT)
        assert isinstance(seen.subject, HostRef)
        assert rig.sensor.status().state is SensorState.SILENT
        rig.script.call("*", "nvmlInit", "ok")
        await rig.ready()
        assert rig.sensor.status().state is SensorState.OK
        assert [e.what for e in rig.seen] == [What.SENSOR_SILENT, What.SENSOR_BACK]


async def test_a_slow_call_within_the_deadline_is_no_silence(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=2, deadline_s=3.0) as rig:
        await rig.ready()
        rig.script.call(0, "nvmlDeviceGetFieldValues", "delay 101")
        await rig.rounds(60)
        assert rig.seen == []
        assert rig.sensor.status().cost.max_s >= 0.1


async def test_a_machine_that_was_paused_takes_no_gpu_for_silent(tmp_path: Path) -> None:
    """Daemon and probe stand still together, and the probe comes back a little later."""
    async with NvmlRig(tmp_path, deadline_s=2.0) as rig:
        await rig.ready()
        process = probe(rig)
        process.suspend()
        time.sleep(3.0)  # noqa: ASYNC251 (the loop itself stands)
        asyncio.get_running_loop().call_later(0.15, process.resume)
        await rig.rounds(40)
        assert rig.seen == []
        assert rig.sensor.starts == 1


class Immortal(Child):
    """A process inside a driver call that cannot be interrupted: SIGKILL has no effect."""

    made: ClassVar[list["Immortal"]] = []

    def __init__(self, config: NvmlConfig, on_line: Callable[[wire.Line], None], on_end: Callable[[], None]) -> None:
        super().__init__(config, on_line, on_end)
        self.made.append(self)

    def kill(self) -> None:
        pass

    def let_go(self) -> None:
        self._loop.remove_reader(self._out.fileno())

    def really_kill(self) -> None:
        super().kill()


async def test_a_probe_that_cannot_be_killed_is_left_behind_and_does_not_pile_up(tmp_path: Path) -> None:
    Immortal.made.clear()
    rig = NvmlRig(tmp_path, gpus=1, spawn=Immortal)
    try:
        async with rig:
            await rig.ready()
            rig.script.call("*", "nvmlDeviceGetFieldValues", "hang")
            await rig.until(lambda: rig.sensor.stuck == 2, "two processes are stuck")
            end = time.monotonic() + 2
            await rig.until(lambda: time.monotonic() > end, "nothing more happens")
            assert rig.sensor.starts == 2
            assert "stuck in the driver" in rig.sensor.status().why
            rig.script.call("*", "nvmlDeviceGetFieldValues", "ok")
            Immortal.made[0].really_kill()
            await rig.sees(What.SENSOR_BACK, 0)
            assert rig.sensor.starts == 3
    finally:
        for child in Immortal.made:
            child.really_kill()
            await child.wait(5)
            Child.let_go(child)


async def test_case_29_a_segfault_in_the_library_ends_the_probe_and_not_the_daemon(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=4) as rig:
        await rig.ready()
        rig.script.call(2, "nvmlDeviceGetMemoryInfo", "crash")
        await rig.until(lambda: "SIGSEGV" in rig.sensor.status().why, "the end is told")
        rig.script.call(2, "nvmlDeviceGetMemoryInfo", "ok")
        rig.script.field(1, 230, 1)
        await rig.sees(What.RECOVERY_ACTION, 1)
        assert rig.sensor.starts > 1
        assert rig.sensor.status().state is SensorState.OK


async def test_case_18_a_blank_is_not_a_zero(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path, gpus=1)
    rig.script.set(0, ecc__uncorrected__volatile__dram=40, remap__pending=1)
    async with rig:
        await rig.sees(What.REMAP_PENDING)
        rig.script.call(0, "nvmlDeviceGetMemoryErrorCounter", "err 21")
        rig.script.call(0, "nvmlDeviceGetRemappedRows", "err 21")
        await rig.rounds(40)
        assert len(rig.seen) == 1, "a pending remap that cannot be read is still pending"
        rig.script.call(0, "nvmlDeviceGetMemoryErrorCounter", "ok")
        await rig.rounds(40)
        assert not rig.of(What.ECC_UNCORRECTABLE), "40, blank, 40 is no growth"


async def test_case_21_stopping_the_daemon_closes_nvml_in_time(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path, gpus=2)
    async with rig:
        await rig.ready()
        began = time.monotonic()
    assert time.monotonic() - began < STOP_DEADLINE_S
    assert rig.log.read_text().split("\n")[-2].startswith("shutdown 0")
    assert rig.sensor.status().state is SensorState.OFF


async def test_case_21_sigterm_to_the_probe_closes_nvml(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=2, restart_s=5.0, restart_max_s=5.0) as rig:
        await rig.ready()
        probe(rig).send_signal(signal.SIGTERM)
        await rig.until(lambda: "shutdown 0" in rig.log.read_text(), "NVML is closed", 3.0)


DAEMON = """
import asyncio, sys
from pathlib import Path
from healer.clock import SystemClock
from healer.sensors.nvml import NvmlConfig, NvmlSensor
from tests.healer.nvml_rig import NvmlRig

async def main():
    async with NvmlRig(Path(sys.argv[1]), gpus=2) as rig:
        await rig.ready()
        print(rig.sensor.probe_pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_case_21_a_daemon_that_is_killed_leaves_no_probe_behind_and_nvml_closed(tmp_path: Path) -> None:
    """The probe sees the end of its standard input, which the kernel closes with the daemon."""
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DAEMON, str(tmp_path), stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert daemon.stdout is not None
    said = b""
    while not said.strip().isdigit():
        said = await asyncio.wait_for(daemon.stdout.readline(), 20)
        assert said, "the daemon ended before it was ready"
    orphan = psutil.Process(int(said))
    daemon.kill()
    await daemon.wait()
    end = time.monotonic() + 10
    while orphan.is_running() and orphan.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the probe lives on"
        await asyncio.sleep(0.02)
    assert "shutdown 0" in (tmp_path / "nvml.log").read_text()


async def test_stopping_while_a_call_hangs_takes_no_longer_than_the_deadline(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path, gpus=2, deadline_s=60.0)
    async with rig:
        await rig.ready()
        rig.script.call("*", "*", "hang")
        await rig.until(lambda: rig.sensor.status().age_s > 0.3, "it hangs")
        process = probe(rig)
        began = time.monotonic()
    assert time.monotonic() - began < STOP_DEADLINE_S
    assert not process.is_running()


async def test_case_22_a_gpu_that_goes_silent_alone_is_told_while_metrics_of_the_others_flow(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=4, deadline_s=5.0) as rig:
        await rig.ready()
        rig.script.call(1, "*", "hang")
        (silent,) = await rig.sees(What.SENSOR_SILENT)
        assert silent.subject == gpu(1)
        assert "is silent" in rig.sensor.status().why
        await rig.rounds(30)
        assert rig.sensor.status().age_s < 5.0
        assert {e.subject for e in rig.of(What.SENSOR_SILENT)} == {gpu(1)}


async def test_case_23_no_command_line_tool_is_run_to_read_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "bin"
    trap.mkdir()
    for name in ("nvidia-smi", "dcgmi", "sh"):
        (trap / name).write_text(f"#!/bin/true\ntouch {tmp_path / 'called'}\n")
        (trap / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(trap))
    async with NvmlRig(tmp_path, gpus=2) as rig:
        await rig.ready()
        await rig.rounds(40)
        assert probe(rig).children() == []
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(("code", "word"), [(9, "not loaded"), (18, "different versions"), (999, "unknown")])
async def test_case_26_nvml_that_does_not_open_is_blindness_and_never_health(
    tmp_path: Path, code: int, word: str
) -> None:
    rig = NvmlRig(tmp_path, gpus=2)
    rig.script.say(f"init {code}")
    async with rig:
        (seen,) = await rig.sees(What.SENSOR_BLIND)
        assert isinstance(seen.subject, HostRef)
        assert word in str(seen.value)
        status = rig.sensor.status()
        assert (status.state, status.readings) == (SensorState.BLIND, 0)
        rig.script.say("init 0")
        await rig.ready()
        assert [e.what for e in rig.seen] == [What.SENSOR_BLIND, What.SENSOR_BACK]


async def test_case_32_a_driver_upgrade_under_way_is_held_and_not_hammered(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=2, blind_retry_s=0.2) as rig:
        await rig.ready()
        rig.script.say("init 18", "call * nvmlDeviceGetFieldValues err 18")
        await rig.sees(What.SENSOR_BLIND)
        end = time.monotonic() + 3
        await rig.until(lambda: time.monotonic() > end, "three seconds of it")
        assert len(rig.of(What.SENSOR_BLIND)) == 1
        assert 2 <= rig.sensor.starts <= 6, "0.2, 0.4, 0.8, 1.6 s between the attempts"
        assert not rig.of(What.GPU_LOST), "the driver is away, no GPU is lost"
        assert not rig.of(What.SENSOR_SILENT)


async def test_a_host_without_a_gpu_is_off_and_starts_no_process(tmp_path: Path) -> None:
    sensor = NvmlSensor(SystemClock(), root=tmp_path)
    sensor.start(lambda: None)
    assert sensor.tick() == []
    assert (sensor.status().state, sensor.starts) == (SensorState.OFF, 0)
    assert "no NVIDIA GPU" in sensor.status().why
    await sensor.stop()


async def test_a_gpu_on_the_bus_without_a_driver_is_blindness(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    sensor = NvmlSensor(SystemClock(), NvmlConfig(environment={"LD_LIBRARY_PATH": str(tmp_path)}), root=tmp_path)
    sensor.start(lambda: None)
    try:
        deadline = time.monotonic() + 10
        while sensor.status().state is not SensorState.BLIND:
            assert time.monotonic() < deadline, sensor.status()
            await asyncio.sleep(0.02)
            sensor.tick()
        assert "libnvidia-ml.so.1 was not found" in sensor.status().why
    finally:
        await sensor.stop()


@pytest.mark.parametrize("code", [3, 4])
async def test_case_28_what_is_not_supported_or_not_permitted_is_asked_once_and_said_once(
    tmp_path: Path, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = NvmlRig(tmp_path, gpus=4, deadline_s=3.0)
    rig.script.call("*", "nvmlDeviceGetComputeRunningProcesses", f"err {code}")
    rig.script.set("*", field__230=f"err:{code}")
    async with rig:
        await rig.ready()
        await rig.rounds(60)
        assert rig.seen == [], "a field that fails inside a call that succeeds is no health and no fault"
        status = rig.sensor.status()
        assert status.state is SensorState.OK
        assert "processes" in status.why
        assert "field 230" in status.why
    said = [line for line in capsys.readouterr().out.splitlines() if "reading_off" in line]
    assert len([line for line in said if "processes" in line]) == 1
    assert len([line for line in said if "field 230" in line]) == 1


async def test_a_gpu_that_has_no_recovery_action_is_still_found_lost(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path, gpus=2)
    rig.script.set("*", field__230="err:3")
    async with rig:
        await rig.ready()
        rig.script.call(1, "*", "err 15")
        await rig.sees(What.GPU_LOST, 1)


async def test_case_30_impossible_pids_are_not_taken_for_processes(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path, gpus=1)
    rig.script.say("process 0 4294967295 1000", "process 0 1073741824 0", f"process 0 {os.getpid()} 20000000000")
    async with rig:
        await rig.ready()
        assert rig.identity._pids[gpu(0).uuid] == frozenset({os.getpid()})


async def test_case_31_ten_thousand_polls_leave_the_number_of_open_files_as_it_was(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=4, fast_s=0.002, medium_s=0.004, slow_s=0.008, deadline_s=5.0) as rig:
        await rig.ready()
        gc.collect()  # files that earlier tests have left
        before, own = probe(rig).num_fds(), psutil.Process().num_fds()
        rss = probe(rig).memory_info().rss
        await rig.until(lambda: rig.sensor.status().readings >= 10_000, "10,000 readings", 120.0)
        assert probe(rig).num_fds() == before
        assert psutil.Process().num_fds() <= own
        assert rig.log.read_text().count("init") == 1, "NVML is opened once"
        assert probe(rig).memory_info().rss < rss + (2 << 20)


async def test_case_31_many_restarts_leave_the_daemon_with_no_more_open_files(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=1, restart_s=0.01, restart_max_s=0.01) as rig:
        await rig.ready()
        gc.collect()
        before = psutil.Process().num_fds()
        for count in range(2, 12):
            process = probe(rig)
            process.kill()
            await rig.until(lambda n=count: rig.sensor.starts == n and rig.sensor.complete, "it is back")  # type: ignore[misc]
        assert psutil.Process().num_fds() <= before
        assert not [c for c in psutil.Process().children() if c.status() == psutil.STATUS_ZOMBIE]


async def test_the_probe_stays_small(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=8) as rig:
        await rig.ready()
        await rig.rounds(100)
        assert probe(rig).memory_info().rss < 30 << 20
