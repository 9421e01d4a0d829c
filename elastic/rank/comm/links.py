"""Links that fail on purpose, for chaos tests: a transport and a NIXL agent between which and their library faults can be put.

Only a rank whose group allows fault injection has them. The rules change while the rank serves; see `elastic.rank.faults`.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic.rank.comm.base import never
from elastic.rank.comm.transport import COMBINE, DISPATCH, Outbox, Transport
from elastic.rank.nixl_agent import NixlAgent, PeerError, Transfer, _State


@dataclass
class Links:
    """The rules of one process. Written by the faults' thread, read by the loop's and the worker's; each is one assignment."""

    lost: frozenset[int] = frozenset()
    """Peers that nothing from here reaches any more, in any channel."""
    delay_s: dict[int, float] = field(default_factory=dict)
    """By peer: everything from here is sent so much later, and holds this rank up meanwhile, as a full send queue does."""
    late_s: dict[int, float] = field(default_factory=dict)
    """By peer: a completion, the word behind the rows, comes so much later; this rank goes on."""
    dropped: dict[int, int] = field(default_factory=dict)
    """By peer: so many completions of the exchange are still to be swallowed."""
    slow_s: float = 0.0
    """This rank takes so much longer before each dispatch of a layer."""
    transfer_late_s: float = 0.0
    """Completions of weight transfers are seen so much later."""
    transfer_dropped: bool = False
    """... are never seen."""
    transfer_killed: int = 0
    """So many transfers still fail as if their peer had gone."""

    def restore(self) -> None:
        self.lost, self.delay_s, self.late_s, self.dropped = frozenset(), {}, {}, {}
        self.slow_s, self.transfer_late_s, self.transfer_dropped, self.transfer_killed = 0.0, 0.0, False, 0


class FaultyTransport:
    """See `Transport`: what `inner` does, under the rules of `links`."""

    def __init__(self, inner: Transport, links: Links) -> None:
        self.rank, self.layout, self.inbox = inner.rank, inner.layout, inner.inbox
        self._inner, self._links = inner, links
        self._slowed = -1

    def endpoint(self) -> bytes:
        return self._inner.endpoint()

    def connect(self, peer: int, endpoint: bytes, *, deadline_s: float, give_up: Callable[[], bool] = never) -> None:
        self._inner.connect(peer, endpoint, deadline_s=deadline_s, give_up=give_up)

    def disconnect(self, peer: int) -> None:
        self._inner.disconnect(peer)

    def outbox(self, peer: int) -> Outbox:
        return self._inner.outbox(peer)

    def post(self, peer: int, channel: int, word: int, rows: int = 0) -> None:
        links = self._links
        if links.slow_s and channel == DISPATCH and word != self._slowed:
            self._slowed = word
            time.sleep(links.slow_s)
        if peer in links.lost:
            return
        if delay_s := links.delay_s.get(peer, 0.0):
            time.sleep(delay_s)
        if channel in (DISPATCH, COMBINE):
            if links.dropped.get(peer, 0) > 0:
                links.dropped[peer] -= 1
                return
            if late_s := links.late_s.get(peer, 0.0):
                later = threading.Timer(late_s, self._inner.post, (peer, channel, word, rows))
                later.daemon = True
                later.start()
                return
        self._inner.post(peer, channel, word, rows)

    def settle(self, *, deadline_s: float) -> None:
        self._inner.settle(deadline_s=deadline_s)

    def ticket(self) -> int:
        return self._inner.ticket()

    def wait(self, ticket: int, timeout_s: float) -> None:
        self._inner.wait(ticket, timeout_s)

    def ring(self) -> None:
        self._inner.ring()

    def lost(self) -> tuple[int, ...]:
        return self._inner.lost()

    def close(self) -> None:
        self._inner.close()


class FaultyNixlAgent(NixlAgent):
    """A NIXL agent whose transfers obey `links`: their bytes move, what is told of them changes."""

    def __init__(self, name: str, links: Links) -> None:
        self._links = links
        self._held: dict[Transfer, float] = {}
        """Transfers that are done, and when that may be known."""
        super().__init__(name)

    def _advance(self, transfer: Transfer, step: Callable[[], str]) -> None:
        if transfer in self._held:
            if time.monotonic() >= self._held[transfer]:
                del self._held[transfer]
                transfer._state = _State.DONE
            return
        super()._advance(transfer, step)
        links = self._links
        if links.transfer_killed > 0:
            links.transfer_killed -= 1
            transfer._state = _State.FAILED if transfer.settled else _State.LOST_SIGHT
            transfer.error = PeerError(transfer.peer, "disconnect", transfer.doing)
        elif transfer.done and (links.transfer_dropped or links.transfer_late_s):
            self._held[transfer] = math.inf if links.transfer_dropped else time.monotonic() + links.transfer_late_s
            transfer._state = _State.RUNNING
