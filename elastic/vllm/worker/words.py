"""The words that NIXL EP's kernels wait on, in the buffer of this process: found by trial, written to end a wait.

Where they lie is NIXL's own affair; `elastic.rank.comm.nixl_signals` has the layout (seen in 1.4.1 and 1.5.1) and the trial.
"""

from collections.abc import Collection
from typing import Any

import torch

from elastic.rank.comm.nixl_signals import Signals, found_where_expected, trial


class Words:
    def __init__(self, buffer: Any, capacity: int, experts: int) -> None:
        """`experts`: of one rank; `capacity`: ranks that the buffer has room for."""
        self._buffer, self._layout = buffer, Signals(capacity, experts)
        self._signals: torch.Tensor = buffer.get_local_buffer_tensor(torch.int64, use_rdma_buffer=True)
        self._ones = torch.ones(experts, dtype=torch.int64, pin_memory=torch.cuda.is_available())

    def write(self, peers: Collection[int]) -> None:
        """Once, on the current stream: "none came" for dispatch, "has come" for combine, in both regions."""
        one = self._ones[:1]
        for base in (0, self._layout.region):
            for peer in peers:
                words = self._layout.combine_words(peer)
                self._signals[base + words.start : base + words.stop].copy_(self._ones, non_blocking=True)
                for word in self._layout.dispatch_words(peer):
                    self._signals[base + word : base + word + 1].copy_(one, non_blocking=True)

    def found(self, rank: int, max_tokens: int, hidden: int) -> bool:
        """Before any peer is connected, so with all of them masked: send rows to own experts and look for their counts."""
        import nixl_ep

        layout, device = self._layout, self._signals.device
        wanted = trial(layout, rank, max_tokens)
        chosen = wanted.rows.to(device=device, dtype=nixl_ep.topk_idx_t)
        x = torch.zeros(len(chosen), hidden, dtype=torch.bfloat16, device=device)
        weights = torch.zeros(chosen.shape, dtype=torch.float32, device=device)
        experts, handles = layout.capacity * layout.experts, list[Any]()

        def words() -> list[int]:
            torch.accelerator.synchronize()
            found: list[int] = self._signals[: layout.words].tolist()
            return found

        def dispatch() -> None:
            self._signals[: layout.words].zero_()
            handles.append(self._buffer.dispatch(x, chosen, max_tokens, experts, use_fp8=False)[2])

        def combine() -> None:
            room = torch.zeros(
                layout.experts, layout.capacity * max_tokens, hidden, dtype=torch.bfloat16, device=device
            )
            self._buffer.combine(room, chosen, weights, handles[-1], out=torch.zeros_like(x))

        dispatched, combined = found_where_expected(layout, rank, wanted, words, dispatch, combine)
        self._signals[: layout.words].zero_()
        torch.accelerator.synchronize()
        return dispatched and combined
