"""Recorded cases judged again: what the whole diagnosis says of each, from the first sign to the last."""

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from healer.diagnosis import Cause, Health, Verdict
from healer.evidence import GpuRef, HostRef, RankRef
from healer.machine import catalogue
from healer.replay import IncidentStep, Moment, Replay, TracedIncident
from healer.trace import Trace
from tests.healer.stage import Stage, advise
from tests.healer.traces.generate import FOLDER, SCENARIOS, path_of


class Judged(msgspec.Struct):
    moments: list[Moment]
    incidents: list[TracedIncident]

    def said(self, subject: str) -> list[Verdict]:
        """Each change of the verdict on "rank 1.0", "gpu 2" or "host"."""
        return [v for m in self.moments for v in m.verdicts if _name(v) == subject]

    def story(self, subject: str) -> list[tuple[Health, Cause]]:
        return [(v.health, v.cause) for v in self.said(subject)]

    def sick(self) -> set[str]:
        """All that was ever called unhealthy."""
        return {_name(v) for m in self.moments for v in m.verdicts if v.health == Health.UNHEALTHY}

    def suspects(self) -> set[str]:
        return {_name(v) for m in self.moments for v in m.verdicts if v.health == Health.UNKNOWN}

    def causes(self) -> list[tuple[Cause, tuple[int, ...]]]:
        return [(one.cause, one.slots) for one in self.incidents]


def _name(verdict: Verdict) -> str:
    match verdict.subject:
        case RankRef():
            return str(verdict.subject)
        case GpuRef():
            return f"gpu {int(verdict.subject.uuid[4:12], 16)}"
        case HostRef():
            return "host"


@functools.cache
def judged(name: str) -> Judged:
    replay = Replay(Trace(FOLDER / f"{name}.jsonl"), lambda view: advise)
    return Judged(list(replay), replay.incidents)


H, S, U = Health.HEALTHY, Health.UNHEALTHY, Health.UNKNOWN


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_the_traces_are_those_that_the_script_writes(scenario: Callable[[], Stage]) -> None:
    assert path_of(scenario).read_bytes() == scenario().encoded(), "run `python -m tests.healer.traces.generate`"


def test_a_gpu_off_the_bus_its_blank_readings_its_dead_rank_and_the_masks_are_one_incident_of_the_gpu() -> None:
    found = judged("xid-79-cascade")
    assert found.causes() == [(Cause.XID, (1,))]
    assert found.story("gpu 1")[:2] == [(U, Cause.XID), (S, Cause.XID)]
    assert found.said("gpu 1")[1].xids == (79,)
    (condemned,) = [v for v in found.said("rank 1.0") if v.health == S]
    assert "is lost" in condemned.sentence
    assert "XID 79 (GPU has fallen off the bus)" in condemned.sentence
    assert found.sick() == {"rank 1.0", "gpu 1"}, "peers that masked it are not accused, nor is its replacement"


def test_a_rank_that_died_of_an_xid_is_acted_upon_at_once_and_the_cause_follows() -> None:
    found = judged("xid-31")
    assert found.causes() == [(Cause.XID, (2,))]
    assert found.incidents[0].causes == (Cause.XID, Cause.PROCESS_DEATH)
    assert found.said("rank 2.0")[-1].cause == Cause.PROCESS_DEATH, "what was acted upon"
    steps = [(m.at - found.incidents[0].opened_at, step) for m in found.moments for step, _ in m.incidents]
    assert [step for _, step in steps] == [IncidentStep.OPENED, IncidentStep.REFINED, IncidentStep.CLOSED]
    assert steps[0][0] == 0.0
    assert steps[1][0] == pytest.approx(0.126), "with the kernel log's line, not with NVML's event"
    assert found.sick() == {"rank 2.0"}, "an XID of the application leaves the GPU alone"
    assert U not in {health for health, _ in found.story("rank 2.1")}, (
        "what befell its GPU before it came is none of its own"
    )


def test_a_killed_rank_without_any_xid_stays_a_process_death() -> None:
    found = judged("sigkill")
    assert found.causes() == [(Cause.PROCESS_DEATH, (0,))]
    assert found.sick() == {"rank 0.0"}


def test_corrected_errors_by_the_thousand_condemn_nobody_and_one_that_was_not_corrected_does_with_the_drivers_word() -> (
    None
):
    found = judged("ecc-storm")
    assert found.story("gpu 3")[:3] == [(H, Cause.ECC), (U, Cause.ECC), (S, Cause.XID)]
    assert found.causes() == [(Cause.XID, (3,))]
    assert found.sick() == {"rank 3.0", "gpu 3"}


def test_a_pending_row_remap_is_a_warning() -> None:
    found = judged("remap-pending")
    assert found.story("gpu 0") == [(H, Cause.XID), (H, Cause.REMAP)]
    assert found.suspects() | found.sick() == set()


def test_an_nvml_that_hangs_makes_gpus_unknown_and_ranks_not() -> None:
    found = judged("nvml-hang")
    for number in range(4):
        assert found.story(f"gpu {number}") == [(U, Cause.TELEMETRY_LOST), (H, Cause.NONE)]
    assert found.sick() == set()
    assert found.suspects() == {f"gpu {n}" for n in range(4)}


def test_a_driver_upgrade_heals_nobody_not_even_by_what_is_read_just_after_it() -> None:
    found = judged("driver-upgrade")
    assert found.story("host") == [(U, Cause.TELEMETRY_LOST), (H, Cause.NONE)]
    assert found.sick() == set()
    assert found.incidents == []


def test_a_wall_clock_that_jumps_ten_hours_changes_no_verdict() -> None:
    found = judged("clock-jump")
    assert {m.at for m in found.moments} == {1000.2}, "the first beats, and nothing after"
    walls = [line.evidence.wall for line in Trace(FOLDER / "clock-jump.jsonl") if hasattr(line, "evidence")]
    assert max(walls) - min(walls) > 35_000, "the trace does jump"


def test_a_daemon_that_stood_still_condemns_nobody_for_its_own_deafness() -> None:
    found = judged("telemetry-outage")
    for slot in range(4):
        assert found.story(f"rank {slot}.0") == [(H, Cause.NONE), (U, Cause.TELEMETRY_LOST), (H, Cause.NONE)]


def test_a_partition_into_two_halves_condemns_neither() -> None:
    found = judged("partition")
    assert found.sick() == set()
    assert found.suspects() == {f"rank {slot}.0" for slot in range(4)}


def test_a_word_that_is_lost_between_two_healthy_ranks_condemns_neither_and_tells_them_from_a_suspicion() -> None:
    found = judged("lost-completion")
    assert found.sick() == set()
    for slot in (0, 3):
        assert (U, Cause.MUTUAL_WAIT) in found.story(f"rank {slot}.0")
        assert found.story(f"rank {slot}.0")[-1] == (H, Cause.NONE)
    assert found.suspects() == {"rank 0.0", "rank 3.0"}, "those who only wait are not suspected"


def test_of_a_host_that_is_cut_off_from_most_others_the_one_is_condemned_and_no_other() -> None:
    found = judged("host-cut-off")
    assert found.causes() == [(Cause.STUCK, (3,))]
    assert found.sick() == {"rank 3.0"}
    (condemned,) = [v for v in found.said("rank 3.0") if v.health == S]
    assert "3 of 3 others and it wait for each other" in condemned.sentence


def test_ranks_that_wait_behind_a_cut_are_not_condemned_nor_is_one_that_has_just_masked_its_peer() -> None:
    assert judged("cut-off-within-a-step").sick() == set()


def test_a_straggler_is_named_and_left_alone() -> None:
    found = judged("straggler")
    assert found.story("rank 2.0") == [(H, Cause.NONE), (H, Cause.STRAGGLER), (H, Cause.NONE)]
    assert "5.5 times as long" in found.said("rank 2.0")[1].sentence
    assert found.suspects() | found.sick() == set()


def test_two_equal_xids_are_two_and_not_four_though_each_is_told_twice() -> None:
    found = judged("two-equal-xids")
    assert "XID 13 (graphics engine exception, 2 times)" in found.said("rank 1.0")[2].sentence
    assert found.sick() == set()


def test_a_fabric_that_fails_is_the_hosts_fault_and_no_rank_is_condemned_for_it() -> None:
    found = judged("fabric-failure")
    assert found.sick() == {"host"}
    assert found.story("host")[0] == (S, Cause.FABRIC)
    assert found.incidents == []
    assert all(found.story(f"gpu {n}")[-1] == (H, Cause.NONE) for n in range(4)), "it clears"


def test_heat_and_throttling_are_warnings_and_clear() -> None:
    found = judged("thermal-throttle")
    assert found.story("gpu 2") == [(H, Cause.THERMAL), (H, Cause.NONE)]
    assert found.suspects() | found.sick() == set()


def test_a_lost_gpu_takes_its_own_rank_and_no_other_though_the_numbers_move() -> None:
    found = judged("lost-gpu-renumbered")
    assert found.causes() == [(Cause.GPU_LOST, (1,))]
    assert found.sick() == {"rank 1.0", "gpu 1"}
    assert found.story("rank 2.0")[-1] == (H, Cause.THERMAL), "what is said of GPU 2 is still said of rank 2"


def test_a_degraded_pcie_link_is_a_warning() -> None:
    found = judged("pcie-degradation")
    assert found.suspects() | found.sick() == set()
    assert found.story("gpu 3")[0] == (H, Cause.PCIE)


def test_a_rank_killed_for_want_of_memory_is_a_process_death_and_the_neighbour_is_named() -> None:
    found = judged("oom-neighbour")
    assert found.causes() == [(Cause.PROCESS_DEATH, (2,))]
    assert "process 4711 on it is no rank's" in found.said("gpu 2")[0].sentence
    assert (H, Cause.MEMORY) in found.story("rank 2.0")


def test_a_stopped_rank_and_a_stuck_rank_are_told_apart() -> None:
    assert judged("stopped-rank").causes() == [(Cause.STOPPED, (3,))]
    assert judged("stuck-rank").causes() == [(Cause.STUCK, (0,))]


def test_an_honest_stall_is_suspected_and_forgiven() -> None:
    found = judged("honest-stall")
    assert found.sick() == set()
    assert found.story("rank 1.0")[-1] == (H, Cause.NONE)


def test_every_verdict_names_its_subject_and_an_engineer_can_read_it() -> None:
    for scenario in SCENARIOS:
        for moment in judged(Path(path_of(scenario)).stem).moments:
            for verdict in moment.verdicts:
                assert verdict.sentence.startswith(str(verdict.subject))
                assert " is " in verdict.sentence or " has " in verdict.sentence or " must " in verdict.sentence
                if verdict.health != Health.HEALTHY:
                    assert verdict.evidence, verdict.sentence


def test_the_shipped_catalogue_judges_every_trace_as_these_tests_do() -> None:
    advise_for = catalogue()
    for scenario in SCENARIOS:
        replay = Replay(Trace(path_of(scenario)), lambda view: advise_for(view.driver, view.generation))
        moments = list(replay)
        shipped = Judged(moments, replay.incidents)
        ours = judged(path_of(scenario).stem)
        assert shipped.causes() == ours.causes(), path_of(scenario).stem
        assert shipped.sick() == ours.sick()


def test_on_a_real_gpu_an_illegal_address_is_put_down_to_its_xid_and_a_kill_ten_seconds_later_is_not() -> None:
    """Recorded by `chaos.gpu_sensors` on an H200: XID 31 of one rank, then SIGKILL of the other on the same GPU."""
    found = judged("gpu-h200-illegal-address-then-sigkill")
    assert found.causes() == [(Cause.XID, (1,)), (Cause.PROCESS_DEATH, (0,))]
    assert found.sick() == {"rank 1.1", "rank 0.1"}, "and the GPU itself is well"


def test_on_a_real_gpu_neighbours_that_take_its_memory_its_time_or_start_cuda_condemn_nobody() -> None:
    """Recorded likewise: the neighbours first, then two ranks that died without an XID."""
    found = judged("gpu-h200-neighbours-and-two-deaths")
    assert found.causes() == [(Cause.PROCESS_DEATH, (1,)), (Cause.PROCESS_DEATH, (0,))]
    assert found.sick() == {"rank 1.1", "rank 0.1"}
