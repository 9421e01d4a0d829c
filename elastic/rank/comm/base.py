"""The interface between the round loop and expert-parallel communication, with the semantics of NIXL EP's Buffer.

Failure semantics first. A peer that does not answer within the timeout is masked and the call returns *without its
tokens*: the step's result is wrong and nothing raises. The owner of the loop therefore compares `mask_generation` before
and after each step and discards the step when it changed. `release` does the same at once for peers known to be lost.
Masks may be asymmetric: only the controller makes them agree again, at a commit.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol

import torch

LIVE, MASKED, ABSENT = 0, 1, -1


def never() -> bool:
    """The `give_up` of who waits as long as the deadline says."""
    return False


class PeerFault(NamedTuple):
    """A failure seen by the communication layer; reported to the controller as evidence, never acted on here."""

    peer: int
    what: str
    """"timeout" (silent beyond the timeout) or "disconnect" (the transport reported the peer gone)."""


class Received(NamedTuple):
    """What `dispatch` delivered to this rank's experts."""

    x: torch.Tensor
    """[experts_per_rank, capacity * max_tokens, hidden]; address fixed for the process (CPU) or the graph (GPU); rows `[e, :counts[e]]` are valid."""
    counts: torch.Tensor
    """[experts_per_rank] int32; address likewise."""


class EpBackend(Protocol):
    """All methods but `release` and `waiting_on` are called by one thread at a time.

    `dispatch` and `combine` are called by the round loop only; `connect` may be called by another thread meanwhile
    (new peers start masked, so the loop does not touch them).
    """

    rank: int
    capacity: int
    experts_per_rank: int
    max_tokens: int
    hidden: int

    @property
    def mask_generation(self) -> int:
        """Grows whenever any mask changes, for whatever reason."""
        ...

    def endpoint(self) -> bytes:
        """What a peer needs for `connect`; opaque, valid for the life of this process."""
        ...

    def connect(self, peers: Mapping[int, bytes], *, deadline_s: float, give_up: Callable[[], bool] = never) -> None:
        """Connect to ranks, all masked. Raises Unreachable naming the peer when the deadline passes or `give_up`, asked
        while it waits, says so. Idempotent for a peer with the same endpoint; a changed endpoint (a new incarnation)
        replaces the old one."""
        ...

    def disconnect(self, ranks: Collection[int]) -> None:
        """Forget ranks, dead or alive, and free what was held for them. Like `connect` it may run while the loop steps, for
        ranks that are masked. Both raise ExchangeLost where the back end is in no known state afterwards."""
        ...

    def masks(self) -> tuple[int, ...]:
        """LIVE, MASKED or ABSENT for each slot; own rank LIVE."""
        ...

    def take_over(self, live: Collection[int], base: int) -> int:
        """From the next step on exactly `live` take part, and the next dispatch has the number `base`, as on all of them.

        Called between two steps: behind one that was discarded, after `clean`, between the same barriers; behind one that
        counted by itself and without a barrier, by each rank when it comes to the round, since a peer that is there already
        sends to a place that nothing here zeroes any more, and waits. (A rank that ran no step with the others must not begin
        before one of them has come to the round.) `base` as for `clean`. Returns the mask generation that a step
        of the new view must still find. Raises ValueError for a rank that is not connected."""
        ...

    def begin_step(self) -> None:
        """The loop is about to run a step."""
        ...

    def end_step(self) -> None:
        """The loop has run a step; returns when it has ended on the device, with `mask_generation` telling whether it
        counts. Raises RuntimeError for a device error, which no step survives: the rank must end."""
        ...

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor) -> Received:
        """Send each row of x [rows, hidden] to the ranks of its experts and wait for the peers' rows.

        topk_idx [rows, k] int64 holds physical expert slots (`slot * experts_per_rank + index`), -1 for none;
        rows <= max_tokens. Rows for masked or absent ranks are dropped.
        """
        ...

    def combine(self, y: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        """Return the experts' rows and sum: out[i] = sum over k, in the order of k, of weights[i, k] * expert row.

        y has the shape of `Received.x`, rows in the same places; out [rows, hidden] is written in place. The fixed order
        of the sum makes the result independent of where the experts live.
        """
        ...

    def release(self, ranks: Collection[int]) -> None:
        """Mask ranks and end every wait for them, at once. Callable from any thread, at any time, repeatedly."""
        ...

    def clean(self, base: int) -> None:
        """Zero the signal words and number the next dispatch from `base`, the same value on all ranks. Only between
        steps, with every live rank stopped, between two barriers; `base` grows with each call."""
        ...

    def waiting_on(self) -> tuple[int, ...]:
        """The peers that the current call is waiting for; empty outside. Any thread; a hint for diagnosis."""
        ...

    def poll_faults(self) -> list[PeerFault]:
        """Faults seen since the last call. Any thread."""
        ...

    def close(self) -> None: ...


class RoundBoard(Protocol):
    """Who has begun which round, and with work: lets idle ranks sleep and agree on sleeping without a collective.

    Every live rank takes part in every round. A rank calls `announce` before its first dispatch of a round, so when a
    round is complete, every live rank's word for it is readable: all ranks draw the same conclusion from `any_work`.
    Ranks are never more than one round apart, so words are kept by the parity of the round.
    """

    def announce(self, round_: int, has_work: bool, peers: Collection[int]) -> None:
        """Publish to `peers` and wake those that sleep in `wait`."""
        ...

    def any_work(self, round_: int, peers: Collection[int]) -> bool:
        """Whether any of `peers` announced `round_` with work. Only after the round completed."""
        ...

    def begun(self, round_: int, peers: Collection[int]) -> bool:
        """Whether any of `peers` has announced `round_`."""
        ...

    def ticket(self) -> int:
        """Take before checking conditions; pass to `wait`."""
        ...

    def wait(self, ticket: int, timeout_s: float) -> None:
        """Sleep until somebody announced to us or rang since `ticket`, or the timeout. Releases the GIL."""
        ...

    def ring(self) -> None:
        """Wake our own `wait`, from any thread."""
        ...
