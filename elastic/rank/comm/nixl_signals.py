"""The words that NIXL EP's kernels wait on: where they lie, and the proof that they lie there.

They are at the start of the local RDMA buffer: two signal regions (used in turn), each of `capacity * experts_per_rank`
64-bit words, rounded up to 128 bytes. For peer d, dispatch waits on word `e * capacity + d` for each local expert e (value
n + 1: n tokens came), combine on word `d * experts_per_rank + j` for each of d's experts (not 0: come). That is NIXL's own
affair (seen in 1.4.1 and 1.5.1), so it is tried on this process's own words before anybody relies on it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

REGION_ALIGN_BYTES = 128
WORD_BYTES = 8


class Signals:
    """Pure index arithmetic."""

    def __init__(self, capacity: int, experts_per_rank: int) -> None:
        self.capacity, self.experts = capacity, experts_per_rank
        size = capacity * experts_per_rank * WORD_BYTES
        self.region = -(-size // REGION_ALIGN_BYTES) * REGION_ALIGN_BYTES // WORD_BYTES
        """Words from one region to the next."""
        self.words = 2 * self.region

    def dispatch_words(self, peer: int) -> range:
        """In a region: one word for each local expert."""
        return range(peer, self.capacity * self.experts, self.capacity)

    def combine_words(self, peer: int) -> range:
        """In a region: one word for each of the peer's experts, neighbours."""
        return range(peer * self.experts, (peer + 1) * self.experts)


class Trial(NamedTuple):
    """Rows sent by a rank to its own experts with every peer masked, and the words that must follow."""

    rows: torch.Tensor
    """[rows, k] int64 physical experts, -1 for none."""
    counts: tuple[int, ...]
    """Rows of each own expert; different where there are rows enough, so that a word in a wrong place shows."""


def trial(signals: Signals, rank: int, max_tokens: int) -> Trial:
    rows, k = min(max_tokens, 8), min(2, signals.experts)
    chosen = torch.full((rows, k), -1, dtype=torch.int64)
    counts = [0] * signals.experts
    for row in range(rows):
        for j in range(k):
            if row < rows - j * 3:
                chosen[row, j] = rank * signals.experts + j
                counts[j] += 1
    return Trial(chosen, tuple(counts))


def found_where_expected(
    signals: Signals,
    rank: int,
    wanted: Trial,
    words: Callable[[], list[int]],
    dispatch: Callable[[], None],
    combine: Callable[[], None],
) -> tuple[bool, bool]:
    """Run the trial on zeroed words; returns whether dispatch's and combine's words are in their places, in one of the
    regions. `words` reads both regions when the device has ended its work."""
    dispatch()
    found = words()
    dispatched = any(
        [found[base + word] for word in signals.dispatch_words(rank)] == [n + 1 for n in wanted.counts]
        for base in (0, signals.region)
    )
    combine()
    found = words()
    combined = any(all(found[base + word] != 0 for word in signals.combine_words(rank)) for base in (0, signals.region))
    return dispatched, combined
