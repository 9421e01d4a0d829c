"""What healing remembers from one decision to the next. It is the fold of notes, and every note is in the journal: after a
restart the same notes give the same memory, and the same memory the same decisions.

Times are seconds of the monotonic clock of this host; `moved` brings notes of an earlier boot over.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

import msgspec

from healer.diagnosis import Cause
from healer.evidence import RankRef
from healer.policy.reasons import Step

_T = TypeVar("_T")

MAX_FAULTS_PER_SLOT = 10_000
"""The largest fault budget that the schema allows; more are never counted."""
MAX_DESTRUCTIVE = 100_000


class Phase(StrEnum):
    """Where the present attempt of a ladder stands."""

    RUNNING = "running"
    EMPTYING = "emptying"  # the slot is being emptied for the hook of this rung
    REFILLING = "refilling"  # the hook has succeeded, and a rank was asked for in the slot
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Ladder(msgspec.Struct, frozen=True, kw_only=True):
    """How far the healing of one slot has come."""

    slot: int
    rank: RankRef
    """Whose fault began it."""
    rule: str
    cause: Cause
    rung: int
    """Index in the rule's actions."""
    attempts: int
    """Begun on this rung, the present one included."""
    phase: Phase
    at: float
    """When the phase began."""
    why: str = ""
    """Why the last attempt failed."""


class FailedRefill(msgspec.Struct, frozen=True):
    """A slot whose replacement did not start."""

    rule: str
    """The rule by which the replacement was asked for; empty: an operator asked for the slot."""
    attempts: int
    """Replacements asked for, all failed."""
    failed_at: float
    asked: bool
    """True: a further attempt is under way."""
    why: str


class Quarantine(msgspec.Struct, frozen=True):
    since: float
    until: float
    why: str
    removed: bool = False
    """The slot left the target by healing, and returns to it when the quarantine ends."""


class Fault(msgspec.Struct, frozen=True):
    rank: RankRef
    cause: Cause
    admitted: bool
    """Its evidence was fresh, and healing was neither paused nor stopped by the breaker: it is worked on however long others
    are in its way. What was not admitted needs fresh evidence when it is acted upon."""


class FaultsSeen(msgspec.Struct, frozen=True, tag="faults-seen"):
    """Ranks became unhealthy, one in a slot."""

    faults: tuple[Fault, ...]
    at: float


class Recovered(msgspec.Struct, frozen=True, tag="recovered"):
    """The slot needs no healing any more: its rank is healthy, or it has left the target."""

    slot: int
    at: float


class Began(msgspec.Struct, frozen=True, tag="began"):
    """An action of the ladder was begun for these ranks, one in a slot."""

    ranks: tuple[RankRef, ...]
    rule: str
    cause: Cause
    rung: int
    step: Step
    phase: Phase
    destructive: bool
    at: float


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The action under way in a slot has ended."""

    slot: int
    rung: int
    """Of the action; another one that has begun meanwhile is not ended by it."""
    ok: bool
    why: str
    at: float


class RefillFailed(msgspec.Struct, frozen=True, tag="refill-failed"):
    """The target gave up starting a rank in the slot."""

    slot: int
    rule: str
    why: str
    at: float


class RefillAsked(msgspec.Struct, frozen=True, tag="refill-asked"):
    """A rank was asked for again in a slot where one had failed to start."""

    slot: int
    at: float


class RefillRefused(msgspec.Struct, frozen=True, tag="refill-refused"):
    """What was decided about a failed replacement cannot be done: from now on it is a human's."""

    slot: int
    why: str
    at: float


class RefillSettled(msgspec.Struct, frozen=True, tag="refill-settled"):
    """The slot is live, or it has left the target: no replacement is missing in it."""

    slot: int
    at: float


class Quarantined(msgspec.Struct, frozen=True, tag="quarantined"):
    slot: int
    until: float
    why: str
    at: float


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """A quarantined slot left the target by healing."""

    slot: int
    at: float


class QuarantineOver(msgspec.Struct, frozen=True, tag="quarantine-over"):
    slot: int
    who: str
    """Who ended it; empty: time."""
    at: float


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """A slot that came out of quarantine was asked for again."""

    slot: int
    at: float


class BreakerOpened(msgspec.Struct, frozen=True, tag="breaker-opened"):
    why: str
    at: float


class BreakerReset(msgspec.Struct, frozen=True, tag="breaker-reset"):
    who: str
    at: float


class TelemetryLost(msgspec.Struct, frozen=True, tag="telemetry-lost"):
    at: float


class TelemetryBack(msgspec.Struct, frozen=True, tag="telemetry-back"):
    at: float


class Paused(msgspec.Struct, frozen=True, tag="paused"):
    who: str
    at: float


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    who: str
    at: float


class Memory(msgspec.Struct, frozen=True, kw_only=True, tag="memory"):
    """As a note: a summary of all notes before it."""

    ladders: dict[int, Ladder] = {}
    failed: dict[int, FailedRefill] = {}
    """By slot, replacements that did not start."""
    faulty: dict[int, RankRef] = {}
    """By slot, the rank whose fault is counted already."""
    admitted: frozenset[RankRef] = frozenset()
    """Ranks whose fault healing has taken up."""
    faults: dict[int, tuple[float, ...]] = {}
    """By slot, when its ranks became unhealthy, oldest first."""
    quarantined: dict[int, Quarantine] = {}
    returning: frozenset[int] = frozenset()
    """Slots to be filled again, since their quarantine has ended."""
    released: dict[int, float] = {}
    """By slot, when its last quarantine ended by itself; an operator who ends one has looked."""
    destructive: tuple[float, ...] = ()
    """When destructive steps were begun, oldest first, since the last reset of the breaker."""
    breaker_open_since: float | None = None
    breaker_why: str = ""
    telemetry_lost: bool = False
    telemetry_back_at: float | None = None
    paused_by: str = ""
    """Empty: not paused by an operator."""


Note = (
    FaultsSeen
    | Recovered
    | Began
    | Ended
    | RefillFailed
    | RefillAsked
    | RefillRefused
    | RefillSettled
    | Quarantined
    | Removed
    | QuarantineOver
    | Returned
    | BreakerOpened
    | BreakerReset
    | TelemetryLost
    | TelemetryBack
    | Paused
    | Resumed
    | Memory
)


def remember(memory: Memory, note: Note) -> Memory:
    """The memory after one more note."""
    change = msgspec.structs.replace
    match note:
        case FaultsSeen():
            return _faults(memory, note)
        case Recovered(slot, _):
            return change(
                memory,
                ladders=_less(memory.ladders, slot),
                faulty=_less(memory.faulty, slot),
                admitted=frozenset(one for one in memory.admitted if one.slot != slot),
            )
        case Began():
            return _began(memory, note)
        case Ended(slot, rung, ok, why, at):
            ladder = memory.ladders.get(slot)
            if ladder is None or ladder.rung != rung or ladder.phase in (Phase.SUCCEEDED, Phase.FAILED):
                return memory
            phase = Phase.SUCCEEDED if ok else Phase.FAILED
            return change(memory, ladders=memory.ladders | {slot: change(ladder, phase=phase, at=at, why=why)})
        case RefillFailed() | RefillAsked() | RefillRefused() | RefillSettled():
            return change(memory, failed=_refills(memory.failed, note))
        case Quarantined(slot, until, why, at):
            return change(memory, quarantined=memory.quarantined | {slot: Quarantine(at, until, why)})
        case Removed(slot, _):
            held = memory.quarantined.get(slot)
            if held is None:
                return memory
            return change(memory, quarantined=memory.quarantined | {slot: change(held, removed=True)})
        case QuarantineOver(slot, who, at):
            held = memory.quarantined.get(slot)
            back = {slot} if held and held.removed else set()
            return change(
                memory,
                quarantined=_less(memory.quarantined, slot),
                faults=_less(memory.faults, slot),
                returning=memory.returning | back,
                released=_less(memory.released, slot) if who else memory.released | {slot: at},
            )
        case Returned(slot, _):
            return change(memory, returning=memory.returning - {slot})
        case BreakerOpened(why, at):
            return change(memory, breaker_open_since=at, breaker_why=why, admitted=frozenset())
        case BreakerReset():
            return change(memory, breaker_open_since=None, breaker_why="", destructive=())
        case TelemetryLost():
            return change(memory, telemetry_lost=True)
        case TelemetryBack(at):
            return change(memory, telemetry_lost=False, telemetry_back_at=at)
        case Paused(who, _):
            return change(memory, paused_by=who, admitted=frozenset())
        case Resumed():
            return change(memory, paused_by="")
        case Memory():
            return note


def recall(notes: Iterable[Note]) -> Memory:
    memory = Memory()
    for note in notes:
        memory = remember(memory, note)
    return memory


def moved(note: Note, by_s: float) -> Note:
    """The same note on a monotonic clock that reads `by_s` more."""
    if not isinstance(note, Memory):
        note = msgspec.structs.replace(note, at=note.at + by_s)
        return msgspec.structs.replace(note, until=note.until + by_s) if isinstance(note, Quarantined) else note
    change = msgspec.structs.replace
    return change(
        note,
        ladders={slot: change(one, at=one.at + by_s) for slot, one in note.ladders.items()},
        failed={slot: change(one, failed_at=one.failed_at + by_s) for slot, one in note.failed.items()},
        faults={slot: tuple(at + by_s for at in times) for slot, times in note.faults.items()},
        quarantined={
            slot: change(one, since=one.since + by_s, until=one.until + by_s) for slot, one in note.quarantined.items()
        },
        released={slot: at + by_s for slot, at in note.released.items()},
        destructive=tuple(at + by_s for at in note.destructive),
        breaker_open_since=None if note.breaker_open_since is None else note.breaker_open_since + by_s,
        telemetry_back_at=None if note.telemetry_back_at is None else note.telemetry_back_at + by_s,
    )


def _refills(
    failed: dict[int, FailedRefill], note: RefillFailed | RefillAsked | RefillRefused | RefillSettled
) -> dict[int, FailedRefill]:
    before, change = failed.get(note.slot), msgspec.structs.replace
    match note:
        case RefillFailed(slot, rule, why, at):
            attempts = before.attempts + 1 if before else 1
            return failed | {slot: FailedRefill(rule, attempts, at, False, why)}
        case RefillAsked(slot, _) if before is not None:
            return failed | {slot: change(before, asked=True)}
        case RefillRefused(slot, why, _) if before is not None:
            return failed | {slot: change(before, rule="", asked=False, why=why)}
        case RefillSettled(slot, _):
            return _less(failed, slot)
    return failed


def _faults(memory: Memory, note: FaultsSeen) -> Memory:
    slots = {fault.rank.slot for fault in note.faults}
    admitted = {rank for rank in memory.admitted if rank.slot not in slots}
    times = {slot: (*memory.faults.get(slot, ()), note.at)[-MAX_FAULTS_PER_SLOT:] for slot in slots}
    return msgspec.structs.replace(
        memory,
        faulty=memory.faulty | {fault.rank.slot: fault.rank for fault in note.faults},
        admitted=frozenset(admitted | {fault.rank for fault in note.faults if fault.admitted}),
        faults=memory.faults | times,
    )


def _began(memory: Memory, note: Began) -> Memory:
    ladders = {rank.slot: _step(memory.ladders.get(rank.slot), rank, note) for rank in note.ranks}
    destructive = memory.destructive
    if note.destructive:
        destructive = (*destructive, *[note.at] * len(note.ranks))[-MAX_DESTRUCTIVE:]
    return msgspec.structs.replace(memory, ladders=memory.ladders | ladders, destructive=destructive)


def _step(before: Ladder | None, rank: RankRef, note: Began) -> Ladder:
    attempts = 1
    if before is not None and (before.rank, before.rule, before.rung) == (rank, note.rule, note.rung):
        # emptying the slot and filling it again belong to the attempt of the hook between them
        attempts = before.attempts + (before.phase != Phase.EMPTYING and note.phase != Phase.REFILLING)
    return Ladder(
        slot=rank.slot,
        rank=rank,
        rule=note.rule,
        cause=note.cause,
        rung=note.rung,
        attempts=attempts,
        phase=note.phase,
        at=note.at,
    )


def _less(known: dict[int, _T], slot: int) -> dict[int, _T]:
    return {key: value for key, value in known.items() if key != slot} if slot in known else known
