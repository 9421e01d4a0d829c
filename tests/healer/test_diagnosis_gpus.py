"""GPU and host rules, and what they mean for the ranks on them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healer.diagnosis import Cause, Confidence, Hardware, Health, Limits
from healer.evidence import Evidence, HostRef, What
from healer.judge import Judge
from tests.healer.gpu_cases import FOUR, GPUS, HARDWARE, bystanders, judge, none, on_gpu, seen, told, xid
from tests.healer.stage import HOST, gpu, unnamed
from tests.healer.support import LIMITS, rank

H, S, U = Health.HEALTHY, Health.UNHEALTHY, Health.UNKNOWN


# --- conclusive alone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        (seen(gpu(1), What.RECOVERY_ACTION, 1), Cause.RECOVERY_ACTION),
        (seen(gpu(1), What.RECOVERY_ACTION, 7), Cause.RECOVERY_ACTION),
        (seen(gpu(1), What.RESET_REQUIRED, 16), Cause.RECOVERY_ACTION),
        (seen(gpu(1), What.GPU_LOST, 15), Cause.GPU_LOST),
        (seen(unnamed(1), What.GPU_LOST, "fallen off the bus", source="kernel-log"), Cause.GPU_LOST),
        (seen(gpu(1), What.POISON, "fatal"), Cause.ECC),
        (seen(gpu(1), What.REMAP_FAILED, 1), Cause.REMAP),
    ],
)
def test_conclusive_evidence_condemns_the_gpu_and_its_rank_without_any_event_beside_it(
    evidence: Evidence, cause: Cause
) -> None:
    """Case 15: the GPU is stuck, the driver asks for a reset, no event came, and health said Healthy."""
    found = judge(none(1), evidence)
    assert told(found, 1) == ((S, cause), (S, cause))
    assert on_gpu(found, 1).confidence == found.ranks[1].confidence == Confidence.CONCLUSIVE
    assert found.ranks[1].evidence == (evidence.id,)
    assert bystanders(found, 1) == {H}


def test_the_drivers_verdict_clears_when_the_driver_takes_it_back() -> None:
    """Case 36: a condition never clears; and case 10: stuck, and no way to clear it."""
    asked = seen(gpu(1), What.RECOVERY_ACTION, 1, at=100.0)
    assert told(judge(asked), 1)[0] == (S, Cause.RECOVERY_ACTION)
    assert told(judge(asked, none(1, at=200.0), now=200.0), 1) == ((H, Cause.NONE), (H, Cause.NONE))


def test_a_daemon_that_restarts_finds_the_same_fault_again_from_the_first_reading() -> None:
    """Cases 25 and 36: a restart forgets the fault. What the driver says is read again, and stands again."""
    for _ in range(2):
        fresh = Judge(LIMITS)
        fresh.equip(HARDWARE)
        fresh.watch(FOUR, 100.0)
        fresh.take([seen(gpu(1), What.RECOVERY_ACTION, 2, at=100.0)])
        assert on_gpu(fresh.judge(100.0).diagnosis, 1).health == S


def test_an_xid_names_the_cause_of_what_the_driver_asks_for() -> None:
    found = judge(xid(1, 48, at=99.8), seen(gpu(1), What.RECOVERY_ACTION, 1))
    assert told(found, 1) == ((S, Cause.XID), (S, Cause.XID))
    assert found.ranks[1].xids == (48,)
    assert "double-bit ECC error" in found.ranks[1].sentence


# --- XIDs: trigger, verdict, fallback ---------------------------------------------------------------------------------


def test_a_grave_xid_alone_is_a_suspicion_at_once_and_a_verdict_when_the_driver_has_had_its_time() -> None:
    """Case 17: NVML delivers neither the event nor a reading, only the kernel log speaks."""
    found = judge(xid(1, 119))
    assert told(found, 1) == ((U, Cause.XID), (U, Cause.SUSPECTED))
    later = judge(xid(1, 119), now=100.0 + LIMITS.answer_after_s)
    assert told(later, 1) == ((S, Cause.XID), (S, Cause.XID))
    assert on_gpu(later, 1).confidence == Confidence.DEADLINE


def test_a_grave_xid_that_the_driver_answers_with_none_condemns_nobody() -> None:
    asked_after = judge(xid(1, 119), none(1, at=100.5), now=100.5)
    assert told(asked_after, 1)[0] == (U, Cause.XID), "the first answer may be too early"
    answered = (xid(1, 119), none(1, at=100.5))
    assert told(judge(*answered, now=103.0), 1) == ((H, Cause.XID), (U, Cause.SUSPECTED)), "the process may yet die"
    assert told(judge(*answered, now=131.0), 1) == ((H, Cause.XID), (H, Cause.XID))
    unchanged = judge(none(1, at=5.0), xid(1, 119), now=131.0)
    assert told(unchanged, 1) == ((H, Cause.XID), (H, Cause.XID)), "field 230 is told when it changes: it has not"


def test_a_driver_that_cannot_be_asked_any_more_has_not_answered() -> None:
    found = judge(none(1, at=5.0), xid(1, 119), seen(gpu(1), What.SENSOR_SILENT, 2.0, at=101.0), now=102.5)
    assert told(found, 1)[0] == (S, Cause.XID)


def test_the_same_xid_by_event_and_by_kernel_log_is_one_source() -> None:
    found = judge(xid(1, 119), xid(1, 119, at=100.02, source="nvml"), now=100.1)
    assert told(found, 1) == ((U, Cause.XID), (U, Cause.SUSPECTED))


def test_of_two_xids_the_graver_is_the_root_and_the_echo_is_not() -> None:
    """Case 16: XID 62 in the kernel log, while the metric shows 45."""
    found = judge(xid(1, 45, at=99.0, source="nvml"), xid(1, 62, at=99.5), now=102.0)
    assert on_gpu(found, 1).xids[0] == 62
    assert "XID 62 (PMU halt)" in on_gpu(found, 1).sentence


@pytest.mark.parametrize("code", [74, 133, 174, 999])
def test_an_xid_that_is_unknown_or_a_humans_never_condemns_whatever_comes_with_it(code: int) -> None:
    found = judge(xid(1, code), seen(rank(1), What.WAITED_ON, 2.0, by=0), now=150.0)
    assert told(found, 1)[0] == (U, Cause.XID)
    assert found.ranks[1].health == U
    assert "needs a human" in on_gpu(found, 1).sentence


def test_without_a_catalogue_no_xid_condemns_anybody() -> None:
    bare = Hardware(gpus=GPUS, placed=HARDWARE.placed, host=HOST)
    assert {v.health for v in judge(xid(1, 79), now=150.0, hardware=bare).all} == {H, U}


def test_an_application_xid_suspects_the_rank_for_a_while_and_never_the_gpu() -> None:
    """Case 24: an XID 69, or another transient, marks the GPU dead for ever."""
    found = judge(xid(1, 69))
    assert told(found, 1) == ((H, Cause.XID), (U, Cause.SUSPECTED))
    later = judge(xid(1, 69), now=100.1 + LIMITS.blame_before_s)
    assert told(later, 1) == ((H, Cause.XID), (H, Cause.XID)), "the rank lives: it is well again"
    assert told(judge(xid(1, 69), now=100.0 + 2 * 3600), 1) == ((H, Cause.NONE), (H, Cause.NONE))


def test_an_application_xid_and_peers_that_wait_condemn_the_rank_by_quorum() -> None:
    found = judge(xid(1, 31), seen(rank(1), What.WAITED_ON, 1.0, at=101.0, by=0, source="heartbeats"), now=101.0)
    assert (found.ranks[1].health, found.ranks[1].cause) == (S, Cause.XID)
    assert found.ranks[1].confidence == Confidence.QUORUM
    assert on_gpu(found, 1).health == H


def test_a_lost_gpu_is_told_in_words_and_not_as_a_bare_code() -> None:
    found = judge(seen(gpu(1), What.GPU_LOST, 15), now=101.0)
    assert on_gpu(found, 1).sentence.endswith("is lost: the driver does not reach it any more (NVML code 15)")
    strange = judge(seen(gpu(1), What.GPU_LOST, 999), now=101.0)
    assert on_gpu(strange, 1).sentence.endswith("is lost: the driver answers with code 999")


def test_a_gpu_that_comes_back_is_on_probation_before_it_is_healthy() -> None:
    """Case 24."""
    back = (seen(gpu(1), What.GPU_LOST, 15, at=90.0), seen(gpu(1), What.GPU_BACK, 10.0, at=100.0))
    assert told(judge(*back, now=101.0), 1)[0] == (U, Cause.GPU_LOST)
    assert told(judge(*back, now=100.0 + LIMITS.probation_s), 1)[0] == (H, Cause.NONE)


# --- quorum -----------------------------------------------------------------------------------------------------------


def test_two_independent_sources_within_the_window_condemn() -> None:
    ecc = seen(gpu(1), What.ECC_UNCORRECTABLE, 2, at=100.0)
    assert told(judge(ecc), 1) == ((U, Cause.ECC), (U, Cause.SUSPECTED))
    found = judge(ecc, xid(1, 48, at=101.0), now=101.0)
    assert told(found, 1) == ((S, Cause.XID), (S, Cause.XID))
    assert on_gpu(found, 1).confidence == Confidence.QUORUM
    far = judge(
        ecc, xid(1, 48, at=101.0 + LIMITS.quorum_window_s), none(1, at=500.0), now=101.0 + LIMITS.quorum_window_s
    )
    assert on_gpu(far, 1).health != S or on_gpu(far, 1).confidence != Confidence.QUORUM


def test_two_signs_of_one_sensor_are_one_source() -> None:
    found = judge(seen(gpu(1), What.ECC_UNCORRECTABLE, 2), seen(gpu(1), What.NVLINK_DOWN, 4))
    assert told(found, 1)[0][0] == U


def test_a_dead_link_seen_by_nvml_and_missed_by_the_peers_condemns_by_quorum() -> None:
    found = judge(
        seen(gpu(1), What.NVLINK_DOWN, 18), seen(rank(1), What.PEER_FAULT, "timeout/ep", by=0, source="liveness")
    )
    assert told(found, 1) == ((S, Cause.NVLINK), (S, Cause.NVLINK))


def test_a_threshold_of_the_site_overrides_the_default() -> None:
    """Case 11: a threshold is hard-coded."""
    own = Limits(stall_after_s=1.0, silent_after_s=10.0, fault_window_s=30.0, quorum_window_s=0.5, answer_after_s=100.0)
    pair = (seen(gpu(1), What.ECC_UNCORRECTABLE, 2, at=100.0), xid(1, 48, at=101.0))
    assert told(judge(*pair, now=110.0), 1)[0][0] == S
    assert told(judge(*pair, now=110.0, limits=own), 1)[0][0] == U


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"stall_after_s": 3.0, "silent_after_s": 1.0}, "silent_after_s 1 is below stall_after_s 3"),
        ({"stall_after_s": 0.0}, "stall_after_s is 0, expected more than 0"),
        ({"quorum_window_s": -1.0}, "quorum_window_s is -1"),
    ],
)
def test_limits_that_do_not_fit_each_other_are_refused(limits: dict[str, float], why: str) -> None:
    """Case 38: a relation that breaks the timing is accepted, and all misbehaves."""
    with pytest.raises(ValueError, match=why):
        Limits(**({"stall_after_s": 1.0, "silent_after_s": 10.0, "fault_window_s": 30.0} | limits))


# --- warnings ---------------------------------------------------------------------------------------------------------

_WEAK = [
    (What.REMAP_PENDING, 1), (What.THROTTLED, "hw-thermal"), (What.HOT, 92), (What.ECC_CORRECTABLE, 17657.0),
    (What.ECC_CORRECTABLE, "storm"), (What.NVLINK_ERRORS, 5.0), (What.PCIE_DEGRADED, "8/16"), (What.PCIE_REPLAYS, 2.0),
    (What.PCIE_AER, "corrected"), (What.FOREIGN_PROCESS, 4711),
]  # fmt: skip


@pytest.mark.parametrize(("what", "value"), _WEAK)
def test_weak_signs_warn_and_condemn_nobody_however_long_they_last(what: What, value: str | int | float) -> None:
    for now in (100.0, 5000.0):
        found = judge(seen(gpu(1), what, value, at=now - 50.0), now=now)
        (health, cause), (of_rank, _) = told(found, 1)
        assert (health, of_rank) == (H, H)
        assert cause != Cause.NONE
        assert " is healthy, but " in on_gpu(found, 1).sentence


@given(
    st.lists(
        st.tuples(
            st.sampled_from(_WEAK), st.integers(0, 3), st.floats(50.0, 100.0), st.sampled_from(["nvml", "kernel-log"])
        ),
        max_size=40,
    ),
    st.sets(st.integers(0, 3)),
)
def test_no_heap_of_weak_signs_and_no_blind_sensor_ever_condemns(
    signs: list[tuple[tuple[What, str | int | float], int, float, str]], dark: set[int]
) -> None:
    found = judge(
        *(seen(gpu(n), what, value, at=at, source=source) for (what, value), n, at, source in signs),
        *(seen(gpu(n), What.SENSOR_SILENT, 5.0) for n in dark),
    )
    assert S not in {v.health for v in found.all}
    for number in dark:
        assert on_gpu(found, number).health == U, "what is not read is not healthy either"
    assert {v.health for v in found.ranks} == {H}


# --- telemetry and host -----------------------------------------------------------------------------------------------


def test_a_gpu_without_readings_is_unknown_and_its_rank_speaks_for_itself() -> None:
    found = judge(seen(gpu(1), What.SENSOR_SILENT, 3.5))
    assert told(found, 1) == ((U, Cause.TELEMETRY_LOST), (H, Cause.NONE))


def test_a_blank_reading_neither_clears_a_fault_nor_makes_one() -> None:
    """Case 18: blank for ever after XID 31. A blank is not a zero."""
    ecc = seen(gpu(1), What.ECC_UNCORRECTABLE, 2)
    blank = seen(gpu(1), What.SENSOR_SILENT, 2.0, at=101.0)
    assert told(judge(ecc, blank, now=101.0), 1)[0] == (U, Cause.ECC)
    asked = seen(gpu(1), What.RECOVERY_ACTION, 1)
    assert told(judge(asked, blank, now=101.0), 1)[0] == (S, Cause.RECOVERY_ACTION)
    assert told(judge(blank, now=101.0), 1)[0] == (U, Cause.TELEMETRY_LOST)


def test_a_blind_host_mutes_its_gpus_and_heals_nobody() -> None:
    found = judge(
        seen(HOST, What.SENSOR_BLIND, "code 18"), seen(gpu(1), What.GPU_LOST, 999), xid(2, 79), xid(3, 119), now=150.0
    )
    assert {v.health for v in found.gpus} == {U}
    assert {v.cause for v in found.gpus} == {Cause.TELEMETRY_LOST}
    assert {v.health for v in found.ranks} == {H}
    assert [v.health for v in found.hosts] == [U]


def test_just_after_telemetry_returns_nobody_is_condemned_by_its_first_readings() -> None:
    """Case 37: it flaps after an outage."""
    lost = seen(gpu(1), What.GPU_LOST, 999, at=100.1)
    back = seen(HOST, What.SENSOR_BACK, 120.0, at=100.0)
    assert S not in {v.health for v in judge(back, lost, now=100.1 + LIMITS.settle_after_s / 2).all}
    assert told(judge(back, lost, now=100.1 + LIMITS.settle_after_s), 1)[0] == (S, Cause.GPU_LOST), "it is really lost"


def test_an_xid_from_before_the_driver_was_loaded_anew_does_not_count_any_more() -> None:
    found = judge(xid(1, 119, at=50.0), seen(HOST, What.SENSOR_BACK, 60.0, at=100.0), now=130.0)
    assert S not in {v.health for v in found.all}


def test_a_kernel_log_that_cannot_be_read_is_said_and_keeps_nobody_from_being_healthy() -> None:
    blind = seen(HOST, What.SENSOR_BLIND, "no permission", source="kernel-log")
    (verdict,) = judge(blind).hosts
    assert (verdict.health, verdict.cause) == (H, Cause.TELEMETRY_LOST)
    assert "kernel-log cannot be read: no permission" in verdict.sentence


def test_an_nvml_that_does_not_start_leaves_the_host_unknown_and_never_healthy() -> None:
    """Case 26."""
    (verdict,) = judge(seen(HOST, What.SENSOR_BLIND, "the driver is not loaded (code 9)")).hosts
    assert (verdict.health, verdict.cause) == (U, Cause.TELEMETRY_LOST)


def test_all_gpus_lost_at_once_is_the_hosts_fault_and_one_of_two_is_its_own() -> None:
    all_lost = judge(*(seen(gpu(n), What.GPU_LOST, 15, at=100.0 + n) for n in range(4)), now=104.0)
    assert [(v.health, v.cause) for v in all_lost.hosts] == [(S, Cause.GPU_LOST)]
    assert {v.health for v in all_lost.gpus} == {U}
    assert S not in {v.health for v in all_lost.ranks}, "there is no other place on this host for any of them"
    some = judge(*(seen(gpu(n), What.GPU_LOST, 15) for n in range(3)))
    assert [v.health for v in some.gpus] == [S, S, S, H]


def test_a_dead_process_is_condemned_even_while_its_host_is_at_fault() -> None:
    found = judge(
        seen(HOST, What.SENSOR_BLIND, "code 18"), xid(1, 79), seen(rank(1), What.PROCESS_STATE, "Z", source="processes")
    )
    assert (found.ranks[1].health, found.ranks[1].cause) == (S, Cause.PROCESS_DEATH)


def test_a_wall_clock_that_is_ten_hours_off_changes_nothing() -> None:
    """Case 34: ages are monotonic, whatever the wall says."""
    import msgspec

    story = [
        xid(1, 119),
        seen(gpu(2), What.ECC_UNCORRECTABLE, 1),
        seen(HOST, What.CLOCK_JUMP, -36000.0, source="clock"),
    ]
    keys = []
    for offset in (0.0, 36000.0, -36000.0):
        shifted = [msgspec.structs.replace(e, wall=1.79e9 + e.at + offset) for e in story]
        found = judge(*shifted, now=101.0)
        keys.append([v.key for v in found.all if not isinstance(v.subject, HostRef)])
    assert keys[0] == keys[1] == keys[2]
