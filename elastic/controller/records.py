"""What the executor tells its owner: immutable records, times in seconds of the monotonic clock of this host."""

from typing import Literal

import msgspec

from elastic.protocol import Counters, Heartbeat, Loaded
from elastic.view import Member

SequenceKind = Literal["form", "loss", "join", "retire"]
Outcome = Literal["committed", "rolled-back", "superseded", "failed"]


class Phase(msgspec.Struct, frozen=True):
    """One part of a sequence: a state of `elastic.controller.phases`, or a figure. Figures of a loss: detect, release,
    cover; of a join: boot, and "capture" with each joiner's slot."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Joiner(msgspec.Struct, frozen=True):
    """How one joiner came up: seconds by part."""

    spare: bool
    """Whether it was a spare: then its boot counts from the adoption."""
    boot_s: dict[str, float]
    """As in `Status`."""
    reach_s: float
    """To reach the weights of its peers."""
    load_s: float
    capture_s: float


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
    joiners: dict[int, Joiner] = {}
    """How each joiner came up, by slot."""


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


class Fenced(msgspec.Struct, frozen=True):
    """A later controller has taken the group, or this one's lease is over: the executor acts no more. Said once."""

    why: str
    at: float


Event = RankGone | RankBeat | PeerFaultSeen | BootFailed | PhaseBegan | SequenceEnded | Fenced

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


SpareStage = Literal["absent", "booting", "ready", "given-up"]


class SpareState(msgspec.Struct, frozen=True):
    """A process that stands by to become a rank; it is none."""

    number: int
    state: SpareStage
    pid: int
    """0 unless it is ready."""
    slots: tuple[int, ...]
    """Those that it may take."""
    why: str
    """Of one that was given up: how the last of its processes ended."""


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
    losses_without_load: int | None = None
    """How many more can be lost with every expert still on a live rank, so that covering them loads nothing; None where the
    target does not know its placement."""
    gateway: str = ""
    """Why clients are not served although the ranks may be: no gateway, or one that does not answer; empty: it answers."""
    spares: tuple[SpareState, ...] = ()
    term: int = 0
    """Of the controller's lease; 0: none is used."""
    fenced: str = ""
    """Why this controller may not act any more; empty: it may."""
