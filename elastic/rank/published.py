"""What a rank says about its own buffers, in memory that peers can read: how a reader knows what it copied."""

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch

from elastic.placement.maps import HOLE, Move
from elastic.rank.architecture import ExpertBuffers

WORD_BYTES = 8
_DENSE = 0


class Published:
    """int64 words: [dense, then one for each expert buffer, layer by layer].

    The dense word is 1 once the dense weights are whole. A buffer's word is `version << 32 | expert + 1`, `expert + 1` being
    0 for a hole; the version grows with every change. Aligned words are always seen whole. Changed by one thread.
    """

    def __init__(self, experts: ExpertBuffers) -> None:
        self._contents = experts.contents
        self._width = len(experts.contents[0]) if experts.contents else 0
        self.table = torch.zeros(1 + len(experts.contents) * self._width, dtype=torch.int64)
        self._words = self.table.numpy()

    def clear(self, buffers: Collection[tuple[int, int]]) -> None:
        """Before the first byte of a buffer (layer, index) is changed."""
        self._set(dict.fromkeys(buffers, HOLE))

    def fill(self, moves: Iterable[Move]) -> None:
        """After the last byte of their buffers is written."""
        self._set({(move.layer, move.index): move.expert for move in moves})

    @property
    def dense(self) -> bool:
        return bool(self._words[_DENSE])

    def fill_dense(self) -> None:
        """After the last dense weight is written; they never change again."""
        self._words[_DENSE] = 1

    def _set(self, experts: Mapping[tuple[int, int], int]) -> None:
        if not experts:
            return
        at = np.array([word_index(self._width, layer, index) for layer, index in experts])
        version = (self._words[at] >> 32) + 1
        self._words[at] = (version << 32) | (np.array(list(experts.values()), np.int64) + 1)
        for (layer, index), expert in experts.items():
            self._contents[layer][index] = expert


def word_index(width: int, layer: int, index: int) -> int:
    """Place of a buffer's word in the table of a rank with `width` buffers a layer."""
    return 1 + layer * width + index


def expert_of(word: int) -> int:
    """The expert that a buffer's word names, or HOLE."""
    return (word & 0xFFFFFFFF) - 1
