"""Local memory for reads from peers, used again only when no transfer can write to it any more.

The bytes of a read that timed out land when the peer goes on, even minutes later. They may land here, never in a weight
that is in use. A buffer behind a peer that stopped is free again once that peer goes on or is dead; if the peer is removed
first, NIXL says nothing more about the transfer and the buffer is set aside for the life of the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elastic.rank.nixl_agent import NixlAgent, Transfer


class Stage:
    """One buffer: numbers for weights, where weights live, and the source's words from before and after, on the host."""

    def __init__(self, agent: NixlAgent, like: torch.Tensor, numbers: int, words: int) -> None:
        self.numbers = torch.empty(numbers, dtype=like.dtype, device=like.device)
        self.before = torch.empty(words, dtype=torch.int64)
        self.after = torch.empty(words, dtype=torch.int64)
        for tensor in (self.numbers, self.before, self.after):
            agent.register(tensor)
        self._transfers: list[Transfer] = []

    def watch(self, transfer: Transfer) -> None:
        self._transfers = [t for t in self._transfers if not t.settled] + [transfer]

    @property
    def settled(self) -> bool:
        return all(transfer.settled for transfer in self._transfers)


class Staging:
    """As many stages as were ever needed at once. Used by one thread."""

    def __init__(self, agent: NixlAgent, *, like: torch.Tensor, numbers: int, words: int) -> None:
        """`like`: a tensor of the type and on the device of the weights."""
        self._agent, self._like, self._numbers, self._words = agent, like, numbers, words
        self._idle: list[Stage] = []

    @contextmanager
    def lend(self) -> Iterator[Stage]:
        """A stage that nothing else writes to until the end of the block."""
        stage = next((stage for stage in self._idle if stage.settled), None)
        if stage is None:
            stage = Stage(self._agent, self._like, self._numbers, self._words)
        else:
            self._idle.remove(stage)
        try:
            yield stage
        finally:
            self._idle.append(stage)
