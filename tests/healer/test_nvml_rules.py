"""What readings mean, over any answers that NVML may give."""

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from healer.evidence import GpuRef, Severity, What
from healer.sensors.nvml import NvmlConfig, wire
from healer.sensors.nvml.counters import Counter
from healer.sensors.nvml.rules import Told, rules
from healer.sensors.nvml.track import GpuTrack

GPU = GpuRef("GPU-1", "0000:1b:00.0")

NAMES = [
    "recovery_action", "sram_threshold", "remap_pending", "remap_failed", "clock_reasons", "temperature_c",
    "slowdown_c", "utilization", "pcie_width", "pcie_width_max", "pcie_gen", "pcie_gen_max", "pcie_replays",
    "nvlinks_active", "nvlinks", "nvlink_replays", "nvlink_recoveries", "fabric_state", "fabric_status",
    "fabric_summary", "fabric_health", "thermal_hw_ns", "power_brake_ns", "ecc_unc_volatile_dram",
    "ecc_unc_aggregate_sram", "ecc_cor_volatile_dram", "ecc_cor_volatile_sram",
]  # fmt: skip
VALUES = st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1))
READINGS = st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=12), max_size=15)
CODES = st.dictionaries(st.sampled_from(["fields 230", "memory", "processes"]), st.integers(0, 1000), max_size=3)


def track() -> GpuTrack:
    return GpuTrack(GPU, NvmlConfig(), 0.0)


def reading(
    at: float, values: dict[str, int], codes: dict[str, int] | None = None, group: str = "medium"
) -> wire.Reading:
    return wire.Reading(at, GPU.uuid, group, 0.001, values, codes or {})


def feed(*steps: tuple[float, dict[str, int]]) -> list[Told]:
    own = track()
    return [told for at, values in steps for told in own.reading(reading(at, values))]


@given(READINGS, st.lists(CODES, max_size=15))
def test_no_answer_of_nvml_breaks_the_sensor(answers: list[dict[str, int]], codes: list[dict[str, int]]) -> None:
    own = track()
    for step, values in enumerate(answers):
        told = list(own.reading(reading(float(step), values, codes[step] if step < len(codes) else {})))
        for each in told:
            assert isinstance(each.value, str | int | float)


@given(READINGS)
def test_blanks_between_readings_change_nothing_that_is_told(answers: list[dict[str, int]]) -> None:
    """Case 18."""
    plain = feed(*((float(i), values) for i, values in enumerate(answers)))
    blanks = [step for i, values in enumerate(answers) for step in ((float(i), values), (i + 0.5, {}))]
    assert feed(*blanks) == plain


@given(READINGS)
def test_the_same_reading_again_tells_nothing_new(answers: list[dict[str, int]]) -> None:
    """But for what needs two readings to be believed."""
    own = track()
    for step, values in enumerate(answers):
        list(own.reading(reading(float(step), values)))
    if answers:
        at = float(len(answers))
        list(own.reading(reading(at, answers[-1])))
        list(own.reading(reading(at + 1000, answers[-1])))
        assert list(own.reading(reading(at + 2000, answers[-1]))) == []


@given(st.lists(st.integers(0, 2**63), min_size=2, max_size=20))
def test_a_counter_never_goes_backwards_and_never_invents_errors(values: list[int]) -> None:
    counter, total = Counter(), 0
    for at, value in enumerate(values):
        growth = counter.read(value, float(at))
        if growth is not None:
            assert growth.delta >= 0
            total += growth.delta
    rises = sum(max(0, b - a) if b >= a else b for a, b in itertools.pairwise(values))
    assert total == rises


@given(st.dictionaries(st.sampled_from(["values", "codes", "at", "gpu", "t", "x"]), st.text(max_size=5), max_size=5))
def test_a_line_that_is_none_is_refused_whole(fields: dict[str, str]) -> None:
    with pytest.raises(msgspec.MsgspecError):
        wire.decode(msgspec.json.encode(fields))


def test_one_unknown_error_is_not_a_lost_gpu_but_three_in_a_row_are() -> None:
    own = track()
    good, bad = reading(1.0, {"recovery_action": 0}), reading(2.0, {}, {"fields 230": 999}, "fast")
    assert [t for r in (bad, bad, good, bad, bad) for t in own.reading(r)] == []
    (told,) = own.reading(bad)
    assert (told.what, told.value) == (What.GPU_LOST, 999)


def test_a_reading_that_was_under_way_when_the_gpu_was_lost_does_not_bring_it_back() -> None:
    own = track()
    assert [t.what for t in own.gone("unavailable", 5.0)] == [What.GPU_LOST]
    late = wire.Reading(5.2, GPU.uuid, "medium", 0.5, {"recovery_action": 0}, {})
    assert list(own.reading(late)) == []
    (told,) = own.reading(reading(6.0, {"recovery_action": 0}))
    assert told.what == What.GPU_BACK


def test_an_hour_of_healthy_readings_with_honest_noise_tells_nothing() -> None:
    noise = random.Random(7)
    corrected, replays = 0, 0
    own = track()
    for step in range(1800):
        corrected += noise.random() < 0.02
        replays += noise.random() < 0.05
        values = {
            "recovery_action": 0,
            "ecc_cor_volatile_dram": corrected,
            "ecc_unc_volatile_dram": 0,
            "remap_pending": 0,
            "clock_reasons": noise.choice([0, 4, 1]),
            "temperature_c": noise.randint(50, 80),
            "slowdown_c": 87,
            "utilization": noise.randint(0, 100),
            "pcie_width": 16,
            "pcie_width_max": 16,
            "pcie_gen": 5,
            "pcie_gen_max": 5,
            "pcie_replays": replays,
            "nvlinks_active": 18,
            "nvlinks": 18,
            "fabric_state": 3,
        }
        assert list(own.reading(reading(2.0 * step, values))) == []


def test_everything_that_a_rule_tells_it_also_takes_back() -> None:
    sick = {
        "recovery_action": 1, "sram_threshold": 1, "remap_pending": 1, "clock_reasons": 0x40, "temperature_c": 99,
        "slowdown_c": 87, "utilization": 50, "pcie_width": 8, "pcie_width_max": 16, "nvlinks_active": 17, "nvlinks": 18,
        "fabric_state": 3, "fabric_summary": 2,
    }  # fmt: skip
    well = sick | {
        "recovery_action": 0, "sram_threshold": 0, "remap_pending": 0, "clock_reasons": 0, "temperature_c": 50,
        "pcie_width": 16, "nvlinks_active": 18, "fabric_summary": 1,
    }  # fmt: skip
    own = list(rules(NvmlConfig()))
    told = [t for at, v in ((0.0, well), (2.0, well), (4.0, sick), (6.0, sick)) for r in own for t in r(v, at)]
    assert {t.severity for t in told} <= {Severity.WARNING, Severity.CRITICAL}
    back = [t for at in (8.0, 10.0, 30.0) for r in own for t in r(well, at)]
    assert {t.what for t in back} == {t.what for t in told}
    assert {t.severity for t in back} == {Severity.INFO}
