"""Each checker must see its violation in an otherwise sound record, and nothing in a sound one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaos import records
from chaos.invariants import Violation, check
from chaos.records import DaemonEvent, JournalEntry, PhaseEvent, ReportEvent, SequenceLine, SequenceState
from elastic.flight import Boot, Emission, StepLine, Stepped, Viewed
from tests.chaos.record_builder import ANSWER, BEGAN, kill, loss, request, write_run

LIVE = (0, 1)
ROWS = {3: ((0, 1, 2, 3),), 4: ((0, 1, 2, 3),)}
"""One layer, two slots of two buffers, one copy of each of four experts."""

Lines = dict[int, list[StepLine]]
Replace = Callable[..., Any]


def viewed(slot: int, epoch: int, at: float, round_: int) -> Viewed:
    row = ROWS[epoch][0]
    return Viewed(
        at=at,
        incarnation=1,
        epoch=epoch,
        live=LIVE,
        placement_hash=f"map-{epoch}",
        rows=ROWS[epoch],
        contents=(row[2 * slot : 2 * slot + 2],),
        routed=tuple((expert // 2,) for expert in range(4)),
        table_hash="table",
        next_round=round_,
        base=epoch << 24,
    )


def stepped(at: float, round_: int, epoch: int, **changes: Any) -> Stepped:
    made = Stepped(
        at=at + 0.018,
        began=at,
        incarnation=1,
        round=round_,
        epoch=epoch,
        placement_hash=f"map-{epoch}",
        table_hash="table",
        captures=5,
        address_hash="addresses",
        committed=True,
        masked=(),
        halted=False,
        rows=2,
    )
    return msgspec.structs.replace(made, **changes)


def booted_again(slot: int) -> Boot:
    return Boot(slot=slot, incarnation=2, pid=200 + slot, at=BEGAN + 1, capacity=2, slots_per_rank=2)


def sound() -> Lines:
    """Two ranks, ten rounds under each of two epochs; slot 0 emits the tokens of request 0 in the first eight."""
    found: Lines = {}
    for slot in LIVE:
        lines: list[StepLine] = [
            Boot(slot=slot, incarnation=1, pid=100 + slot, at=BEGAN - 9, capacity=2, slots_per_rank=2),
            viewed(slot, 3, BEGAN, 0),
        ]
        for round_ in range(20):
            if round_ == 10:
                lines.append(viewed(slot, 4, BEGAN + 0.3, 10))
            at = BEGAN + 0.02 * round_ + (0.12 if round_ >= 10 else 0)
            lines.append(stepped(at, round_, 3 if round_ < 10 else 4))
            if slot == 0 and round_ < 8:
                part = ANSWER[4 * round_ : 4 * round_ + 4]
                lines.append(
                    Emission(at=at + 0.019, incarnation=1, round=round_, tokens=(("cmpl-0", 1, 4 * round_, part),))
                )
        found[slot] = lines
    return found


def alter(lines: Lines, slot: int, match: Callable[[Any], bool], **changes: Any) -> Lines:
    """The first line that matches, changed."""
    index = next(i for i, line in enumerate(lines[slot]) if match(line))
    lines[slot][index] = msgspec.structs.replace(lines[slot][index], **changes)
    return lines


def is_step(round_: int) -> Callable[[Any], bool]:
    return lambda line: isinstance(line, Stepped) and line.round == round_


def is_view(epoch: int) -> Callable[[Any], bool]:
    return lambda line: isinstance(line, Viewed) and line.epoch == epoch


def found_in(tmp_path: Path, lines: Lines | None = None, **changes: Any) -> list[Violation]:
    given: dict[str, Any] = {"requests": (request(0, BEGAN),), "steps_of": sound() if lines is None else lines}
    return check(write_run(tmp_path / "run", **(given | changes)))


def test_a_sound_record_has_no_violation(tmp_path: Path) -> None:
    assert found_in(tmp_path) == []


def test_tokens_may_be_handed_out_behind_the_next_view(tmp_path: Path) -> None:
    lines = sound()
    index = next(i for i, line in enumerate(lines[0]) if is_view(4)(line))
    at = lines[0][index].at
    late = Emission(at=at + 0.001, incarnation=1, round=9, tokens=(("cmpl-0", 1, 36, (7,)),))
    lines[0].insert(index + 1, late)
    assert [v for v in found_in(tmp_path, lines) if v.invariant == 4] == []
    lines[0].insert(index + 2, msgspec.structs.replace(late, at=at + 0.002))
    assert [v.invariant for v in found_in(tmp_path / "again", lines)].count(4) == 1


def test_a_rank_that_died_with_a_round_which_the_others_discarded_is_no_violation(tmp_path: Path) -> None:
    lines = sound()
    died = next(i for i, line in enumerate(lines[1]) if is_view(4)(line))
    lines[1] = [*lines[1][:died], stepped(BEGAN + 0.2, 10, 3)]
    found = found_in(tmp_path, alter(lines, 0, is_view(4), live=(0,)))
    assert not [violation for violation in found if violation.what.startswith("slot 0 committed round")]


STEP_FAULTS: dict[str, tuple[int, Callable[[Lines], Lines]]] = {
    "an expert has no route": (1, lambda x: alter(x, 0, is_view(4), routed=((0,), (0,), (), (1,)))),
    "a route leads to a rank that is not live": (1, lambda x: alter(x, 0, is_view(4), routed=((0,), (0,), (1,), (5,)))),
    "a route leads to a rank without the expert": (
        2,
        lambda x: alter(x, 0, is_view(4), routed=((1,), (0,), (1,), (1,))),
    ),
    "a buffer holds another expert than the map says": (1, lambda x: alter(x, 1, is_view(4), contents=((2, 7),))),
    "two ranks serve by different maps": (2, lambda x: alter(x, 1, is_view(4), placement_hash="other")),
    "two ranks differ about who is live": (2, lambda x: alter(x, 1, is_view(4), live=(0, 1, 2))),
    "one rank misses the commit": (2, lambda x: {**x, 1: [i for i in x[1] if not is_view(4)(i)]}),
    "a step by a map that was never taken over": (2, lambda x: alter(x, 1, is_step(15), placement_hash="other")),
    "the route table changes between commits": (2, lambda x: alter(x, 1, is_step(15), table_hash="other")),
    "a rank changes its map a round before the others": (2, lambda x: alter(x, 1, is_step(10), round=9)),
    "a survivor captures a graph": (3, lambda x: alter(x, 1, is_step(15), captures=6)),
    "a tensor moves": (3, lambda x: alter(x, 1, is_step(15), address_hash="other")),
    "a step counts although a peer was masked": (4, lambda x: alter(x, 1, is_step(5), masked=(0,))),
    "tokens of a discarded step are emitted": (4, lambda x: alter(x, 0, is_step(5), committed=False)),
    "a round is committed twice": (4, lambda x: alter(x, 1, is_step(5), round=4)),
    "an epoch is used again": (7, lambda x: alter(x, 1, is_view(4), base=3 << 24)),
    "a rank goes back to an older epoch": (7, lambda x: alter(x, 1, is_view(4), epoch=2)),
    "a rank that was replaced runs on": (
        7,
        lambda x: {**x, 1: [*x[1], booted_again(1), stepped(BEGAN + 2, 20, 4)]},
    ),
    "another rank emits other tokens for the same place": (
        4,
        lambda x: {
            **x,
            1: [*x[1], Emission(at=BEGAN + 1, incarnation=1, round=19, tokens=(("cmpl-0", 2, 4, (9,)),))],
        },
    ),
}


@pytest.mark.parametrize("fear", STEP_FAULTS)
def test_a_violation_in_the_steps_is_found(tmp_path: Path, fear: str) -> None:
    invariant, change = STEP_FAULTS[fear]
    assert invariant in {violation.invariant for violation in found_in(tmp_path, change(sound()))}


WRONG = (*ANSWER[:5], 1, *ANSWER[6:])
REQUEST_FAULTS: dict[str, tuple[int, dict[str, Any]]] = {
    "a token differs": (4, {"tokens": WRONG}),
    "a token comes twice": (5, {"tokens": (*ANSWER, ANSWER[-1])}),
    "the end is missing": (5, {"tokens": ANSWER[:-1]}),
    "nothing ends it": (5, {"tokens": ANSWER[:3], "finish": ""}),
}


@pytest.mark.parametrize("fear", REQUEST_FAULTS)
def test_a_violation_in_an_answer_is_found_whatever_the_client_called_it(tmp_path: Path, fear: str) -> None:
    invariant, changes = REQUEST_FAULTS[fear]
    found = found_in(tmp_path, requests=(request(0, BEGAN, **changes),))
    assert invariant in {violation.invariant for violation in found}


def test_a_token_that_no_rank_emitted_is_found(tmp_path: Path) -> None:
    lines = sound()
    lines[0] = [line for line in lines[0] if not (isinstance(line, Emission) and line.round == 3)]
    assert {violation.invariant for violation in found_in(tmp_path, lines)} == {4}


def emitted_again(attempt: int, at: float) -> Emission:
    return Emission(at=at, incarnation=1, round=19, tokens=(("cmpl-0", attempt, 4, ANSWER[4:6]),))


def test_a_replay_that_computes_again_what_the_client_has_is_found(tmp_path: Path) -> None:
    lines = sound()
    lines[1].append(emitted_again(2, BEGAN + 1))
    (violation,) = found_in(tmp_path, lines)
    assert violation.invariant == 5
    assert "token 4 was emitted again by attempt 2" in violation.what


def test_a_hung_rank_that_says_late_what_its_replacement_has_said_is_no_violation(tmp_path: Path) -> None:
    lines = sound()
    # the other rank's, of the second attempt, came in time; its step of the same round went before
    index = next(i for i, line in enumerate(lines[1]) if is_step(2)(line))
    lines[1].insert(index + 1, msgspec.structs.replace(emitted_again(2, BEGAN + 0.06), round=2))
    lines[1].append(emitted_again(1, BEGAN + 1))
    assert found_in(tmp_path, lines) == []


def test_an_answer_with_one_explicit_error_is_no_violation(tmp_path: Path) -> None:
    failed = request(0, BEGAN, tokens=ANSWER[:8], finish="", error="no rank gave a token within 300 s")
    assert found_in(tmp_path, requests=(failed,)) == []


def phases(kind: str, at: float, names: str, pid: int = 9) -> list[SequenceLine]:
    return [
        PhaseEvent(at=at + 0.001 * n, daemon_pid=pid, kind=kind, phase=name, epoch=4, slots=(1,))
        for n, name in enumerate(names.split())
    ]


def gone(slot: int, at: float) -> DaemonEvent:
    return DaemonEvent(at=at, daemon_pid=9, what="rank-gone", slot=slot, incarnation=1)


FAULT = kill(1, BEGAN + 0.305, 1)
REPORT = loss(FAULT, 0.05)
ENDED = ReportEvent(at=REPORT.ended, daemon_pid=9, report=REPORT)
HEALED = [gone(1, REPORT.began), *phases("loss", REPORT.began, "begin park commit resume"), ENDED]

SEQUENCE_FAULTS: dict[str, tuple[int, list[SequenceLine]]] = {
    "two sequences at once": (6, [*phases("join", BEGAN + 1, "begin load"), *HEALED]),
    "a barrier is skipped": (6, [gone(1, REPORT.began), *phases("loss", REPORT.began, "begin commit resume"), ENDED]),
    "a step is done twice": (
        6,
        [gone(1, REPORT.began), *phases("loss", REPORT.began, "begin park commit commit"), ENDED],
    ),
    "a sequence has no end": (6, [*HEALED, *phases("join", BEGAN - 100, "begin load")]),
    "a daemon acts after its successor": (
        7,
        [
            DaemonEvent(at=BEGAN, daemon_pid=9, what="began"),
            *phases("join", BEGAN, "begin", pid=9),
            DaemonEvent(at=BEGAN + 1, daemon_pid=10, what="began"),
            *phases("loss", BEGAN + 1, "begin park", pid=10),
            *phases("join", BEGAN + 2, "load", pid=9),
        ],
    ),
    "an epoch is given to a second sequence": (7, [*HEALED, *phases("join", BEGAN + 5, "begin load")]),
    "a committed epoch goes back": (
        7,
        [*HEALED, ReportEvent(at=BEGAN + 9, daemon_pid=9, report=msgspec.structs.replace(REPORT, epoch=2))],
    ),
    "a healthy rank is removed": (
        9,
        [*HEALED, ReportEvent(at=BEGAN + 9, daemon_pid=9, report=msgspec.structs.replace(REPORT, slots=(0,)))],
    ),
    "a rank is removed before anybody knew anything": (8, HEALED[1:]),
}


def with_sequences(tmp_path: Path, lines: list[SequenceLine], steps: Lines | None = None) -> list[Violation]:
    path = write_run(tmp_path / "run", faults=(FAULT,), requests=(request(0, BEGAN),), steps_of=steps or sound())
    records.write_lines(path / records.SEQUENCES, lines)
    entry = JournalEntry(
        seq=2,
        wall=1.79e9,
        monotonic=REPORT.ended,
        kind="outcome",
        incident="i",
        body={"report": msgspec.to_builtins(REPORT, str_keys=True)},
    )
    with (path / records.DECISIONS).open("ab") as file:
        file.write(msgspec.json.encode(entry) + b"\n")
    return check(path)


def test_a_sound_healing_has_no_violation(tmp_path: Path) -> None:
    assert with_sequences(tmp_path, HEALED) == []


@pytest.mark.parametrize("fear", SEQUENCE_FAULTS)
def test_a_violation_in_the_sequences_is_found(tmp_path: Path, fear: str) -> None:
    invariant, lines = SEQUENCE_FAULTS[fear]
    assert invariant in {violation.invariant for violation in with_sequences(tmp_path, lines)}


@pytest.mark.parametrize("committed", [True, False])
def test_a_rank_that_steps_before_all_have_the_view_after_a_loss_is_found(tmp_path: Path, committed: bool) -> None:
    early = alter(sound(), 0, is_step(10), began=BEGAN + 0.299, committed=committed)
    assert [violation.invariant for violation in with_sequences(tmp_path, HEALED, early)] == [2]


def test_a_rank_that_steps_before_the_daemon_lets_it_go_is_found(tmp_path: Path) -> None:
    let_go = PhaseEvent(at=BEGAN + 0.4, daemon_pid=9, kind="loss", phase="resume", epoch=4, slots=(1,))
    (violation,) = with_sequences(tmp_path, [*phases("loss", BEGAN + 0.2, "begin park commit"), let_go])
    assert violation.invariant == 2
    assert violation.what.endswith("before the daemon let the ranks go")


def test_a_lost_line_of_the_journal_is_found(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", requests=(request(0, BEGAN),), steps_of=sound())
    lines = [
        JournalEntry(seq=seq, wall=1.0, monotonic=1.0, kind="lifecycle", incident="", body={}) for seq in (1, 2, 4)
    ]
    records.write_lines(path / records.DECISIONS, lines)
    (violation,) = check(path)
    assert violation.invariant == 10
    assert "3" in violation.what


def test_a_healing_that_the_journal_does_not_know_is_found(tmp_path: Path) -> None:
    path = write_run(
        tmp_path / "run", faults=(FAULT,), reports=(REPORT,), requests=(request(0, BEGAN),), steps_of=sound()
    )
    records.write_lines(path / records.SEQUENCES, HEALED)
    assert [violation.invariant for violation in check(path)] == [10]


@pytest.mark.parametrize(("after_s", "invariants"), [(0.01, []), (60.0, [10])])
def test_the_last_word_of_a_daemon_that_was_killed_with_it_need_not_be_in_the_journal(
    tmp_path: Path, after_s: float, invariants: list[int]
) -> None:
    ended = SequenceState(sequence="loss", step="ended", epoch=4)
    killed = msgspec.structs.replace(
        FAULT, id="f2", kind="daemon-kill", daemon_pid=ENDED.daemon_pid, state=ended, at=REPORT.ended + after_s
    )
    path = write_run(
        tmp_path / "run", faults=(FAULT, killed), reports=(REPORT,), requests=(request(0, BEGAN),), steps_of=sound()
    )
    records.write_lines(path / records.SEQUENCES, HEALED)
    assert [violation.invariant for violation in check(path) if violation.invariant == 10] == invariants


@pytest.mark.parametrize("is_written", [True, False])
def test_a_rank_that_the_executor_itself_gave_up_needs_the_daemon_s_word_for_it(
    tmp_path: Path, is_written: bool
) -> None:
    silent = msgspec.structs.replace(
        REPORT, reason="no answer within the commit deadline: rank 1.1: no answer to Abort"
    )
    ended = msgspec.structs.replace(ENDED, report=silent)
    path = write_run(tmp_path / "run", faults=(FAULT,), requests=(request(0, BEGAN),), steps_of=sound())
    records.write_lines(path / records.SEQUENCES, [*HEALED[1:-1], ended])
    if is_written:
        body = {"reason": "executor", "slots": [1]}
        entry = JournalEntry(seq=1, wall=1.0, monotonic=REPORT.ended - 0.01, kind="decision", incident="", body=body)
        records.write_lines(path / records.DECISIONS, [entry])
    assert any(violation.invariant == 8 for violation in check(path)) is not is_written
