"""The tables of moves: whole, held to, and each move known to a test."""

from typing import get_args

import pytest

from elastic.controller.phases import MOVES, IllegalMove, Step
from elastic.controller.recorder import Recorder
from elastic.controller.records import Event, Outcome, SequenceEnded, SequenceKind

ENDS = get_args(Outcome)


def recorder(kind: SequenceKind, events: list[Event]) -> Recorder:
    return Recorder(kind, (1,), "test", 7, 0.0, events.append, clock=lambda: 1.0)


def paths(kind: SequenceKind) -> list[list[str]]:
    """Every way from the beginning to an end; there are no rings."""
    found: list[list[str]] = []

    def walk(path: list[str]) -> None:
        for to in sorted(MOVES[kind][Step(path[-1])]):
            if to in ENDS:
                found.append([*path, to])
            else:
                assert to not in path, f"{kind} can go round for ever: {path}"
                walk([*path, to])

    walk([Step.BEGIN])
    return found


def go(rec: Recorder, to: str) -> None:
    if to in ENDS:
        rec.end(to, "", ())  # type: ignore[arg-type]
    else:
        with rec.phase(Step(to)):
            pass


@pytest.mark.parametrize("kind", get_args(SequenceKind))
def test_every_legal_way_through_a_sequence_ends_and_is_reported_once(kind: SequenceKind) -> None:
    for way in paths(kind):
        events: list[Event] = []
        rec = recorder(kind, events)
        for step in way[1:-1]:
            with rec.phase(Step(step)):
                assert rec.state == step
        rec.end(way[-1], "done", (0,))  # type: ignore[arg-type]
        rec.end("failed", "again", ())
        reports = [e.report for e in events if isinstance(e, SequenceEnded)]
        assert [r.outcome for r in reports] == [way[-1]]
        assert [p.name for p in reports[0].phases] == way[1:-1]


@pytest.mark.parametrize("kind", get_args(SequenceKind))
def test_every_other_move_is_refused_and_the_sequence_stays_where_it_was(kind: SequenceKind) -> None:
    for way in paths(kind):
        for length in range(1, len(way)):
            rec = recorder(kind, [])
            for step in way[1:length]:
                with rec.phase(Step(step)):
                    pass
            state = rec.state
            for to in [*Step, *ENDS]:
                if to in MOVES[kind][state]:
                    continue
                with pytest.raises(IllegalMove, match=f"{kind}: from {state} to {to}"):
                    go(rec, to)
                assert rec.state == state


def test_nothing_moves_after_the_end() -> None:
    rec = recorder("loss", [])
    rec.end("superseded", "another rank was lost", ())
    with pytest.raises(IllegalMove, match="loss: park after its end"), rec.phase(Step.PARK):
        pass


@pytest.mark.parametrize("kind", get_args(SequenceKind))
def test_a_sequence_can_be_cut_off_wherever_it_is(kind: SequenceKind) -> None:
    for state, moves in MOVES[kind].items():
        assert {"superseded", "failed"} <= moves, state


def test_what_the_sequences_really_do_is_in_the_documented_table() -> None:
    """The document's table is the code's."""
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    for kind, table in MOVES.items():
        for state, moves in table.items():
            onward = sorted({str(m) for m in moves} - {"superseded", "failed"})
            if kind != "form":
                assert f"| {kind} | {state} | {', '.join(onward)} |" in text, (kind, state)
