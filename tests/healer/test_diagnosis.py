import msgspec
from hypothesis import given
from hypothesis import strategies as st

from healer.diagnosis import Cause, Confidence, Health, Verdict, diagnose
from healer.dossier import Dossier
from healer.evidence import Evidence, RankRef, What
from tests.healer.support import LIMITS, Notes, rank

FOUR = tuple(rank(s) for s in range(4))


def judge(*evidence: Evidence, live: tuple[RankRef, ...] = FOUR, now: float = 100.0) -> dict[int, Verdict]:
    """The verdicts when all live ranks were heard, and then this was seen."""
    note, dossier = Notes(), Dossier()
    dossier.extend(note(r.slot, What.BEAT_HEARD, at=0.0) for r in live)
    dossier.extend(evidence)
    return {v.rank.slot: v for v in diagnose(dossier.standing(now), live, LIMITS, now).ranks}


def sick(verdicts: dict[int, Verdict]) -> dict[int, Cause]:
    return {slot: v.cause for slot, v in verdicts.items() if v.health == Health.UNHEALTHY}


def test_a_killed_rank_is_condemned_by_its_socket_and_its_process_state_alone() -> None:
    note = Notes()
    verdicts = judge(note(0, What.SOCKET_CLOSED, "Z"))
    assert sick(verdicts) == {0: Cause.PROCESS_DEATH}
    assert verdicts[0].confidence == Confidence.CONCLUSIVE
    assert verdicts[0].evidence == ("test/1",)


def test_a_rank_that_is_exiting_when_its_socket_closes_is_condemned_by_the_next_look() -> None:
    note = Notes()
    closed = note(2, What.SOCKET_CLOSED, "R", at=99.0)
    assert sick(judge(closed)) == {}
    verdicts = judge(closed, note(2, What.PROCESS_STATE, "X"))
    assert sick(verdicts) == {2: Cause.PROCESS_DEATH}
    assert verdicts[2].since == 99.0, "the fault was detected when the socket closed"


def test_a_lifeline_that_is_cut_is_conclusive() -> None:
    verdicts = judge(Notes()(2, What.LIFELINE_CUT, "X"))
    assert sick(verdicts) == {2: Cause.PROCESS_DEATH}
    assert verdicts[2].sentence == "rank 2.0 is dead: lifeline-cut (X)"


def test_a_pidfd_that_fires_is_conclusive() -> None:
    assert sick(judge(Notes()(1, What.PIDFD_FIRED, "S"))) == {1: Cause.PROCESS_DEATH}


def test_two_ranks_killed_at_once_are_both_condemned() -> None:
    note = Notes()
    found = judge(note(0, What.PROCESS_STATE, "Z"), note(3, What.SOCKET_CLOSED, "X"))
    assert sick(found) == {0: Cause.PROCESS_DEATH, 3: Cause.PROCESS_DEATH}


def test_a_closed_socket_of_a_living_process_condemns_nobody_at_once() -> None:
    note = Notes()
    verdicts = judge(note(1, What.SOCKET_CLOSED, "S"), note(1, What.PROCESS_STATE, "S"))
    assert verdicts[1].health == Health.UNKNOWN


def test_a_rank_that_takes_no_command_any_more_is_given_up_after_the_stall_time() -> None:
    note = Notes()
    verdicts = judge(
        note(1, What.SOCKET_CLOSED, "S"), note(1, What.PROCESS_STATE, "S"), note(1, What.SILENCE, 1.0, at=101.0)
    )
    assert sick(verdicts) == {1: Cause.AGENT_LOST}


def test_a_stopped_rank_is_condemned_in_an_idle_group() -> None:
    note = Notes()
    verdicts = judge(note(1, What.SILENCE, 1.0, at=100.0), note(1, What.PROCESS_STATE, "T", at=100.0))
    assert sick(verdicts) == {1: Cause.STOPPED}
    assert verdicts[1].confidence == Confidence.CONCLUSIVE


def test_a_stop_that_ended_before_the_silence_condemns_nobody() -> None:
    note = Notes()
    assert sick(judge(note(1, What.PROCESS_STATE, "T", at=90.0), note(1, What.SILENCE, 1.0, at=100.0))) == {}


def test_a_rank_stopped_for_a_moment_is_not_condemned() -> None:
    note = Notes()
    assert sick(judge(note(1, What.PROCESS_STATE, "T"))) == {}
    again = judge(note(1, What.SILENCE, 1.2), note(1, What.PROCESS_STATE, "T"), note(1, What.BEAT_HEARD, 5))
    assert sick(again) == {}


def test_a_debugger_attached_to_a_rank_does_not_get_it_killed() -> None:
    note = Notes()
    verdicts = judge(note(1, What.SILENCE, 1.5), note(1, What.PROCESS_STATE, "t"))
    assert verdicts[1].health == Health.UNKNOWN


def test_all_ranks_stopped_are_all_condemned_because_the_kernel_says_so() -> None:
    note = Notes()
    found = [note(s, what, value) for s in range(4) for what, value in ((What.SILENCE, 1.0), (What.PROCESS_STATE, "T"))]
    assert sick(judge(*found)) == dict.fromkeys(range(4), Cause.STOPPED)


def test_a_hung_rank_is_condemned_when_half_of_the_others_wait_for_it() -> None:
    note = Notes()
    silent = (note(1, What.SILENCE, 1.0), note(1, What.PROCESS_STATE, "S"))
    verdicts = judge(*silent, note(1, What.WAITED_ON, 1.0, by=0), note(1, What.WAITED_ON, 1.0, by=3))
    assert sick(verdicts) == {1: Cause.HANG}
    assert verdicts[1].confidence == Confidence.QUORUM
    assert len(verdicts[1].evidence) == 3


def test_one_slow_rank_is_not_killed_on_one_witness() -> None:
    note = Notes()
    verdicts = judge(note(1, What.SILENCE, 1.0), note(1, What.PROCESS_STATE, "R"), note(1, What.WAITED_ON, 1.0, by=0))
    assert sick(verdicts) == {}
    assert verdicts[1].health == Health.UNKNOWN


def test_in_a_group_of_two_the_only_other_rank_is_witness_enough() -> None:
    note = Notes()
    found = judge(note(1, What.SILENCE, 1.0), note(1, What.WAITED_ON, 1.0, by=0), live=(rank(0), rank(1)))
    assert sick(found) == {1: Cause.HANG}


def test_a_slow_rank_that_still_beats_is_not_killed_however_many_wait_for_it() -> None:
    note = Notes()
    verdicts = judge(*(note(1, What.WAITED_ON, 5.0, by=by) for by in (0, 2, 3)))
    assert sick(verdicts) == {}
    assert verdicts[1].cause == Cause.SUSPECTED


def test_what_a_silent_rank_once_said_about_others_does_not_count() -> None:
    note = Notes()
    # 0 and 2 fell silent themselves; only 3 is heard
    found = [note(s, What.SILENCE, 1.0) for s in (0, 1, 2)]
    found += [note(1, What.WAITED_ON, 1.0, by=by) for by in (0, 2)]
    assert sick(judge(*found)) == {}


def test_a_rank_whose_main_thread_hangs_while_its_agent_beats_is_condemned_by_all_others() -> None:
    note = Notes()
    still = note(1, What.NO_PROGRESS, 10.0)
    assert sick(judge(still, *(note(1, What.WAITED_ON, 1.0, by=by) for by in (0, 2)))) == {}
    assert sick(judge(still, *(note(1, What.WAITED_ON, 1.0, by=by) for by in (0, 2, 3)))) == {1: Cause.STUCK}


def test_a_rank_that_waits_for_the_real_culprit_is_not_blamed_for_its_own_lack_of_progress() -> None:
    note = Notes()
    found = [note(1, What.NO_PROGRESS, 10.0), note(2, What.NO_PROGRESS, 10.0)]
    found += [note(1, What.WAITED_ON, 1.0, by=by) for by in (0, 2, 3)]
    found += [note(2, What.WAITED_ON, 1.0, by=by) for by in (0, 1, 3)]
    assert sick(judge(*found)) == {}, "each waits for the other: which of them is stuck cannot be told"


def test_silence_alone_in_an_idle_group_is_only_a_suspicion_until_the_long_deadline() -> None:
    note = Notes()
    early = judge(note(1, What.SILENCE, 1.0), note(1, What.PROCESS_STATE, "S"))
    assert (early[1].health, early[1].cause) == (Health.UNKNOWN, Cause.SUSPECTED)
    late = judge(note(1, What.SILENCE, 10.0), note(1, What.PROCESS_STATE, "S"))
    assert sick(late) == {1: Cause.SILENT}


def test_silence_of_most_ranks_is_lost_telemetry_and_condemns_nobody() -> None:
    note = Notes()
    found = [note(s, What.SILENCE, 60.0) for s in (0, 1, 2)] + [note(s, What.PROCESS_STATE, "S") for s in (0, 1, 2)]
    verdicts = judge(*found)
    assert sick(verdicts) == {}
    assert verdicts[0].health == Health.UNKNOWN
    assert "telemetry is in doubt" in verdicts[0].sentence


def test_ranks_that_are_known_to_be_dead_do_not_put_the_telemetry_of_the_others_in_doubt() -> None:
    note = Notes()
    found = [note(s, What.PROCESS_STATE, "Z") for s in (0, 1)] + [note(s, What.SILENCE, 10.0) for s in (0, 1, 2)]
    found.append(note(2, What.PROCESS_STATE, "D"))
    assert sick(judge(*found)) == {0: Cause.PROCESS_DEATH, 1: Cause.PROCESS_DEATH, 2: Cause.SILENT}


def test_a_peer_fault_seen_by_one_rank_condemns_nobody_and_ages_out() -> None:
    note = Notes()
    fault = note(1, What.PEER_FAULT, "timeout/ep", by=0, at=100.0)
    assert judge(fault, now=101.0)[1].health == Health.UNKNOWN
    assert judge(fault, now=131.0)[1].health == Health.HEALTHY


def test_a_rank_that_was_never_heard_is_unknown_and_not_healthy() -> None:
    (verdict,) = diagnose((), (rank(0),), LIMITS, 0.0).ranks
    assert (verdict.health, verdict.cause) == (Health.UNKNOWN, Cause.UNHEARD)


def test_evidence_about_an_earlier_incarnation_does_not_touch_its_replacement() -> None:
    note = Notes()
    heard = msgspec.structs.replace(note(1, What.BEAT_HEARD), subject=rank(1, 1))
    dossier = Dossier()
    dossier.extend((note(1, What.PROCESS_STATE, "Z"), heard))
    verdicts = diagnose(dossier.standing(100.0), (rank(1, 1),), LIMITS, 100.0).ranks
    assert [v.health for v in verdicts] == [Health.HEALTHY]


_HARMLESS = st.builds(
    lambda slot, what, value, by: (slot, what, value, by),
    st.integers(0, 3),
    st.sampled_from([What.SILENCE, What.WAITED_ON, What.PEER_FAULT, What.NO_PROGRESS, What.TELEMETRY_LOST]),
    st.floats(0.0, 0.99),
    st.integers(0, 3),
)


@given(st.lists(_HARMLESS, max_size=30))
def test_no_rank_is_condemned_by_anything_short_of_the_stall_time(signs: list[tuple[int, What, float, int]]) -> None:
    note = Notes()
    found = []
    for slot, what, value, by in signs:
        from_peer = what in (What.WAITED_ON, What.PEER_FAULT)
        if from_peer and by == slot:
            continue
        found.append(note(slot, what, "x" if what == What.PEER_FAULT else value, by=by if from_peer else None))
    assert sick(judge(*found)) == {}


@given(st.sets(st.integers(0, 3), max_size=3), st.sampled_from("SRD"))
def test_healthy_ranks_that_beat_are_never_condemned_whatever_their_peers_say(accused: set[int], state: str) -> None:
    note = Notes()
    found = [note(s, What.PROCESS_STATE, state) for s in range(4)]
    found += [
        note(s, what, 60.0 if what == What.WAITED_ON else "timeout/ep", by=by)
        for s in accused
        for by in range(4)
        if by != s
        for what in (What.WAITED_ON, What.PEER_FAULT)
    ]
    assert sick(judge(*found)) == {}
