"""What a failing GPU looks like through NVML. Case numbers: docs/diagnosis.md."""

from pathlib import Path

import pytest

from chaos.fake_nvml import pci_of
from healer.evidence import GpuRef, HostRef, Severity, What
from healer.sensors import SensorState
from healer.sensors.nvml.config import (
    EVENT_DBE,
    EVENT_DRAM_RETIREMENT_FAILED,
    EVENT_POISON_FATAL,
    EVENT_RECOVERY_ACTION,
    EVENT_SBE,
    EVENT_UNAVAILABLE,
    EVENT_XID,
)
from tests.healer.nvml_rig import NvmlRig, gpu


async def test_healthy_gpus_give_no_evidence_at_all(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=8, deadline_s=3.0) as rig:
        await rig.ready()
        await rig.rounds(100)
        assert rig.seen == []
        status = rig.sensor.status()
        assert (status.state, len(rig.sensor.gpus)) == (SensorState.OK, 8)
        assert status.readings >= 100
        assert status.cost.cpu_s > 0
        assert 0 < status.cost.mean_s <= status.cost.max_s


async def test_an_xid_is_told_at_once_and_wakes_the_daemon(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path) as rig:
        await rig.ready()
        rig.script.event(1, EVENT_XID, 79)
        (seen,) = await rig.sees(What.XID)
        assert (seen.subject, seen.value) == (gpu(1), 79)
        assert rig.wakes


async def test_case_20_two_equal_xids_are_two(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path) as rig:
        await rig.ready()
        rig.script.event(2, EVENT_XID, 31)
        rig.script.event(2, EVENT_XID, 31)
        first, second = await rig.sees(What.XID, 2, times=2)
        assert first.id != second.id


async def test_case_19_an_xid_is_an_event_and_not_a_state_that_never_clears(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path) as rig:
        await rig.ready()
        rig.script.event(0, EVENT_XID, 31)
        await rig.sees(What.XID)
        await rig.rounds(60)
        assert len(rig.of(What.XID)) == 1, "told once, however long the sensor goes on"


async def test_events_from_before_the_start_are_not_told_again_after_a_restart(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path) as rig:
        await rig.ready()
        rig.script.event(0, EVENT_XID, 13)
        await rig.sees(What.XID)
    again = NvmlRig(tmp_path)
    again.script.event(0, EVENT_XID, 13)
    async with again as rig:
        await rig.ready()
        await rig.rounds(30)
        assert not rig.of(What.XID)


async def test_case_15_a_stuck_gpu_without_any_event_is_found_by_its_recovery_action(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path) as rig:
        await rig.ready()
        rig.script.field(3, 230, 1)
        (seen,) = await rig.sees(What.RECOVERY_ACTION, 3)
        assert (seen.value, seen.severity) == (1, Severity.CRITICAL)
        rig.script.field(3, 230, 0)
        assert [e.value for e in await rig.sees(What.RECOVERY_ACTION, 3, times=2)] == [1, 0]


@pytest.mark.parametrize("action", range(1, 8))
async def test_every_recovery_action_that_the_driver_can_ask_for_is_told(tmp_path: Path, action: int) -> None:
    async with NvmlRig(tmp_path, gpus=1) as rig:
        rig.script.field(0, 230, action)
        (seen,) = await rig.sees(What.RECOVERY_ACTION)
        assert seen.value == action


async def test_a_recovery_action_that_nobody_knows_yet_is_neither_health_nor_a_reset(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=1) as rig:
        rig.script.field(0, 230, 12)
        (seen,) = await rig.sees(What.SENSOR_BLIND)
        assert "12" in str(seen.value)
        assert not rig.of(What.RECOVERY_ACTION)


async def test_the_recovery_action_is_read_right_after_its_event(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, fast_s=30.0, deadline_s=60.0) as rig:
        await rig.ready()
        rig.script.say("set 1 field.230 4", f"event 1 1 {EVENT_RECOVERY_ACTION:#x} 0")
        (seen,) = await rig.sees(What.RECOVERY_ACTION, 1)
        assert seen.value == 4


@pytest.mark.parametrize("code", [15, 28, 999])
async def test_case_12_one_lost_gpu_of_eight_does_not_hide_the_others(tmp_path: Path, code: int) -> None:
    async with NvmlRig(tmp_path, gpus=8) as rig:
        await rig.ready()
        rig.script.say(f"call 3 * err {code}")
        (seen,) = await rig.sees(What.GPU_LOST)
        assert (seen.subject, seen.value, seen.severity) == (gpu(3), code, Severity.CRITICAL)
        rig.script.field(7, 230, 1)
        await rig.sees(What.RECOVERY_ACTION, 7)
        assert rig.sensor.status().state is SensorState.OK
        assert "is lost" in rig.sensor.status().why
        rig.script.call(3, "*", "ok")
        (back,) = await rig.sees(What.GPU_BACK, 3)
        assert float(back.value) > 0


@pytest.mark.parametrize("code", [15, 999])
async def test_case_12_a_gpu_that_cannot_be_opened_at_the_start_is_told_and_the_rest_is_read(
    tmp_path: Path, code: int
) -> None:
    for number in range(8):
        (tmp_path / "root/proc/driver/nvidia/gpus" / pci_of(number)).mkdir(parents=True)
    rig = NvmlRig(tmp_path, gpus=8)
    rig.script.order(0, 1, 2, f"!{code}:3", 4, 5, 6, 7)
    async with rig:
        await rig.ready()
        (seen,) = await rig.sees(What.GPU_LOST)
        assert (seen.subject, seen.value) == (GpuRef("", pci_of(3)), code)
        assert len(rig.sensor.gpus) == 7


async def test_a_gpu_that_cannot_be_opened_and_is_nowhere_named_is_the_hosts_trouble(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path, gpus=2)
    rig.script.order(0, "!15:1")
    async with rig:
        (seen,) = await rig.sees(What.GPU_LOST)
        assert isinstance(seen.subject, HostRef)


async def test_a_gpu_that_cannot_be_opened_stays_lost_although_its_old_handle_answers(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=2) as rig:
        await rig.ready()
        rig.script.order(0, "!15:1")
        await rig.sees(What.GPU_LOST, 1)
        await rig.rounds(30)
        assert not rig.of(What.GPU_BACK)
        rig.script.order(0, 1)
        await rig.sees(What.GPU_BACK, 1)


async def test_a_gpu_that_is_no_longer_listed_is_lost_and_its_neighbours_keep_their_names(tmp_path: Path) -> None:
    """Case 33, first half: NVML closes the gap in its numbers."""
    async with NvmlRig(tmp_path, gpus=8) as rig:
        await rig.ready()
        rig.script.order(0, 1, 2, 4, 5, 6, 7)
        rig.script.call(3, "*", "err 15")
        (lost,) = await rig.sees(What.GPU_LOST)
        assert lost.subject == gpu(3)
        rig.script.event(7, EVENT_XID, 48)
        (seen,) = await rig.sees(What.XID)
        assert seen.subject == gpu(7), "named by UUID, whatever its number is now"
        board = rig.identity.board(gpu(7))
        assert board is not None
        await rig.until(lambda: (b := rig.identity.board(gpu(7))) and b.index == 6, "it is renumbered")


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetFieldValues", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetNvLinkState"],
)
async def test_case_13_reset_required_counts_whichever_call_says_it(tmp_path: Path, function: str) -> None:
    async with NvmlRig(tmp_path) as rig:
        await rig.ready()
        rig.script.call(2, function, "err 16")
        (seen,) = await rig.sees(What.RESET_REQUIRED)
        assert (seen.subject, seen.value, seen.severity) == (gpu(2), 16, Severity.CRITICAL)
        assert not rig.of(What.GPU_LOST)


async def test_case_13_a_gpu_that_cannot_even_be_opened_before_a_reset(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path) as rig:
        await rig.ready()
        rig.script.order(0, 1, "!16:2", 3)
        (seen,) = await rig.sees(What.RESET_REQUIRED)
        assert seen.subject == gpu(2)


async def test_case_14_all_links_of_a_gpu_down_are_told_although_it_never_saw_them_up(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path, gpus=2)
    rig.script.set(1, nvlink=0)
    async with rig:
        (seen,) = await rig.sees(What.NVLINK_DOWN)
        assert (seen.subject, seen.value) == (gpu(1), 18)


async def test_a_gpu_without_a_fabric_and_without_bridges_has_no_link_trouble(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path, gpus=1, deadline_s=3.0)
    rig.script.set(0, nvlink=0, fabric__state="err:3")
    async with rig:
        await rig.ready()
        await rig.rounds(40)
        assert rig.seen == []


async def test_one_link_that_goes_down_and_comes_back(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path) as rig:
        await rig.ready()
        rig.script.set(0, nvlink__5=0)
        await rig.sees(What.NVLINK_DOWN)
        rig.script.set(0, nvlink__5=1)
        assert [e.value for e in await rig.sees(What.NVLINK_DOWN, 0, times=2)] == [1, 0]


async def test_case_1_a_rotting_gpu_whose_correctable_errors_climb_is_told_by_rate(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path) as rig:
        await rig.ready()
        rig.script.set(1, ecc__corrected__volatile__dram="0+17657/s")
        (seen,) = await rig.sees(What.ECC_CORRECTABLE)
        assert seen.subject == gpu(1)
        assert 5_000 < float(seen.value) < 60_000
        rig.script.set(1, ecc__corrected__volatile__dram=400_000)
        _, over = await rig.sees(What.ECC_CORRECTABLE, 1, times=2)
        assert over.severity is Severity.INFO


async def test_case_1_the_rate_is_told_by_events_while_the_call_that_counts_hangs(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, ecc_correctable_per_s=1.0, restart_s=30.0, restart_max_s=30.0) as rig:
        await rig.ready()
        rig.script.call(1, "nvmlDeviceGetMemoryErrorCounter", "hang")
        await rig.sees(What.SENSOR_SILENT, 1)
        await rig.until(lambda: rig.log.read_text().count("register") == 8, "the second probe listens for events")
        for _ in range(15):
            rig.script.event(1, EVENT_SBE)
        (seen,) = await rig.sees(What.ECC_CORRECTABLE, 1)
        assert float(seen.value) > 1.0


async def test_uncorrectable_errors_are_told_by_how_many_more_there_are(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path, deadline_s=3.0)
    rig.script.set(0, ecc__uncorrected__volatile__sram=5)
    async with rig:
        await rig.ready()
        await rig.rounds(20)
        assert rig.seen == [], "what happened before the daemon came is history"
        rig.script.set(0, ecc__uncorrected__volatile__sram=7)
        (seen,) = await rig.sees(What.ECC_UNCORRECTABLE)
        assert (seen.value, seen.detail) == (2, "sram")
        rig.script.set(0, ecc__uncorrected__volatile__sram=1)
        _, after = await rig.sees(What.ECC_UNCORRECTABLE, times=2)
        assert after.value == 1, "a reset has set the counter back, and one more came since"


@pytest.mark.parametrize(
    ("reading", "what", "severity"),
    [
        ("remap__pending", What.REMAP_PENDING, Severity.WARNING),
        ("remap__failed", What.REMAP_FAILED, Severity.CRITICAL),
        ("sram__threshold", What.SRAM_THRESHOLD, Severity.CRITICAL),
    ],
)
async def test_memory_that_is_worn_out_is_told_and_taken_back(
    tmp_path: Path, reading: str, what: What, severity: Severity
) -> None:
    async with NvmlRig(tmp_path) as rig:
        rig.script.set(2, **{reading: 1})
        (seen,) = await rig.sees(what)
        assert (seen.subject, seen.value, seen.severity) == (gpu(2), 1, severity)
        rig.script.set(2, **{reading: 0})
        assert [e.value for e in await rig.sees(what, 2, times=2)] == [1, 0]


@pytest.mark.parametrize(
    ("kind", "what", "value"),
    [
        (EVENT_POISON_FATAL, What.POISON, "fatal"),
        (EVENT_DBE, What.ECC_UNCORRECTABLE, 1),
        (EVENT_DRAM_RETIREMENT_FAILED, What.REMAP_FAILED, 1),
        (EVENT_UNAVAILABLE, What.GPU_LOST, "unavailable"),
    ],
)
async def test_each_kind_of_event_is_told_as_what_it_is(
    tmp_path: Path, kind: int, what: What, value: str | int
) -> None:
    async with NvmlRig(tmp_path, gpus=2) as rig:
        await rig.ready()
        rig.script.event(1, kind)
        seen = await rig.sees(what, 1)
        assert seen[0].value == value


async def test_the_clock_event_is_never_registered_nor_one_that_the_gpu_does_not_support(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path, gpus=2)
    rig.script.set(1, events=0x18)
    async with rig:
        await rig.ready()
        await rig.until(lambda: rig.log.read_text().count("register") == 2, "both are registered")
    masks = {line.split()[1]: int(line.split()[2], 16) for line in rig.log.read_text().splitlines() if "regis" in line}
    assert masks == {"0": 0xFF9F & ~0x10 & ~0x84 & ~0x100, "1": 0x8}


async def test_case_27_an_event_of_one_mig_instance_counts_for_the_whole_gpu(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path, gpus=2)
    rig.script.set(1, mig=1)
    rig.script.say("mig 1 3 0 MIG-11111111-2222-3333-4444-555555555555")
    async with rig:
        await rig.ready()
        rig.script.event(1, EVENT_XID, 94, "3 0")
        (seen,) = await rig.sees(What.XID)
        assert seen.subject == gpu(1)
        assert "MIG instance 3" in seen.detail
        assert rig.identity.by_name("MIG-11111111-2222-3333-4444-555555555555") == gpu(1)


async def test_a_gpu_slowed_down_by_heat_is_told_with_the_reason(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, throttle_clear_s=0.2) as rig:
        await rig.ready()
        rig.script.set(0, clocks=0x48, temperature=90)
        (seen,) = await rig.sees(What.THROTTLED)
        assert seen.value == "hw-slowdown,hw-thermal"
        (hot,) = await rig.sees(What.HOT)
        assert (hot.value, hot.severity) == (90, Severity.WARNING)
        rig.script.set(0, clocks=0x4, temperature=60)
        assert [e.value for e in await rig.sees(What.THROTTLED, 0, times=2)][1] == ""
        assert [e.severity for e in await rig.sees(What.HOT, 0, times=2)][1] is Severity.INFO


async def test_throttling_between_two_readings_is_seen_in_the_drivers_counters(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path) as rig:
        await rig.ready()
        rig.script.field(0, 271, "0+300000000/s")
        (seen,) = await rig.sees(What.THROTTLED)
        assert seen.value == "power-brake"


async def test_a_narrow_pcie_link_is_told_under_load_only(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path)
    rig.script.set(0, pcie__width=8, utilization=0)
    rig.script.set(1, pcie__generation=3)
    async with rig:
        await rig.ready()
        (seen,) = await rig.sees(What.PCIE_DEGRADED)
        assert (seen.subject, seen.value) == (gpu(1), "gen3/gen5")
        rig.script.set(0, utilization=90)
        (seen,) = await rig.sees(What.PCIE_DEGRADED, 0)
        assert seen.value == "8/16"


async def test_link_errors_and_pcie_replays_are_told_by_rate(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path) as rig:
        await rig.ready()
        rig.script.field(0, 162, "0+5/s")
        rig.script.field(1, 94, "0+50/s")
        (seen,) = await rig.sees(What.NVLINK_ERRORS)
        assert seen.subject == gpu(0)
        (seen,) = await rig.sees(What.PCIE_REPLAYS)
        assert seen.subject == gpu(1)


@pytest.mark.parametrize(
    ("readings", "value"),
    [
        ({"fabric__status": 999}, "status-999"),
        ({"fabric__summary": 2}, "unhealthy"),
        ({"fabric__state": 1}, "not-started"),
    ],
)
async def test_a_gpu_that_the_fabric_gave_up_is_told(tmp_path: Path, readings: dict[str, int], value: str) -> None:
    async with NvmlRig(tmp_path) as rig:
        await rig.ready()
        rig.script.set(1, **readings)
        (seen,) = await rig.sees(What.FABRIC_FAILED)
        assert (seen.subject, seen.value) == (gpu(1), value)
        rig.script.set(1, fabric__status=0, fabric__summary=0, fabric__state=3)
        assert (await rig.sees(What.FABRIC_FAILED, 1, times=2))[1].value == ""


async def test_case_36_a_fault_that_stands_is_told_again_by_a_daemon_that_is_started_again(tmp_path: Path) -> None:
    rig = NvmlRig(tmp_path)
    rig.script.set(1, remap__pending=1)
    rig.script.field(2, 230, 2)
    async with rig:
        await rig.sees(What.REMAP_PENDING, 1)
    again = NvmlRig(tmp_path)
    again.script.set(1, remap__pending=1)
    again.script.field(2, 230, 2)
    async with again:
        await again.sees(What.REMAP_PENDING, 1)
        await again.sees(What.RECOVERY_ACTION, 2)
        again.script.set(1, remap__pending=0)
        assert (await again.sees(What.REMAP_PENDING, 1, times=2))[1].severity is Severity.INFO
