"""What every request is owed: one entry a request, and the rule which emission counts.

A request is placed on a rank under an attempt number that grows with each placement. Only an emission of the current
attempt, from the rank that holds it, that starts exactly where the accepted answer ends is taken; everything else is
dropped and counted. So no token is lost or doubled, whatever dead, slow or superseded ranks still say. The end of an
answer is derived here from its tokens, so a rank that dies between its last token and its last word changes nothing.
"""

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.protocol import Emitted, Sampling, Submit

BARREN_LIMIT = 5
"""A request that lost this many ranks that had taken it, with no token in between, is ended: it may be what kills
them."""


class RankId(NamedTuple):
    slot: int
    incarnation: int

    def __str__(self) -> str:
        return f"rank {self.slot}.{self.incarnation}"


class State(enum.Enum):
    WAITING = "waiting"
    """On no rank: none admits, or its rank was lost a moment ago."""
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


OPEN = frozenset({State.WAITING, State.RUNNING})


class Reason(enum.Enum):
    """Why a request failed; the value is the error code that the client sees."""

    REJECTED = "rejected"
    UNROUTABLE = "no_ranks"
    SILENT = "timeout"
    BARREN = "ranks_lost"
    SHUTDOWN = "shutting_down"
    INTERNAL = "internal_error"


class Failure(NamedTuple):
    reason: Reason
    message: str


class Verdict(enum.Enum):
    """What `emit` did with an emission."""

    ACCEPTED = "accepted"
    STALE = "stale"
    """Of a request that is closed, an attempt that is over, or a rank that does not hold it: dropped."""
    DUPLICATE = "duplicate"
    """Of the current attempt, and nothing new in it: dropped."""
    BROKEN = "broken"
    """Of the current attempt, but not the continuation: dropped, and the attempt cannot be trusted to end. The caller
    must `release` the request."""


class Order(NamedTuple):
    """What a client asked for, in tokens."""

    request: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]


@dataclass(slots=True)
class Entry:
    """One request. Written by the ledger only; others read."""

    order: Order
    progress_at: float
    """When it was admitted or last got a token."""
    accepted: list[int] = field(default_factory=list)
    placed_at: float = 0.0
    """When it was placed on a rank last."""
    attempt: int = 0
    rank: RankId | None = None
    state: State = State.WAITING
    finish: str | None = None
    failure: Failure | None = None
    taken: bool = False
    """Whether the rank has said that it has the present attempt: it may have been dead already when it was placed there."""
    barren: int = 0
    """Ranks lost since the last accepted token that had taken the request."""

    @property
    def open(self) -> bool:
        return self.state in OPEN


class Totals(NamedTuple):
    accepted: int
    completed: int
    failed: int
    cancelled: int
    replayed: int
    dropped_tokens: int


class Ledger:
    """All open requests, in order of admission, and the totals. Not thread-safe: one owner."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._load: Counter[RankId] = Counter()
        self._ended: Counter[State] = Counter()
        self._admitted = self._replayed = self._dropped = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request: str) -> Entry | None:
        return self._entries.get(request)

    def in_flight(self, rank: RankId) -> int:
        return self._load[rank]

    def waiting(self) -> list[str]:
        """Requests on no rank, first admitted first."""
        return [request for request, entry in self._entries.items() if entry.state is State.WAITING]

    def held_by(self, rank: RankId) -> list[str]:
        if not self._load[rank]:
            return []
        return [request for request, entry in self._entries.items() if entry.rank == rank]

    def requests(self) -> list[str]:
        return list(self._entries)

    def totals(self) -> Totals:
        ended = self._ended
        return Totals(
            accepted=self._admitted,
            completed=ended[State.COMPLETED],
            failed=ended[State.FAILED],
            cancelled=ended[State.CANCELLED],
            replayed=self._replayed,
            dropped_tokens=self._dropped,
        )

    def admit(self, order: Order, now: float) -> Entry:
        """A new request, waiting. Raises ValueError for an identifier that is in use."""
        if order.request in self._entries:
            raise ValueError(f"request {order.request} is already in the ledger")
        entry = self._entries[order.request] = Entry(order, now)
        self._admitted += 1
        return entry

    def assign(self, request: str, rank: RankId, now: float) -> Submit:
        """Place a waiting request: the message for the rank, under a new attempt number."""
        entry = self._entries[request]
        if entry.state is not State.WAITING:
            raise ValueError(f"request {request} is {entry.state.value}, only a waiting one can be placed")
        entry.attempt += 1
        entry.rank, entry.state, entry.taken, entry.placed_at = rank, State.RUNNING, False, now
        self._load[rank] += 1
        self._replayed += entry.attempt > 1
        order = entry.order
        return Submit(
            request=request,
            attempt=entry.attempt,
            tokens=order.prompt + tuple(entry.accepted),
            prompt_len=len(order.prompt),
            max_tokens=order.max_tokens,
            sampling=order.sampling,
            stop_ids=order.stop_ids,
        )

    def emit(self, rank: RankId, emitted: Emitted, now: float) -> Verdict:
        """Take what continues the answer, up to its end; the entry is closed when that is reached."""
        entry = self._entries.get(emitted.request)
        if entry is None or entry.rank != rank or entry.attempt != emitted.attempt:
            self._dropped += len(emitted.tokens)
            return Verdict.STALE
        entry.taken = True
        have = len(entry.accepted)
        if emitted.start != have:
            self._dropped += len(emitted.tokens)
            known = emitted.start + len(emitted.tokens) <= have and emitted.start < have and emitted.finish is None
            return Verdict.DUPLICATE if known else Verdict.BROKEN
        finish = self._extend(entry, emitted.tokens) or emitted.finish
        if emitted.tokens:
            entry.progress_at, entry.barren = now, 0
        if finish is not None:
            entry.finish = finish
            self._close(entry, State.COMPLETED)
        return Verdict.ACCEPTED

    def _extend(self, entry: Entry, tokens: Iterable[int]) -> str | None:
        order = entry.order
        for token in tokens:
            entry.accepted.append(token)
            if token in order.stop_ids:
                return "stop"
            if len(entry.accepted) >= order.max_tokens:
                return "length"
        return None

    def release(self, request: str, *, lost: bool) -> Entry:
        """Take a running request off its rank; it waits to be placed again. `lost`: the rank failed it (as opposed to a
        hand-over). A request that lost too many ranks without a token is failed instead."""
        entry = self._entries[request]
        if entry.state is not State.RUNNING:
            raise ValueError(f"request {request} is {entry.state.value}, only a running one can be released")
        rank = self._unplace(entry)
        entry.state = State.WAITING
        entry.barren += lost and entry.taken
        if entry.barren >= BARREN_LIMIT:
            what = (
                f"the request lost {entry.barren} ranks in a row that had taken it and gave no token, {rank} the last"
            )
            self.fail(request, Failure(Reason.BARREN, what))
        return entry

    def finish(self, request: str, finish: str) -> RankId | None:
        """The answer is whole by the gateway's own judgement (a stop string). The rank that still works on it."""
        entry = self._entries[request]
        entry.finish = finish
        return self._close(entry, State.COMPLETED)

    def fail(self, request: str, failure: Failure) -> RankId | None:
        """End with an explicit error. The rank that still works on it."""
        entry = self._entries[request]
        entry.failure = failure
        return self._close(entry, State.FAILED)

    def cancel(self, request: str) -> RankId | None:
        """The client does not want it any more. The rank that still works on it."""
        return self._close(self._entries[request], State.CANCELLED)

    def overdue(self, now: float, timeout_s: float) -> list[tuple[str, Failure]]:
        """Requests without a token for longer than the timeout, with what to tell the client."""
        late = []
        for request, entry in self._entries.items():
            if now - entry.progress_at < timeout_s:
                continue
            if entry.state is State.WAITING:
                failure = Failure(Reason.UNROUTABLE, f"no rank could take the request within {timeout_s:g} s")
            else:
                failure = Failure(Reason.SILENT, f"{entry.rank} gave no token within {timeout_s:g} s")
            late.append((request, failure))
        return late

    def _unplace(self, entry: Entry) -> RankId | None:
        rank, entry.rank = entry.rank, None
        if rank is not None:
            self._load[rank] -= 1
            if not self._load[rank]:
                del self._load[rank]
        return rank

    def _close(self, entry: Entry, state: State) -> RankId | None:
        rank = self._unplace(entry)
        entry.state = state
        self._ended[state] += 1
        del self._entries[entry.order.request]
        return rank
