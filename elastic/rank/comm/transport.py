"""The seam below the CPU backend: how bytes get into a peer's memory and how a sleeping rank learns of it.

Every rank has one *inbox* of a fixed layout. In it each sender has its own places, so that two senders never write to the
same byte: a *dispatch record* (row counts by expert, then the rows), a *combine record* (the rows coming back), and one
64-bit *word* per channel, written after the record it announces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from elastic.rank.comm.base import never

Floats = npt.NDArray[np.float32]

DISPATCH, COMBINE, BOARD_EVEN, BOARD_ODD = range(4)
CHANNELS = 4


@dataclass(frozen=True)
class Layout:
    """Sizes of a group and the byte offsets in an inbox that follow from them."""

    capacity: int
    experts_per_rank: int
    max_tokens: int
    hidden: int
    top_k: int

    @property
    def cells(self) -> int:
        """Rows that one rank can send to another in one step."""
        return self.max_tokens * self.top_k

    @property
    def header_rows(self) -> int:
        """Rows' worth of bytes ahead of the rows of a dispatch record, for the counts: keeps all rows on one grid."""
        return -(-self.experts_per_rank // self.hidden)

    @property
    def record_rows(self) -> int:
        return self.header_rows + self.cells

    @property
    def row_bytes(self) -> int:
        return self.hidden * 4

    @property
    def words_at(self) -> int:
        return 64

    @property
    def dispatch_at(self) -> int:
        return -(-(self.words_at + CHANNELS * self.capacity * 8) // 64) * 64

    @property
    def combine_at(self) -> int:
        return self.dispatch_at + self.capacity * self.record_rows * self.row_bytes

    @property
    def size(self) -> int:
        """Bytes of an inbox; the last row of the combine records is a row of zeros that nobody writes."""
        return self.combine_at + (self.capacity * self.cells + 1) * self.row_bytes


class Outbox(NamedTuple):
    """Where to build what a peer is to receive."""

    counts: npt.NDArray[np.int32]
    """[experts_per_rank]: rows of the dispatch record for each of the peer's experts."""
    rows: Floats
    """[cells, hidden]: those rows, sorted by expert."""
    returned: Floats
    """[cells, hidden]: the combine record."""


class Inbox:
    """Numpy views of one rank's memory. `buffer` is writable, `layout.size` bytes."""

    def __init__(self, layout: Layout, buffer: Any) -> None:
        c, e, h = layout.capacity, layout.experts_per_rank, layout.hidden
        record = layout.record_rows * layout.row_bytes
        self.layout = layout
        self.bell: npt.NDArray[np.uint32] = np.ndarray(1, np.uint32, buffer, 0)
        self.mark: npt.NDArray[np.uint8] = np.ndarray(16, np.uint8, buffer, 16)
        self.words: npt.NDArray[np.int64] = np.ndarray((CHANNELS, c), np.int64, buffer, layout.words_at)
        self.dispatched: Floats = np.ndarray((c * layout.record_rows, h), np.float32, buffer, layout.dispatch_at)
        self.counts: npt.NDArray[np.int32] = np.ndarray((c, e), np.int32, buffer, layout.dispatch_at, (record, 4))
        self.combined: Floats = np.ndarray((c * layout.cells + 1, h), np.float32, buffer, layout.combine_at)

    def places_of(self, sender: int) -> Outbox:
        """The part that `sender` writes."""
        layout = self.layout
        start = sender * layout.record_rows
        return Outbox(
            counts=self.counts[sender],
            rows=self.dispatched[start + layout.header_rows : start + layout.record_rows],
            returned=self.combined[sender * layout.cells : (sender + 1) * layout.cells],
        )


class Transport(Protocol):
    """One rank's inbox and its connections.

    `post`, `wait` and `lost` are called by the round loop's thread; `connect` by another one meanwhile, for peers that the
    loop does not touch; `ring` by any thread. A transport drops silently what it cannot deliver: that the peer is gone is
    said by `lost`, or seen by the caller's timeout.
    """

    rank: int
    layout: Layout
    inbox: Inbox

    def endpoint(self) -> bytes: ...

    def connect(self, peer: int, endpoint: bytes, *, deadline_s: float, give_up: Callable[[], bool] = never) -> None:
        """Raises Retryable when the peer cannot be reached in time, or before `give_up`, asked while it waits, says so;
        ElasticError when it is of another group's shape."""
        ...

    def disconnect(self, peer: int) -> None: ...

    def outbox(self, peer: int) -> Outbox:
        """KeyError for a peer that is not connected. Valid until it is disconnected."""
        ...

    def post(self, peer: int, channel: int, word: int, rows: int = 0) -> None:
        """Deliver the first `rows` rows of the channel's record (with the counts, for DISPATCH), then the word, then ring
        the peer's bell. The outbox may be written again when the peer has answered."""
        ...

    def settle(self, *, deadline_s: float) -> None:
        """Between steps: finish or give up every delivery that is still under way."""
        ...

    def ticket(self) -> int: ...

    def wait(self, ticket: int, timeout_s: float) -> None:
        """Sleep until something arrived or the bell was rung since `ticket`. May return early."""
        ...

    def ring(self) -> None: ...

    def lost(self) -> tuple[int, ...]:
        """Peers that the transport has found gone since the last call."""
        ...

    def close(self) -> None: ...
