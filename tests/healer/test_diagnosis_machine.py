"""From the machine to a verdict: real probe process, real bindings, real kernel-log reader; only library and log are fake."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chaos import fake_nvml
from chaos.fake_nvml import Script
from elastic import process
from elastic.errors import ElasticError
from elastic.view import Member
from healer.clock import SystemClock
from healer.diagnosis import Cause, Confidence, Diagnosis, Health, Verdict
from healer.evidence import RankRef, What
from healer.judge import Judge
from healer.machine import GpuMachine, catalogue, this_machine
from healer.policy.load import parse_policy
from healer.policy.schema import Sensors
from healer.scan import scan
from healer.senses import Senses
from healer.sensors.kernel_log import KernelLogSensor
from healer.sensors.nvml import NvmlConfig, NvmlSensor
from tests.healer.nvml_rig import QUICK, gpu, library
from tests.healer.support import LIMITS, POLICY, rank

H, S, U = Health.HEALTHY, Health.UNHEALTHY, Health.UNKNOWN


UNHURRIED = "  detection: {stallAfter: 20s, silentAfter: 60s}\n"
"""The rank of these tests sends no beats, and is not to be missed."""


class Host:
    """Four GPUs, a kernel log, and one rank on GPU 1."""

    def __init__(self, folder: Path) -> None:
        self.script = Script.healthy(folder / "script", 4)
        self.log = folder / "kmsg"
        os.mkfifo(self.log)
        clock = self.clock = SystemClock()
        config = NvmlConfig(**QUICK, library_dir=library(), environment=fake_nvml.environment(self.script.path))
        self.nvml = NvmlSensor(clock, config)
        kernel = KernelLogSensor(clock, path=self.log, identity=self.nvml.identity)
        self.machine = GpuMachine(self.nvml, (kernel,), catalogue())
        policy = parse_policy(POLICY + UNHURRIED, name="p.yaml", base=folder)
        self.errors: list[str] = []
        self.senses = Senses(policy, clock, self.machine, lambda name, error: self.errors.append(name))
        self.judge = Judge(LIMITS)
        self.woken = asyncio.Event()
        self.said: list[tuple[float, Verdict]] = []
        self.members = [Member(1, 0, os.getpid(), process.start_time(os.getpid()), "")]

    async def start(self) -> None:
        self.senses.start(self.woken.set)
        self.senses.watch(self.members)
        self.writer = os.open(self.log, os.O_WRONLY)
        self.script.say(f"process 1 {os.getpid()} 1000000")
        await self.until(lambda: self.nvml.complete, "every GPU was read")
        self.judge.watch([rank(1)], self.clock.monotonic())
        await self.until(lambda: bool(self.machine.hardware(self.members).placed), "the rank is on its GPU")
        self.said.clear()

    async def end(self) -> None:
        await self.senses.stop()
        os.close(self.writer)

    def kernel_says(self, text: str) -> None:
        os.write(self.writer, f"6,{time.monotonic_ns() % 10**9},{time.monotonic_ns() // 1000},-;{text}\n".encode())

    def round(self) -> Diagnosis:
        found = self.senses.round(0.0)
        self.judge.equip(self.machine.hardware(self.members))
        self.judge.take(found)
        judged = self.judge.judge(self.clock.monotonic())
        self.said += [(self.clock.monotonic(), v) for v in judged.changed]
        return judged.diagnosis

    async def until(self, check: object, what: str, deadline_s: float = 15.0) -> None:
        """As the supervisor: a round whenever a sensor wakes it, and ten times a second."""
        end = time.monotonic() + deadline_s
        while not check():  # type: ignore[operator]
            assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}; {self.said}"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.woken.wait(), 0.1)
            self.woken.clear()
            self.round()

    def last(self, subject: object) -> Verdict | None:
        return next((v for _, v in reversed(self.said) if v.subject == subject), None)

    async def becomes(self, subject: object, health: Health, cause: Cause) -> Verdict:
        def so() -> bool:
            found = self.last(subject)
            return found is not None and (found.health, found.cause) == (health, cause)

        await self.until(so, f"{subject} is {health} by {cause}")
        found = self.last(subject)
        assert found is not None
        return found


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    found = Host(tmp_path)
    try:
        await found.start()
        yield found
    finally:
        await found.end()


async def test_an_xid_in_the_kernel_log_and_the_drivers_word_condemn_gpu_and_rank(host: Host) -> None:
    host.kernel_says("NVRM: Xid (PCI:0000:2b:00): 119, pid=1, name=x, Timeout waiting for RPC from GSP!")
    suspected = await host.becomes(gpu(1), U, Cause.XID)
    assert "XID 119" in suspected.sentence
    host.script.field(1, 230, 1)
    condemned = await host.becomes(gpu(1), S, Cause.XID)
    assert (condemned.confidence, condemned.xids) == (Confidence.CONCLUSIVE, (119,))
    assert (await host.becomes(rank(1), S, Cause.XID)).xids == (119,)
    assert {v.subject for _, v in host.said if v.health == S} == {gpu(1), rank(1)}


async def test_an_xid_that_the_driver_answers_with_none_condemns_nobody(host: Host) -> None:
    host.kernel_says("NVRM: Xid (PCI:0000:2b:00): 119, pid=1, name=x, Timeout waiting for RPC from GSP!")
    await host.becomes(gpu(1), U, Cause.XID)
    await host.becomes(gpu(1), H, Cause.XID)
    assert not [v for _, v in host.said if v.health == S]


async def test_a_lost_gpu_condemns_its_rank_and_the_other_gpus_stay_healthy(host: Host) -> None:
    host.script.order(0, "!15:1", 2, 3)
    assert (await host.becomes(gpu(1), S, Cause.GPU_LOST)).confidence == Confidence.CONCLUSIVE
    await host.becomes(rank(1), S, Cause.GPU_LOST)
    assert {v.subject for v in host.round().gpus if v.health == H} == {gpu(0), gpu(2), gpu(3)}


async def test_an_nvml_that_hangs_makes_gpus_unknown_and_says_so_in_the_sensors_status(host: Host) -> None:
    host.script.call("*", "nvmlDeviceGetFieldValues", "hang")
    await host.becomes(gpu(1), U, Cause.TELEMETRY_LOST)
    host.script.call("*", "nvmlDeviceGetFieldValues", "ok")
    await host.becomes(gpu(1), H, Cause.NONE)
    assert not [v for _, v in host.said if v.health == S]


async def test_a_sensor_that_raises_is_reported_once_and_the_others_are_asked(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[object]:
        raise RuntimeError("a defect")

    monkeypatch.setattr(host.nvml, "tick", broken)
    host.round()
    host.round()
    assert host.errors == ["nvml"]
    status = {s.name: s for s in host.senses.status()}
    assert (status["nvml"].state, status["nvml"].why) == ("silent", "it failed: RuntimeError('a defect')")
    host.kernel_says("NVRM: Xid (PCI:0000:2b:00): 31, pid=1, name=x, MMU Fault")
    await host.becomes(gpu(1), H, Cause.XID)


async def test_a_scan_reads_everything_once_and_finds_a_gpu_that_needs_a_reset(tmp_path: Path) -> None:
    script = Script.healthy(tmp_path / "script", 2)
    config = NvmlConfig(**QUICK, library_dir=library(), environment=fake_nvml.environment(script.path))

    def machine() -> GpuMachine:
        return GpuMachine(NvmlSensor(SystemClock(), config), (), catalogue())

    found = await scan(machine(), SystemClock(), 15.0, lambda text: None)
    assert (found.health, found.why, len(found.gpus)) == (H, "", 2)
    script.field(1, 230, 2)
    found = await scan(machine(), SystemClock(), 15.0, lambda text: None)
    assert found.health == S
    assert "the driver asks for a reboot of the node" in found.why
    script.field(1, 230, 0)
    script.call("*", "nvmlDeviceGetFieldValues", "hang")
    found = await scan(machine(), SystemClock(), 1.5, lambda text: None)
    assert found.health == U, "what could not be read is not healthy"
    assert "nvml" in found.why


async def test_a_scan_without_a_gpu_is_unknown_and_says_why() -> None:
    found = await scan(this_machine(SystemClock()), SystemClock(), 5.0, lambda text: None)
    if not found.gpus:
        assert found.health == U
        assert "no GPU was read" in found.why or "nvml" in found.why


def test_nvml_that_is_switched_off_leaves_no_sensor() -> None:
    off = Sensors.model_validate({"nvml": {"enabled": False}})
    assert this_machine(SystemClock(), off).sensors == ()


def test_a_site_whose_xid_rows_have_an_error_is_told_before_anything_starts(tmp_path: Path) -> None:
    rows = tmp_path / "own.yaml"
    rows.write_text("apiVersion: healer/v1\nkind: XidCatalogue\nxids:\n  - {code: 31, action: pray}\n")
    settings = Sensors.model_validate({"xidOverrides": str(rows)}, context={"base": "/"})
    with pytest.raises(ElasticError, match=r"own\.yaml:4"):
        this_machine(SystemClock(), settings)


async def test_a_rank_that_is_seen_on_a_gpu_is_judged_with_it_and_one_that_is_not_is_not(host: Host) -> None:
    assert dict(host.machine.hardware(host.members).placed) == {RankRef(1, 0): gpu(1)}
    assert host.machine.driver
    assert host.machine.generation == "hopper"
    assert [e for e in host.senses.round(0.0) if e.what == What.SENSOR_BLIND] == []
