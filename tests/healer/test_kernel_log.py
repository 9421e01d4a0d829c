"""The kernel log: its lines, its position, its overruns. Case numbers: docs/diagnosis.md."""

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from healer.evidence import Evidence, GpuRef, HostRef, Severity, What
from healer.identity import Board, IdentityMap
from healer.sensors import SensorState
from healer.sensors.kernel_lines import LineReader
from healer.sensors.kernel_log import KernelLogSensor, Position
from tests.healer.support import FakeClock

XID_79 = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python3, GPU has fallen off the bus."
GPU_1B = GpuRef("", "0000:1b:00.0")


def told(*lines: str) -> list[tuple[str, What, str | int]]:
    reader = LineReader()
    return [(fact.pci, fact.what, fact.value) for line in lines for fact in reader.read(line)]


# --- lines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "pci", "code"),
    [
        (XID_79, "0000:1b:00.0", 79),
        ("NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp", "0000:cb:00.0", 13),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "0000:03:00.0", 14),
        ("NVRM: Xid (PCI:0000:1b:00 GPU-I:01): 94, pid=7, name=x, Contained: CE", "0000:1b:00.0", 94),
        ("NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6)", "0018:01:00.0", 149),
        ("NVRM: Xid (PCI:00000000:B3:00.0): 48, An uncorrectable double bit error", "0000:b3:00.0", 48),
    ],
)
def test_an_xid_line_is_read_however_the_driver_writes_the_address(line: str, pci: str, code: int) -> None:
    assert told(line) == [(pci, What.XID, code)]


@pytest.mark.parametrize(
    "lines",
    [
        ("NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.",),
        (
            "NVRM: The NVIDIA GPU 0000:1b:00.0",
            "NVRM: (PCI ID: 10de:2335) installed in this system has",
            "NVRM: fallen off the bus and is not responding to commands.",
        ),
        (
            "NVRM: The NVIDIA GPU 0000:1b:00.0 (PCI ID: 10de:1e07) installed in this",
            "NVRM: system has fallen off the bus and is not responding to commands.",
        ),
    ],
)
def test_case_9_a_gpu_off_the_bus_without_an_xid_is_found_in_each_of_its_three_shapes(lines: tuple[str, ...]) -> None:
    assert told(*lines) == [("0000:1b:00.0", What.GPU_LOST, "fell-off-bus")]


def test_the_lines_of_another_gpu_in_between_do_not_put_the_wrong_gpu_off_the_bus() -> None:
    assert told(
        "NVRM: The NVIDIA GPU 0000:1b:00.0",
        "NVRM: The NVIDIA GPU 0000:2b:00.0",
        "NVRM: (PCI ID: 10de:2335) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ) == [("0000:2b:00.0", What.GPU_LOST, "fell-off-bus")]


def test_a_line_long_after_the_address_is_not_joined_to_it() -> None:
    probing = ["NVRM: The NVIDIA GPU 0000:1b:00.0", *["NVRM: something else happens"] * 3]
    assert told(*probing, "NVRM: fallen off the bus and is not responding to commands.") == []


def test_the_recovery_action_stands_in_the_line_of_xid_154() -> None:
    line = "NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    assert told(line) == [("0000:1b:00.0", What.XID, 154), ("0000:1b:00.0", What.RECOVERY_ACTION, 1)]


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        (
            "nvidia 0000:1b:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
            ("0000:1b:00.0", What.PCIE_AER, "corrected"),
        ),
        (
            "nvidia 0000:1b:00.0: AER: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer",
            ("0000:1b:00.0", What.PCIE_AER, "fatal"),
        ),
        (
            "nvidia 0000:1b:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer",
            ("0000:1b:00.0", What.PCIE_AER, "nonfatal"),
        ),
        (
            "pcieport 0000:00:01.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)",
            ("", What.PCIE_AER, "corrected"),
        ),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:85:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            ("", What.FABRIC_FAILED, "SXid 20034"),
        ),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)",
            ("", What.NVLINK_ERRORS, "SXid 12028"),
        ),
    ],
)
def test_buses_and_switches_are_told_with_their_severity(line: str, fact: tuple[str, What, str]) -> None:
    assert told(line) == [fact]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "usb 1-1: new high-speed USB device",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04",
        "NVRM: Xid error: xyz, invalid data",
        "NVRM: Xid (PCI:zz:zz): 79, nonsense",
        "NVRM: fallen off the bus and is not responding to commands.",
        "python3: I print NVRM: things",
        "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context",
    ],
)
def test_a_line_that_says_nothing_about_a_fault_is_no_evidence(line: str) -> None:
    assert told(line) == []


FRAGMENTS = [
    "NVRM: ",
    "Xid (",
    "PCI:",
    "0000:1b:00",
    "): ",
    "79",
    ",",
    "SXid ",
    "Fatal",
    "PCIe Bus Error: severity=",
    "\x00",
    "é",
]


@given(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=12)), max_size=14).map("".join))
def test_no_line_whatever_it_holds_breaks_the_reader_or_names_a_gpu_that_it_does_not_name(line: str) -> None:
    for fact in LineReader().read(line):
        assert fact.pci == "" or fact.pci.split(":")[1].lower().lstrip("0") in line.lower()


@given(st.binary(max_size=300))
def test_no_bytes_in_the_log_break_the_sensor(content: bytes) -> None:
    sensor = KernelLogSensor(FakeClock(), position=None)
    sensor._record(content)


# --- the log as a device --------------------------------------------------------------------------------------------


class Kmsg:
    """Stands for the kernel's side of /dev/kmsg: records with numbers, one for each read, EAGAIN at the end. The sensor's
    file descriptor is that of a fifo, which wakes the loop."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "kmsg"
        self.boot = folder / "boot_id"
        self.boot.write_text("boot-1\n")
        os.mkfifo(self.path)
        self.records: list[bytes] = []
        self.next = 0
        self.overrun = False
        self.clock = FakeClock()
        self.identity = IdentityMap()
        self.seen: list[Evidence] = []
        self.writer = -1

    def write(self, text: str, stamp_s: float = 50.0) -> None:
        self.records.append(f"3,{len(self.records) + 100},{round(stamp_s * 1e6)},-;{text}\n SUBSYSTEM=pci\n".encode())
        if self.writer >= 0:
            os.write(self.writer, b".")

    def read(self, fd: int, size: int) -> bytes:
        with contextlib.suppress(BlockingIOError):
            os.read(fd, 1)
        if self.overrun:
            self.overrun = False
            raise OSError(errno.EPIPE, "overrun")
        if self.next >= len(self.records):
            raise BlockingIOError
        self.next += 1
        return self.records[self.next - 1]

    def sensor(self, *, position: bool = True) -> KernelLogSensor:
        self.next = 0  # a file that is opened anew begins with the oldest record
        return KernelLogSensor(
            self.clock,
            path=self.path,
            position=self.folder / "position.json" if position else None,
            identity=self.identity,
            boot_id=self.boot,
            read=self.read,
        )


@pytest.fixture
def kmsg(tmp_path: Path) -> Kmsg:
    return Kmsg(tmp_path)


async def run(kmsg: Kmsg, sensor: KernelLogSensor, then: Callable[[], None] = lambda: None) -> list[Evidence]:
    """Start, let something happen, read, stop in order."""
    woken = asyncio.Event()
    sensor.start(woken.set)
    kmsg.writer = os.open(kmsg.path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        then()
        await asyncio.sleep(0.02)
        kmsg.clock.now += 2.0
        found = sensor.tick()
    finally:
        os.close(kmsg.writer)
        kmsg.writer = -1
        await sensor.stop()
    assert woken.is_set() == bool(found)
    return found


async def test_a_line_wakes_the_daemon_and_keeps_its_own_words(kmsg: Kmsg) -> None:
    (seen,) = await run(kmsg, kmsg.sensor(), lambda: kmsg.write(XID_79))
    assert (seen.subject, seen.what, seen.value, seen.detail) == (GPU_1B, What.XID, 79, XID_79)
    assert seen.at == 100.0, "read as it came: now, on the daemon's clock"


async def test_case_35_a_daemon_started_again_tells_nothing_twice_and_misses_nothing(kmsg: Kmsg) -> None:
    assert len(await run(kmsg, kmsg.sensor(), lambda: kmsg.write(XID_79))) == 1
    kmsg.write(XID_79.replace(" 79,", " 48,"), stamp_s=99.0)  # while no daemon runs
    (seen,) = await run(kmsg, kmsg.sensor())
    assert (seen.value, seen.at) == (48, 99.0)
    assert await run(kmsg, kmsg.sensor()) == []


async def test_case_35_a_daemon_that_is_killed_tells_nothing_twice(kmsg: Kmsg) -> None:
    sensor = kmsg.sensor()
    sensor.start(lambda: None)
    kmsg.write(XID_79)
    sensor._readable()
    assert len(sensor.tick()) == 1
    killed = kmsg.sensor()  # no stop() in between
    assert await run(kmsg, killed) == []
    await sensor.stop()


async def test_case_35_another_boot_is_another_log(kmsg: Kmsg) -> None:
    await run(kmsg, kmsg.sensor(), lambda: kmsg.write(XID_79))
    kmsg.boot.write_text("boot-2\n")
    (seen,) = await run(kmsg, kmsg.sensor())
    assert seen.value == 79, "the same number, but nobody has read this log"


async def test_the_first_daemon_on_a_host_does_not_tell_of_last_weeks_xids(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(f"3,1,5,-;{XID_79}\n")
    sensor = KernelLogSensor(FakeClock(), path=log, position=tmp_path / "position.json")
    sensor.start(lambda: None)
    assert sensor.tick() == []
    with log.open("a") as file:
        file.write(f"3,2,6,-;{XID_79}\n")
    assert [e.value for e in sensor.tick()] == [79]
    await sensor.stop()


async def test_a_damaged_memory_of_the_position_is_no_memory(kmsg: Kmsg) -> None:
    (kmsg.folder / "position.json").write_text("{")
    (seen,) = await run(kmsg, kmsg.sensor(), lambda: kmsg.write(XID_79))
    assert seen.value == 79


async def test_an_overrun_of_the_kernels_buffer_is_told_and_reading_goes_on(kmsg: Kmsg) -> None:
    def flood() -> None:
        kmsg.overrun = True
        kmsg.write(XID_79)

    lost, seen = await run(kmsg, kmsg.sensor(), flood)
    assert (lost.what, lost.value, lost.severity) == (What.KERNEL_LOG_LOST, 1, Severity.WARNING)
    assert isinstance(lost.subject, HostRef)
    assert seen.value == 79


async def test_a_flood_of_lines_is_read_in_turns(kmsg: Kmsg) -> None:
    sensor = kmsg.sensor()
    sensor.start(lambda: None)
    for _ in range(1500):
        kmsg.records.append(f"6,{len(kmsg.records) + 100},1,-;usb 1-1: noise\n".encode())
    kmsg.write(XID_79)
    found = sensor.tick()
    turns = 0
    sensor._readable()
    while not found:
        found, turns = sensor.tick(), turns + 1
        assert turns < 10
    assert turns >= 3, "no turn reads it all"
    await sensor.stop()


@pytest.mark.parametrize("hours", [10, -10])
async def test_case_34_a_wall_clock_that_jumps_changes_no_age(kmsg: Kmsg, hours: int) -> None:
    sensor = kmsg.sensor()
    kmsg.clock.wall = lambda: 1_700_000_000.0 + hours * 3600  # type: ignore[method-assign]
    (seen,) = await run(kmsg, sensor, lambda: kmsg.write(XID_79, stamp_s=1e9))
    assert seen.at == 100.0


async def test_a_line_names_the_gpu_that_nvml_knows_at_the_address(kmsg: Kmsg) -> None:
    known = GpuRef("GPU-1234", "0000:1b:00.0")
    kmsg.identity.listed([Board(gpu=known, index=0)])
    (seen,) = await run(kmsg, kmsg.sensor(), lambda: kmsg.write(XID_79))
    assert seen.subject == known


async def test_case_17_an_xid_that_nvml_never_delivers_is_in_the_kernel_log(kmsg: Kmsg) -> None:
    def lines() -> None:
        for code in (79, 119, 120):
            kmsg.write(XID_79.replace(" 79,", f" {code},"))

    assert [e.value for e in await run(kmsg, kmsg.sensor(), lines)] == [79, 119, 120]


async def test_case_42_without_permission_it_says_once_that_nvml_is_the_only_witness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    sensor = KernelLogSensor(FakeClock(), position=tmp_path / "position.json")
    monkeypatch.setattr(os, "open", refuse)
    sensor.start(lambda: None)
    monkeypatch.undo()
    (seen,) = sensor.tick()
    assert (seen.what, type(seen.subject)) == (What.SENSOR_BLIND, HostRef)
    assert "NVML only" in str(seen.value)
    assert sensor.tick() == []
    assert sensor.status().state is SensorState.BLIND
    await sensor.stop()


async def test_the_position_is_written_at_most_once_a_second_without_news(kmsg: Kmsg) -> None:
    sensor = kmsg.sensor()
    sensor.start(lambda: None)
    for _ in range(50):
        kmsg.write("usb 1-1: noise")
        sensor._readable()
    sensor.tick()
    saved = msgspec.json.decode((kmsg.folder / "position.json").read_bytes(), type=Position)
    assert saved.seq == -1
    kmsg.clock.now += 1.5
    sensor.tick()
    saved = msgspec.json.decode((kmsg.folder / "position.json").read_bytes(), type=Position)
    assert saved.seq == 149
    await sensor.stop()


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="needs to read /dev/kmsg")
async def test_the_real_log_of_this_machine_can_be_opened_and_read(tmp_path: Path) -> None:
    from healer.clock import SystemClock

    sensor = KernelLogSensor(SystemClock(), position=tmp_path / "position.json")
    began = time.monotonic()
    sensor.start(lambda: None)
    assert time.monotonic() - began < 1.0
    if sensor.status().state is SensorState.BLIND:
        pytest.skip(sensor.status().why)
    sensor.tick()
    await sensor.stop()
