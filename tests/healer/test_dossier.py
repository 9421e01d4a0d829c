"""What stands: by age, by what takes it back, under one name for one GPU, in bounded memory."""

import math

import pytest

from healer.dossier import MAX_PER_SUBJECT, MAX_SUBJECTS, RETRACTS, STANDS_S, STATES, Dossier
from healer.evidence import Evidence, GpuRef, HostRef, RankRef, Severity, Subject, What
from tests.healer.stage import HOST, gpu, pci, unnamed
from tests.healer.support import rank

_seq = iter(range(1, 10**9))


def seen(
    what: What,
    value: str | int | float = 1,
    *,
    of: Subject | None = None,
    at: float = 100.0,
    source: str = "nvml",
    severity: Severity = Severity.WARNING,
    by: RankRef | None = None,
    detail: str = "",
) -> Evidence:
    return Evidence(
        source=source, seq=next(_seq), subject=of or gpu(0), what=what, value=value, severity=severity, reporter=by,
        detail=detail, at=at, wall=0.0,
    )  # fmt: skip


def whats(dossier: Dossier, now: float = 100.0) -> list[What]:
    return [one.evidence.what for one in dossier.standing(now)]


def after(*evidence: Evidence) -> Dossier:
    dossier = Dossier()
    dossier.extend(evidence)
    return dossier


@pytest.mark.parametrize("what", sorted(STATES))
def test_a_condition_stands_until_its_source_says_that_it_is_over(what: What) -> None:
    dossier = after(seen(what, "8/16" if what == What.PCIE_DEGRADED else 7))
    assert whats(dossier) == [what]
    dossier.add(seen(what, "" if what in (What.PCIE_DEGRADED, What.THROTTLED, What.FABRIC_FAILED) else 0))
    assert whats(dossier) == []


@pytest.mark.parametrize("what", sorted(STATES))
def test_a_reading_of_severity_info_ends_a_condition_whatever_its_value(what: What) -> None:
    dossier = after(seen(what, 91), seen(what, 80, severity=Severity.INFO))
    assert whats(dossier) == []


@pytest.mark.parametrize(("later", "earlier"), [(k, e) for k, v in RETRACTS.items() for e in v])
def test_what_takes_something_back_does_so_and_leaves_other_subjects_alone(later: What, earlier: What) -> None:
    by = rank(3) if earlier == What.WAITED_ON and later == What.WAIT_ENDED else None
    dossier = after(seen(earlier, of=rank(1), by=by), seen(earlier, of=rank(2), by=by), seen(later, of=rank(1), by=by))
    standing = {(one.evidence.subject, one.evidence.what) for one in dossier.standing(100.0)}
    assert (rank(1), earlier) not in standing
    assert (rank(2), earlier) in standing or earlier == What.PROGRESS


def test_a_wait_that_ended_for_one_reporter_goes_on_for_another() -> None:
    dossier = after(seen(What.WAITED_ON, of=rank(1), by=rank(0)), seen(What.WAITED_ON, of=rank(1), by=rank(2)))
    dossier.add(seen(What.WAIT_ENDED, of=rank(1), by=rank(0)))
    assert [one.evidence.reporter for one in dossier.standing(100.0)] == [rank(2)]


def test_a_sensor_that_sees_again_does_not_speak_for_another_that_is_blind() -> None:
    dossier = after(seen(What.SENSOR_BLIND, "code 18", of=HOST), seen(What.SENSOR_BLIND, of=HOST, source="kernel-log"))
    dossier.add(seen(What.SENSOR_BACK, 5.0, of=HOST))
    blind = [e.evidence.source for e in dossier.standing(100.0) if e.evidence.what == What.SENSOR_BLIND]
    assert blind == ["kernel-log"]


@pytest.mark.parametrize("what", sorted(STANDS_S))
def test_evidence_ages_out_and_a_stale_event_does_not_count_when_it_arrives(what: What) -> None:
    """Cases 4 and 6: a restart, or a breaker that closes days later, must not replay old faults."""
    lasts = STANDS_S[what]
    value = 79 if what == What.XID else 7
    assert whats(after(seen(what, value, at=100.0)), now=100.0 + lasts) == [what]
    assert whats(after(seen(what, value, at=100.0)), now=100.1 + lasts) == []
    assert after(seen(what, value, at=100.0)).next_expiry() == 100.0 + lasts


def test_what_does_not_age_stands_for_days() -> None:
    dossier = after(seen(What.GPU_LOST, 15), seen(What.RECOVERY_ACTION, 1), seen(What.REMAP_PENDING))
    assert set(whats(dossier, now=100.0 + 7 * 86400)) == {What.GPU_LOST, What.RECOVERY_ACTION, What.REMAP_PENDING}
    assert dossier.next_expiry() == math.inf


def test_two_equal_xids_are_two() -> None:
    """Case 20."""
    dossier = after(seen(What.XID, 31, at=100.0), seen(What.XID, 31, at=101.0), seen(What.XID, 13, at=102.0))
    counts = {one.evidence.value: (one.count, one.first_at) for one in dossier.standing(102.0)}
    assert counts == {31: (2, 100.0), 13: (1, 102.0)}


def test_an_xid_that_comes_again_after_the_last_one_aged_out_is_the_first_again() -> None:
    again = 101.0 + STANDS_S[What.XID]
    (one,) = after(seen(What.XID, 31, at=100.0), seen(What.XID, 31, at=again)).standing(again)
    assert (one.count, one.first_at) == (1, again)


def test_the_kernel_logs_address_and_nvmls_uuid_are_one_gpu_whichever_comes_first() -> None:
    for order in (0, 1):
        both = [seen(What.XID, 79, of=unnamed(0), source="kernel-log"), seen(What.GPU_LOST, 15, of=gpu(0))]
        dossier = after(*(both if order else reversed(both)))
        assert {one.evidence.subject for one in dossier.standing(100.0)} == {gpu(0)}


def test_a_gpu_keeps_its_evidence_when_its_address_changes() -> None:
    moved = GpuRef(gpu(0).uuid, pci(9))
    dossier = after(seen(What.REMAP_PENDING, of=gpu(0)), seen(What.THROTTLED, "power-brake", of=moved))
    assert {one.evidence.subject for one in dossier.standing(100.0)} == {moved}
    assert len(dossier.standing(100.0)) == 2


def test_a_gpu_that_is_learned_of_later_takes_over_what_stood_under_its_address() -> None:
    dossier = after(seen(What.XID, 79, of=unnamed(2), source="kernel-log"))
    dossier.learn([gpu(1), gpu(2)])
    assert [one.evidence.subject for one in dossier.standing(100.0)] == [gpu(2)]


def test_evidence_about_or_by_ranks_that_left_goes_and_that_about_gpus_and_hosts_stays() -> None:
    dossier = after(
        seen(What.SILENCE, of=rank(1)),
        seen(What.WAITED_ON, of=rank(0), by=rank(1)),
        seen(What.XID, 79),
        seen(What.CLOCK_JUMP, 36000.0, of=HostRef("node-7")),
    )
    dossier.keep([rank(0)])
    assert whats(dossier) == [What.XID, What.CLOCK_JUMP]


def test_a_source_that_babbles_does_not_fill_the_memory() -> None:
    dossier = Dossier()
    for code in range(10 * MAX_PER_SUBJECT):
        dossier.add(seen(What.XID, code))
    kept = [one.evidence.value for one in dossier.standing(100.0)]
    assert len(kept) == MAX_PER_SUBJECT
    assert kept[-1] == 10 * MAX_PER_SUBJECT - 1, "the newest are kept"
    for number in range(MAX_SUBJECTS + 1000):
        dossier.add(seen(What.XID, 1, of=GpuRef("", f"{number:05x}:00:00.0")))
    assert len(dossier.standing(100.0)) <= MAX_SUBJECTS + MAX_PER_SUBJECT
