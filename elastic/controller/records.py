"""What the executor tells its owner: immutable records, times in seconds of the monotonic clock of this host."""

from typing import Literal

import msgspec

from elastic.protocol import Counters, Heartbeat, Loaded
from elastic.view import Member

SequenceKind = Literal["form", "adopt", "loss", "join", "retire"]
Outcome = Literal["committed", "rolled-back", "superseded", "failed"]


class Phase(msgspec.Struct, frozen=True):
    """One phase of a sequence. Names of a loss: detect, release, park, cover, commit, resume; of a join: boot, load,
    connect, park, commit, resume; of a retire: handover, move, park, commit, resume."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class SequenceReport(msgspec.Struct, frozen=True):
    """One finished sequence, whatever its outcome."""

    kind: SequenceKind
    outcome: Outcome
    reason: str
    """Why it was run, and why it ended as it did: a sentence."""
    slots: tuple[int, ...]
    """The slots lost, joined or retired."""
    live: tuple[int, ...]
    """Live slots after it."""
    epoch: int
    began: float
    """When its cause was detected."""
    ended: float
    phases: tuple[Phase, ...]
    pause_s: dict[int, float]
    """Longest gap between two committed steps, by surviving slot; absent where the survivor was idle."""
    loaded: dict[int, Loaded]
    """Weights moved, by receiving slot."""


# Events: given to the executor's `on_event`, in the loop, as they happen.


class RankGone(msgspec.Struct, frozen=True):
    """The kernel closed the rank's liveness socket, or its process is seen dead. Conclusive with the state of /proc."""

    member: Member
    witness: str
    """"lifeline" (the kernel handed on the mutex of its main thread), "socket" (end of stream), "pidfd"."""
    process_state: str
    """One letter of /proc/<pid>/stat; "X": no such process any more, or exiting."""
    at: float


class RankBeat(msgspec.Struct, frozen=True):
    member: Member
    beat: Heartbeat
    at: float


class PeerFaultSeen(msgspec.Struct, frozen=True):
    """A rank reported that a peer failed: one-sided evidence."""

    reporter: Member
    peer: int
    what: str
    source: str
    at: float


class BootFailed(msgspec.Struct, frozen=True):
    """A launched rank ended, or was not up in time, before it was part of a view."""

    slot: int
    incarnation: int
    why: str
    """The last lines of its log, shortened."""
    attempt: int
    gave_up: bool
    """True: the slot is quarantined until a human or a new target asks for it again."""
    at: float


class PhaseBegan(msgspec.Struct, frozen=True):
    kind: SequenceKind
    phase: str
    epoch: int
    slots: tuple[int, ...]
    at: float


class SequenceEnded(msgspec.Struct, frozen=True):
    report: SequenceReport


Event = RankGone | RankBeat | PeerFaultSeen | BootFailed | PhaseBegan | SequenceEnded

SlotState = Literal["empty", "booting", "ready", "live", "lost", "quarantined"]


class SlotStatus(msgspec.Struct, frozen=True):
    slot: int
    state: SlotState
    member: Member | None
    last_beat_age_s: float | None
    round: int
    waiting: int
    running: int
    counters: Counters
    experts: int
    """Distinct experts held, over all layers."""


class GroupStatus(msgspec.Struct, frozen=True):
    name: str
    epoch: int
    live: tuple[int, ...]
    target: tuple[int, ...]
    """Slots that should be live."""
    max_ranks: int
    sequence: str | None
    """The running sequence and its phase, or None."""
    placement_hash: str
    uncovered: int
    """(layer, expert) pairs without a live copy."""
    losses_survivable: int
    """How many more ranks, whichever they are, can be lost with a slot left for every expert."""
    slots: tuple[SlotStatus, ...]
    gateway: str = ""
    """Why clients are not served although the ranks may be: no gateway, or one that does not answer; empty: it answers."""
