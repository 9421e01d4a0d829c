"""The EP backend on the CPU: routing, waiting, masks and deterministic sums, over a transport.

One step of one MoE layer. *Dispatch*: the rows are sorted by physical expert; each live peer gets one record (counts and
rows for its experts), also when it is empty, and then the word `tag`, the number of this dispatch. When all live peers'
words are there, their rows are gathered into `Received`, by expert, then source slot, then row. *Combine*: each source
gets back the rows it sent, in the order it sent them, so that no row needs an address; the source puts them in place and
sums over k.

One record per pair and phase is enough, no second buffer: a peer overwrites its dispatch record only in its next dispatch,
which it begins after it has our combine word of this one, which we post after we have gathered the record. Likewise it
overwrites its combine record only after our next dispatch word, which we post after the sum. This holds while both
sides think each other live; a rank that masks another neither reads from it nor writes to it. A process that was taken for dead
may still write into its old places: whoever gives its slot to another process must have ended it first.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from elastic.errors import ElasticError, Retryable, Unreachable
from elastic.rank.comm.base import ABSENT, LIVE, MASKED, PeerFault, Received, never
from elastic.rank.comm.transport import COMBINE, DISPATCH, Floats, Transport

Ints = npt.NDArray[np.int64]

SETTLE_S = 0.05
"""How long `clean` waits for deliveries of the discarded step before it gives them up."""


class _Flight(NamedTuple):
    """What a dispatch leaves for its combine."""

    sent: tuple[int, ...]
    """Peers that got a record and so owe a combine record; with ourselves."""
    homes: Ints
    """[rows * k]: for each entry the slot it was sent to, or -1."""
    picks: Ints
    """[rows * k]: for each entry its row in the combine records, or the row of zeros."""
    places: Ints
    """Rows of `Received.x` in the order of the senders' records."""
    spans: tuple[tuple[int, int, int], ...]
    """(source slot, start, stop) in `places`."""


class CpuEpBackend:
    """See `EpBackend`. float32 only. A transition between ABSENT and MASKED does not count in `mask_generation`: no step
    uses such a peer, so none has to be discarded because one connects in the background."""

    def __init__(self, transport: Transport, *, timeout_s: float) -> None:
        layout = transport.layout
        self.rank, self.capacity, self.experts_per_rank = transport.rank, layout.capacity, layout.experts_per_rank
        self.max_tokens, self.hidden, self.top_k = layout.max_tokens, layout.hidden, layout.top_k
        self._transport, self._layout, self._timeout_s = transport, layout, timeout_s
        self._words = transport.inbox.words.data

        e, width = layout.experts_per_rank, layout.capacity * layout.max_tokens
        self._received = Received(torch.zeros(e, width, layout.hidden), torch.zeros(e, dtype=torch.int32))
        self._x: Floats = self._received.x.view(-1, layout.hidden).numpy()
        self._counts: npt.NDArray[np.int32] = self._received.counts.numpy()
        self._gathered: Floats = np.zeros((min(e * width, layout.capacity * layout.cells), layout.hidden), np.float32)
        self._contributions: Floats = np.zeros((layout.cells, layout.hidden), np.float32)
        self._expert_starts: Ints = np.arange(e, dtype=np.int64) * width
        self._zero_row = layout.capacity * layout.cells

        self._lock = threading.Lock()
        self._masks = [ABSENT] * layout.capacity
        self._masks[self.rank] = LIVE
        self._endpoints: dict[int, bytes] = {}
        self._generation = 0
        self._faults: deque[PeerFault] = deque()
        self._waiting: tuple[int, int, tuple[int, ...]] | None = None
        """Channel, number and peers of the wait that is under way."""

        self._next_tag = 1
        self._tag = 0
        self._flight: _Flight | None = None
        self._routed_for: tuple[int, ...] | None = None
        self._route: Ints = np.empty(0, np.int64)

    @property
    def mask_generation(self) -> int:
        return self._generation

    def endpoint(self) -> bytes:
        return self._transport.endpoint()

    def connect(self, peers: Mapping[int, bytes], *, deadline_s: float, give_up: Callable[[], bool] = never) -> None:
        until = time.monotonic() + deadline_s
        for peer, endpoint in peers.items():
            self._check_slot(peer)
            if peer == self.rank or self._endpoints.get(peer) == endpoint:
                continue
            left = until - time.monotonic()
            if left <= 0:
                text = f"rank {self.rank}: no time left to connect to rank {peer} within {deadline_s:g} s"
                raise Unreachable(text, [peer])
            self._set(peer, MASKED if self._masks[peer] != ABSENT else ABSENT)
            try:
                self._transport.connect(peer, endpoint, deadline_s=left, give_up=give_up)
            except Retryable as error:
                self.disconnect([peer])
                raise Unreachable(str(error), [peer]) from error
            except ElasticError:
                self.disconnect([peer])
                raise
            self._endpoints[peer] = endpoint
            self._set(peer, MASKED)

    def disconnect(self, ranks: Collection[int]) -> None:
        for peer in ranks:
            self._check_slot(peer)
            if peer == self.rank:
                continue
            self._set(peer, ABSENT)
            self._endpoints.pop(peer, None)
            self._transport.disconnect(peer)
            self._transport.inbox.words[:, peer] = 0

    def masks(self) -> tuple[int, ...]:
        return tuple(self._masks)

    def take_over(self, live: Collection[int], base: int) -> int:
        """The words stay: those of the new view may be there already, and no older one is equal to a number from `base`
        on. Raises ValueError also where `clean` does."""
        self._check_base(base)
        if absent := [slot for slot in live if self._masks[slot] == ABSENT]:
            raise ValueError(f"ranks {absent} are not connected: connect them before they are unmasked")
        with self._lock:
            before = self._masks[:]
            for slot in range(self.capacity):
                if slot != self.rank and before[slot] != ABSENT:
                    self._masks[slot] = LIVE if slot in live else MASKED
            self._generation += self._masks != before
            generation = self._generation
        self._next_tag, self._flight = base, None
        return generation

    def begin_step(self) -> None:
        """Nothing to do: the calls of a step return when they have ended."""

    def end_step(self) -> None:
        """As `begin_step`."""

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor) -> Received:
        ids = self._checked(x, topk_idx)
        rows_in: Floats = x.detach().numpy()
        live = tuple(slot for slot, mask in enumerate(self._masks) if mask == LIVE)
        physical = self._routes(live)[ids]
        order = physical.argsort(kind="stable")
        experts = self.capacity * self.experts_per_rank
        per_expert = np.bincount(physical, minlength=experts + 1)[:experts].reshape(self.capacity, -1)
        if per_expert.size and per_expert.max() > self.max_tokens:
            raise ValueError("topk_idx names the same expert twice in one row")
        self._tag, self._next_tag = self._next_tag, self._next_tag + 1
        totals = per_expert.sum(1).tolist()
        token = order // topk_idx.shape[1]

        start = 0
        for slot in live:
            stop, box = start + totals[slot], self._transport.outbox(slot)
            box.counts[:] = per_expert[slot]
            if stop > start:
                # mode "clip" lets numpy write straight into the peer's memory; the indices are valid anyway
                rows_in.take(token[start:stop], axis=0, out=box.rows[: stop - start], mode="clip")
            if slot != self.rank:
                self._transport.post(slot, DISPATCH, self._tag, stop - start)
            start = stop

        # The places of our own entries in the combine records to come: worked out while the peers are still sending.
        homes = np.full(len(ids), -1, np.int64)
        homes[order[:start]] = np.repeat(np.asarray(live), [totals[slot] for slot in live])
        picks = np.full(len(ids), self._zero_row, np.int64)
        picks[order[:start]] = _ranges([(slot * self._layout.cells, totals[slot]) for slot in live])

        arrived = self._await(DISPATCH, live)
        places, spans = self._gather(arrived)
        self._flight = _Flight(live, homes, picks, places, spans)
        return self._received

    def combine(self, y: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        """`topk_idx` is the one of the last `dispatch`, whose routing is used."""
        flight, self._flight = self._flight, None
        if flight is None or topk_idx.numel() != len(flight.homes):
            raise RuntimeError("combine needs the dispatch of the same rows before it")
        results: Floats = y.detach().view(-1, self.hidden).numpy()
        for source, start, stop in flight.spans:
            if self._masks[source] != LIVE:
                continue
            if stop > start:
                box = self._transport.outbox(source)
                results.take(flight.places[start:stop], axis=0, out=box.returned[: stop - start], mode="clip")
            if source != self.rank:
                self._transport.post(source, COMBINE, self._tag, stop - start)

        arrived = self._await(COMBINE, flight.sent)
        for slot in flight.sent:
            if slot not in arrived:
                flight.picks[flight.homes == slot] = self._zero_row
        rows, k = topk_idx.shape
        parts = self._contributions[: rows * k]
        self._transport.inbox.combined.take(flight.picks, axis=0, out=parts, mode="clip")
        parts = parts.reshape(rows, k, self.hidden)
        parts *= topk_weights.detach().numpy().reshape(rows, k, 1)
        target: Floats = out.numpy()
        target[:] = parts[:, 0]
        for j in range(1, k):
            target += parts[:, j]

    def release(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            if 0 <= rank < self.capacity and rank != self.rank and self._masks[rank] == LIVE:
                self._set(rank, MASKED)
        self._transport.ring()

    def clean(self, base: int) -> None:
        """Raises ValueError when `base` is below a number that this rank has already used for a dispatch. Also forgets
        what peers announced on the board."""
        self._check_base(base)
        self._transport.settle(deadline_s=SETTLE_S)
        self._transport.inbox.words[:] = 0
        self._next_tag, self._flight = base, None

    def waiting_on(self) -> tuple[int, ...]:
        wait = self._waiting
        if wait is None:
            return ()
        # looked up again: a thread that is stuck in here does not see that what it waited for has come
        channel, tag, peers = wait
        words = self._transport.inbox.words
        return tuple(p for p in peers if self._masks[p] == LIVE and words[channel, p] != tag)

    def poll_faults(self) -> list[PeerFault]:
        self._note_lost()
        faults: list[PeerFault] = []
        while self._faults:
            faults.append(self._faults.popleft())
        return faults

    def close(self) -> None:
        self._transport.close()

    def _await(self, channel: int, expected: Sequence[int]) -> tuple[int, ...]:
        """Wait for this step's word of each expected peer; return those that arrived and are live, with ourselves."""
        tag, words, masks = self._tag, self._words, self._masks
        until = 0.0
        try:
            while True:
                ticket = self._transport.ticket()
                self._note_lost()
                waiting = [p for p in expected if p != self.rank and masks[p] == LIVE and words[channel, p] != tag]
                if not waiting:
                    break
                now = time.monotonic()
                until = until or now + self._timeout_s
                if now >= until:
                    self._fail(waiting, "timeout")
                    break
                self._waiting = (channel, tag, tuple(waiting))
                self._transport.wait(ticket, until - now)
        finally:
            self._waiting = None
        return tuple(p for p in expected if p == self.rank or (masks[p] == LIVE and words[channel, p] == tag))

    def _gather(self, arrived: Sequence[int]) -> tuple[Ints, tuple[tuple[int, int, int], ...]]:
        """Copy the records of `arrived` into `Received`; return the places of their rows, in the records' order."""
        inbox, layout = self._transport.inbox, self._layout
        counts = inbox.counts[list(arrived)].astype(np.int64)
        totals = counts.sum(1)
        self._counts[:] = counts.sum(0)
        lengths = counts.ravel()
        ends = lengths.cumsum()
        within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        starts = self._expert_starts + counts.cumsum(0) - counts
        places = np.repeat(starts.ravel(), lengths) + within
        sources = _ranges(
            [
                (slot * layout.record_rows + layout.header_rows, n)
                for slot, n in zip(arrived, totals.tolist(), strict=True)
            ]
        )
        gathered = self._gathered[: len(places)]
        inbox.dispatched.take(sources, axis=0, out=gathered, mode="clip")
        self._x[places] = gathered
        stops = totals.cumsum().tolist()
        spans = tuple((slot, stop - n, stop) for slot, stop, n in zip(arrived, stops, totals.tolist(), strict=True))
        return places, spans

    def _routes(self, live: tuple[int, ...]) -> Ints:
        """[experts + 1]: a physical expert to itself where its rank is live, else to the number past the last; so does
        the last entry, which index -1 reaches."""
        if self._routed_for != live:
            experts = self.capacity * self.experts_per_rank
            route = np.full(experts + 1, experts, np.int64)
            for slot in live:
                span = slice(slot * self.experts_per_rank, (slot + 1) * self.experts_per_rank)
                route[span] = np.arange(span.start, span.stop)
            self._route, self._routed_for = route, live
        return self._route

    def _checked(self, x: torch.Tensor, topk_idx: torch.Tensor) -> Ints:
        rows, hidden = x.shape
        if hidden != self.hidden or rows > self.max_tokens or x.dtype != torch.float32:
            raise ValueError(
                f"x is {list(x.shape)} {x.dtype}, expected at most {self.max_tokens} rows of {self.hidden} float32"
            )
        if topk_idx.shape[0] != rows or not 1 <= topk_idx.shape[1] <= self.top_k or topk_idx.dtype != torch.int64:
            raise ValueError(
                f"topk_idx is {list(topk_idx.shape)} {topk_idx.dtype}, expected [{rows}, 1 to {self.top_k}] int64"
            )
        ids: Ints = topk_idx.detach().numpy().reshape(-1)
        experts = self.capacity * self.experts_per_rank
        if ids.size and (ids.min() < -1 or ids.max() >= experts):
            raise ValueError(f"topk_idx is outside -1..{experts - 1}")
        return ids

    def _check_base(self, base: int) -> None:
        if base < self._next_tag:
            raise ValueError(f"base {base} is below {self._next_tag}, the next dispatch here: an old word could match")

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.capacity:
            raise ElasticError(f"slot {slot} is outside 0..{self.capacity - 1}")

    def _set(self, rank: int, mask: int) -> None:
        with self._lock:
            before, self._masks[rank] = self._masks[rank], mask
            if before != mask and LIVE in (before, mask):
                self._generation += 1

    def _note_lost(self) -> None:
        if gone := self._transport.lost():
            self._fail(gone, "disconnect")

    def _fail(self, peers: Collection[int], what: str) -> None:
        for peer in peers:
            if self._masks[peer] != ABSENT:
                self._faults.append(PeerFault(peer, what))
                self._set(peer, MASKED)
        # the agent's thread may have been first to learn of it, while the loop waits
        self._transport.ring()


def _ranges(spans: Sequence[tuple[int, int]]) -> Ints:
    """The numbers of all (start, length) spans, one after the other."""
    return np.concatenate([np.arange(start, start + length) for start, length in spans])
