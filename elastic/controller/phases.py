"""The sequences as state machines: which step may follow which. Data; `Recorder` enforces it.

A step is what the group is going through, not what is measured: figures such as "detect", "release", "cover" or "capture 3"
are parts of a report and no states. The end is a state too: a sequence ends once, and after it nothing moves.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from elastic.controller.records import Outcome, SequenceKind


class Step(StrEnum):
    BEGIN = "begin"
    """The epoch has been raised; nobody has been told anything yet."""
    VACATE = "vacate"
    """The present map is committed without the buffers that are to be overwritten."""
    LOAD = "load"
    CONNECT = "connect"
    HANDOVER = "handover"
    """The gateway moves requests away from the ranks that leave."""
    MOVE = "move"
    """Those who stay load what only the leavers hold."""
    PARK = "park"
    COMMIT = "commit"
    RESUME = "resume"


End = Outcome
"""How a sequence may end, by the state it is in."""

_ANYWHERE: frozenset[End] = frozenset({"superseded", "failed"})
"""A loss cancels a sequence wherever it is; whatever a rank answers may fail it."""

_LOSS: Mapping[Step, frozenset[Step | End]] = {
    Step.BEGIN: frozenset({Step.PARK, *_ANYWHERE}),
    # without a commit: nobody is left, or the survivors stand until a rank joins
    Step.PARK: frozenset({Step.COMMIT, "committed", *_ANYWHERE}),
    Step.COMMIT: frozenset({Step.RESUME, *_ANYWHERE}),
    Step.RESUME: frozenset({"committed", *_ANYWHERE}),
}
_JOIN: Mapping[Step, frozenset[Step | End]] = {
    Step.BEGIN: frozenset({Step.VACATE, Step.LOAD, *_ANYWHERE}),
    Step.VACATE: frozenset({Step.LOAD, *_ANYWHERE}),
    Step.LOAD: frozenset({Step.CONNECT, "rolled-back", *_ANYWHERE}),
    Step.CONNECT: frozenset({Step.PARK, "rolled-back", *_ANYWHERE}),
    Step.PARK: frozenset({Step.COMMIT, "rolled-back", *_ANYWHERE}),
    Step.COMMIT: frozenset({Step.RESUME, *_ANYWHERE}),
    Step.RESUME: frozenset({"committed", *_ANYWHERE}),
}
_FORM: Mapping[Step, frozenset[Step | End]] = {
    **{state: moves for state, moves in _JOIN.items() if state != Step.VACATE},
    # nobody holds anything that could be in the way
    Step.BEGIN: frozenset({Step.LOAD, *_ANYWHERE}),
}
_RETIRE: Mapping[Step, frozenset[Step | End]] = {
    Step.BEGIN: frozenset({Step.HANDOVER, *_ANYWHERE}),
    Step.HANDOVER: frozenset({Step.VACATE, Step.MOVE, *_ANYWHERE}),
    Step.VACATE: frozenset({Step.MOVE, *_ANYWHERE}),
    Step.MOVE: frozenset({Step.PARK, *_ANYWHERE}),
    Step.PARK: frozenset({Step.COMMIT, *_ANYWHERE}),
    Step.COMMIT: frozenset({Step.RESUME, *_ANYWHERE}),
    Step.RESUME: frozenset({"committed", *_ANYWHERE}),
}

MOVES: Mapping[SequenceKind, Mapping[Step, frozenset[Step | End]]] = MappingProxyType(
    {"loss": _LOSS, "join": _JOIN, "form": _FORM, "retire": _RETIRE}
)
"""From each state of each sequence, where it may go: to another state, or to an end."""


class IllegalMove(AssertionError):
    """A sequence went where its table does not let it: a bug of this program."""


def check(kind: SequenceKind, state: Step, to: Step | End) -> None:
    """Raises IllegalMove."""
    if to not in MOVES[kind].get(state, frozenset()):
        raise IllegalMove(f"{kind}: from {state} to {to} is no move of this sequence")
