"""What a rank's fault comes down to when its GPU has something to say, and what the judge tells of it."""

import msgspec
import pytest

from healer.diagnosis import Cause, Confidence, Health
from healer.evidence import GpuRef, RankRef, What
from healer.judge import Judge
from tests.healer.gpu_cases import FOUR, HARDWARE, bystanders, dead, judge, none, seen, xid
from tests.healer.stage import gpu
from tests.healer.support import LIMITS, rank

H, S, U = Health.HEALTHY, Health.UNHEALTHY, Health.UNKNOWN


# --- a rank's fault and its GPU's -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "xid_at", "cause"),
    [
        (31, 99.0, Cause.XID),
        (31, 100.126, Cause.XID),
        (31, 100.0 - 31.0, Cause.PROCESS_DEATH),
        (31, 103.0, Cause.PROCESS_DEATH),
        (79, 80.0, Cause.XID),
        (45, 100.1, Cause.PROCESS_DEATH),
        (63, 99.9, Cause.PROCESS_DEATH),
        (999, 99.9, Cause.PROCESS_DEATH),
    ],
)
def test_a_death_is_put_down_to_an_xid_near_it_that_kills_processes_and_to_no_other(
    code: int, xid_at: float, cause: Cause
) -> None:
    found = judge(dead(1), xid(1, code, at=xid_at), none(1, at=xid_at + 0.01), now=max(100.0, xid_at) + 0.05)
    assert (found.ranks[1].health, found.ranks[1].cause) == (S, cause)
    assert found.ranks[1].confidence == Confidence.CONCLUSIVE
    assert bystanders(found, 1) == {H}


def test_an_xid_of_another_gpu_is_not_to_blame() -> None:
    assert judge(dead(1), xid(2, 31)).ranks[1].cause == Cause.PROCESS_DEATH


def test_a_stopped_process_was_stopped_by_somebody_whatever_its_gpu_said() -> None:
    stop = (
        seen(rank(1), What.SILENCE, 1.5, source="heartbeats"),
        seen(rank(1), What.PROCESS_STATE, "T", source="processes"),
    )
    assert judge(*stop, xid(1, 31, at=99.0)).ranks[1].cause == Cause.STOPPED


def test_a_hang_after_an_xid_comes_down_to_the_xid() -> None:
    hang = [seen(rank(1), What.SILENCE, 1.2, at=101.0, source="heartbeats")]
    hang += [seen(rank(1), What.WAITED_ON, 1.2, at=101.0, by=by, source="heartbeats") for by in (0, 2, 3)]
    found = judge(xid(1, 13), *hang, now=101.0)
    assert (found.ranks[1].health, found.ranks[1].cause, found.ranks[1].xids) == (S, Cause.XID, (13,))


# --- an error of an application, and who lives beside it -----------------------------------------------------------------

TWO_ON_ONE = msgspec.structs.replace(
    HARDWARE, placed={rank(0): gpu(0), rank(1): gpu(1), rank(2): gpu(1), rank(3): gpu(0)}
)


def test_an_application_xid_that_ended_its_rank_is_no_doubt_about_the_rank_beside_it() -> None:
    """Seen in chaos on H200: for 30 s after each illegal address, who shared the GPU was suspected and the group degraded."""
    found = judge(dead(1), xid(1, 31, at=100.126), now=100.2, hardware=TWO_ON_ONE)
    assert (found.ranks[1].health, found.ranks[1].cause) == (S, Cause.XID)
    assert (found.ranks[2].health, found.ranks[2].cause) == (H, Cause.XID)
    waited = seen(rank(2), What.WAITED_ON, 1.5, at=101.0, by=0, source="heartbeats")
    assert judge(dead(1), xid(1, 31, at=100.126), waited, now=101.0, hardware=TWO_ON_ONE).ranks[2].health != S


def test_an_application_xid_with_no_death_near_it_leaves_all_on_that_gpu_suspected() -> None:
    for others in ((), (dead(1, at=90.0),), (dead(0),)):
        found = judge(*others, xid(1, 31), now=100.2, hardware=TWO_ON_ONE)
        assert (found.ranks[2].health, found.ranks[2].cause) == (U, Cause.SUSPECTED)


def test_an_xid_that_ends_the_gpu_condemns_the_rank_beside_the_dead_one_too() -> None:
    found = judge(dead(1), xid(1, 119, at=100.126), now=100.2 + LIMITS.answer_after_s, hardware=TWO_ON_ONE)
    assert (found.ranks[2].health, found.ranks[2].cause) == (S, Cause.XID)


def test_the_rank_beside_stays_well_when_the_dead_one_has_left_and_the_xid_comes_late() -> None:
    court = Judge(LIMITS)
    court.equip(TWO_ON_ONE)
    court.watch(FOUR, 90.0)
    court.take([seen(r, What.BEAT_HEARD, at=90.0, source="heartbeats") for r in FOUR])
    court.judge(90.0)
    court.take([dead(1)])
    court.judge(100.0)
    court.watch([r for r in FOUR if r != rank(1)], 100.001, "inc-7")
    court.take([xid(1, 31, at=100.126)])
    for now in (100.13, 102.5, 115.0, 129.0, 140.0):
        assert {v.health for v in court.judge(now).diagnosis.ranks} == {H}, now


# --- the judge: what is new, and what comes later ---------------------------------------------------------------------


def acted_upon(code: int | None, after_s: float) -> list[tuple[Cause, tuple[int, ...]]]:
    """Rank 1 dies, is condemned and leaves; then its GPU reports."""
    court = Judge(LIMITS)
    court.equip(HARDWARE)
    court.watch(FOUR, 90.0)
    court.take([seen(r, What.BEAT_HEARD, at=90.0, source="heartbeats") for r in FOUR])
    court.judge(90.0)
    court.take([dead(1)])
    assert [v.cause for v in court.judge(100.0).changed if v.health == S] == [Cause.PROCESS_DEATH]
    court.watch([r for r in FOUR if r != rank(1)], 100.001, "inc-7")
    found = []
    if code is not None:
        court.take([xid(1, code, at=100.0 + after_s)])
    for now in (100.0 + after_s, 110.0 + after_s):
        found += [(r.cause, r.xids) for r in court.judge(now).refined if r.departed.incident == "inc-7"]
    return found


def test_an_xid_that_comes_after_the_death_was_acted_upon_refines_the_incident_once() -> None:
    assert acted_upon(31, 0.126) == [(Cause.XID, (31,))]
    assert acted_upon(79, 1.0) == [(Cause.XID, (79,))]


def test_an_xid_that_comes_much_later_or_an_echo_refines_nothing() -> None:
    assert acted_upon(31, 20.0) == []
    assert acted_upon(45, 0.1) == []
    assert acted_upon(None, 0.1) == []


def test_a_gpu_that_is_found_lost_after_the_death_refines_the_incident() -> None:
    court = Judge(LIMITS)
    court.equip(HARDWARE)
    court.watch(FOUR, 90.0)
    court.take([dead(1)])
    court.judge(100.0)
    court.watch([rank(0)], 100.001, "inc-1")
    court.take([seen(gpu(1), What.GPU_LOST, 15, at=100.5)])
    (refined,) = court.judge(100.5).refined
    assert refined.cause == Cause.GPU_LOST
    assert "rank 1.0 was lost to its GPU" in refined.sentence


def test_the_judge_tells_a_verdict_once_and_again_only_when_it_changes() -> None:
    court = Judge(LIMITS)
    court.equip(HARDWARE)
    court.watch(FOUR, 90.0)
    assert court.judge(100.0).changed == (), "nobody was heard yet, and every GPU is well: that is how all begins"
    court.take([xid(1, 119)])
    assert len(court.judge(100.0).changed) == 1, "the GPU; its rank was not heard yet anyway"
    assert court.judge(100.5).changed == ()
    assert {v.health for v in court.judge(103.0).changed} == {S}
    assert court.next_change(103.0) < 110.0


def test_every_gpu_that_the_driver_lists_has_a_verdict_and_one_known_by_address_alone_too() -> None:
    found = judge(seen(GpuRef("", "0000:ff:00.0"), What.XID, 79, source="kernel-log"))
    assert [v.subject for v in found.gpus][-1] == GpuRef("", "0000:ff:00.0")
    assert len(found.gpus) == 5
    assert isinstance(found.ranks[0].rank, RankRef)
    with pytest.raises(TypeError, match="not one on a rank"):
        _ = found.gpus[0].rank
