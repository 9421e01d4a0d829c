import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from healer.diagnosis import Cause, Confidence, Health, Verdict, diagnose
from healer.dossier import Dossier
from healer.evidence import Evidence, RankRef, What
from healer.judge import Judge
from tests.healer.support import LIMITS, Notes, rank

FOUR = tuple(rank(s) for s in range(4))


def judge(
    *evidence: Evidence, live: tuple[RankRef, ...] = FOUR, now: float = 100.0, regrouped_at: float = -math.inf
) -> dict[int, Verdict]:
    """The verdicts when all live ranks were heard, and then this was seen."""
    note, dossier = Notes(), Dossier()
    dossier.extend(note(r.slot, What.BEAT_HEARD, at=0.0) for r in live)
    dossier.extend(evidence)
    return {v.rank.slot: v for v in diagnose(dossier.standing(now), live, LIMITS, now, regrouped_at=regrouped_at).ranks}


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


def waits(rows: dict[int, tuple[int, ...]], *, still: tuple[int, ...] = (), for_s: float = 10.0) -> list[Evidence]:
    """Who waits for whom, and the ranks whose round has not moved for `for_s`."""
    note = Notes()
    found = [note(peer, What.WAITED_ON, 1.0, by=by, at=91.0) for by, row in rows.items() for peer in row]
    return found + [note(slot, What.NO_PROGRESS, for_s, at=100.0) for slot in still]


def test_two_healthy_ranks_that_wait_for_each_other_are_told_from_suspects_and_not_condemned() -> None:
    found = judge(*waits({0: (3,), 3: (0,), 1: (0,), 2: (0,)}, still=(0, 3), for_s=60.0))
    assert sick(found) == {}
    assert {slot: v.cause for slot, v in found.items() if v.health == Health.UNKNOWN} == {
        0: Cause.MUTUAL_WAIT,
        3: Cause.MUTUAL_WAIT,
    }
    assert "it and rank 3.0 wait for each other" in found[0].sentence


def test_a_wait_for_a_rank_that_is_silent_is_no_mutual_wait() -> None:
    note = Notes()
    found = judge(*waits({0: (3,), 3: (0,)}), note(3, What.SILENCE, 1.0))
    assert {found[0].cause, found[3].cause} == {Cause.SUSPECTED}, "what a silent rank once said does not count"


def test_a_rank_cut_off_from_most_others_is_condemned_when_the_long_deadline_has_passed() -> None:
    rows = {0: (2,), 1: (2,), 2: (0, 1)}
    three = FOUR[:3]
    assert sick(judge(*waits(rows, still=(0, 1, 2), for_s=9.9), live=three)) == {}
    found = judge(*waits(rows, still=(0, 1, 2)), live=three)
    assert sick(found) == {2: Cause.STUCK}
    assert found[2].confidence == Confidence.QUORUM
    assert "is cut off" in found[2].sentence


def test_of_a_partition_the_smaller_side_goes_and_of_two_equal_sides_none() -> None:
    five = tuple(rank(s) for s in range(5))
    rows = {0: (3, 4), 1: (3, 4), 2: (3, 4), 3: (0, 1, 2), 4: (0, 1, 2)}
    found = judge(*waits(rows, still=tuple(range(5))), live=five)
    assert sick(found) == {3: Cause.STUCK, 4: Cause.STUCK}
    assert "without rank 3.0, rank 4.0 nobody would wait" in found[3].sentence
    halves = judge(*waits({0: (2, 3), 1: (2, 3), 2: (0, 1), 3: (0, 1)}, still=tuple(range(4)), for_s=600.0))
    assert sick(halves) == {}
    pair = judge(*waits({0: (1,), 1: (0,)}, still=(0, 1), for_s=600.0), live=FOUR[:2])
    assert sick(pair) == {}, "one word against another"


def test_healthy_ranks_that_wait_behind_a_cut_are_not_removed_in_place_of_the_one_that_is_cut_off() -> None:
    """Seen with ranks 0 and 1 on one side and 2 on the other: words under way when the network parted let rank 0 wait for
    rank 1, and the first time-out, of rank 1, left it waiting for nobody while the others still waited for it."""
    note, three = Notes(), FOUR[:3]
    before = waits({0: (1,), 1: (2,), 2: (0, 1)}, still=(0, 1, 2))
    assert sick(judge(*before, live=three)) == {}
    masked = note(2, What.PEER_FAULT, "timeout/ep", by=1, at=101.0)
    ended = note(2, What.WAIT_ENDED, 23, by=1, at=101.0)
    assert sick(judge(*before, masked, ended, live=three, now=101.1)) == {}


def test_a_rank_that_masked_a_peer_long_before_it_hung_is_condemned_all_the_same() -> None:
    note = Notes()
    found = waits({0: (1,), 2: (1,), 3: (1,)}, still=(1,))
    masked = [note(3, What.PEER_FAULT, "timeout/ep", by=by, at=80.0) for by in (0, 1, 2)]
    assert sick(judge(*found, *masked)) == {1: Cause.STUCK}


def test_those_who_waited_for_a_rank_that_has_just_left_are_not_condemned_before_they_can_go_on() -> None:
    found = waits({0: (1,)}, still=(0, 1))
    two = FOUR[:2]
    assert sick(judge(*found, live=two, regrouped_at=99.9)) == {}
    assert sick(judge(*found, live=two, regrouped_at=90.0)) == {1: Cause.STUCK}


def test_the_judge_of_a_loop_gives_those_who_are_left_time_when_a_rank_leaves() -> None:
    note, three, judge_ = Notes(), FOUR[:3], Judge(LIMITS)
    judge_.watch(three, 0.0)
    judge_.take([note(r.slot, What.BEAT_HEARD, at=0.0) for r in three])
    judge_.take(waits({0: (1, 2), 1: (2,)}, still=(0, 1, 2)))
    judge_.watch(three[:2], 100.0)

    def condemned(now: float) -> set[int]:
        return {v.rank.slot for v in judge_.judge(now).diagnosis.ranks if v.health == Health.UNHEALTHY}

    assert condemned(100.1) == set(), "rank 0 waits for rank 1, which waited for the one that has left"
    assert condemned(110.1) == {1}, "and has not gone on since"


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


_WORDS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([What.WAITED_ON, What.PEER_FAULT]), st.floats(0.0, 100.0)), max_size=12
)


@given(st.integers(0, 3), _WORDS)
def test_whatever_one_rank_says_of_its_peers_no_rank_that_beats_is_condemned(liar: int, words: list) -> None:  # type: ignore[type-arg]
    note = Notes()
    found = [note(slot, What.NO_PROGRESS, 600.0) for slot in range(4)]
    found += [note(slot, what, 9.0, by=liar, at=at) for slot, what, at in words if slot != liar]
    assert sick(judge(*found)) == {}


@given(st.dictionaries(st.integers(0, 4), st.sets(st.integers(0, 4), max_size=4), max_size=5))
def test_a_rank_that_beats_is_condemned_only_by_at_least_half_of_all_others(rows: dict[int, set[int]]) -> None:
    five = tuple(rank(s) for s in range(5))
    told = {by: tuple(peer for peer in row if peer != by) for by, row in rows.items()}
    found = sick(judge(*waits(told, still=tuple(range(5)), for_s=600.0), live=five))
    for slot in found:
        assert sum(slot in row for row in told.values()) >= 2
    assert 2 * len(found) < 5
