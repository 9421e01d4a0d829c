"""Transport over NIXL: one-sided writes into the peer's inbox, each announced by a notification; also between hosts.

Records are built in registered memory of the sender, at the offsets they have in an inbox, and written from there. NIXL
delivers a notification after the bytes it came with, so the receiver, which stores the word itself when it takes the
notification, never sees a word before its record. Writes of one sender to one peer arrive in order.

NIXL has no way to sleep until something arrives, so a waiting rank polls (1 us each), less often the longer it has been
quiet. A thread polls for a rank that is not waiting: over TCP a peer's write, and a connection, need both sides' hands.
"""

import os
import secrets
import struct
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from elastic.errors import ElasticError, Retryable
from elastic.rank.comm.base import never
from elastic.rank.comm.futex import Bell
from elastic.rank.comm.transport import COMBINE, DISPATCH, Inbox, Layout, Outbox
from elastic.rank.nixl_agent import Copy, NixlAgent, PeerError, Transfer

POLL_MIN_S, POLL_MAX_S = 0.00005, 0.002
BACKGROUND_POLL_S = 0.005
PROBE_S = 0.1
"""A waiting rank sends an empty notification to every peer this often: only traffic finds a killed peer."""

_note = struct.Struct("<Bqi")
"""Channel, word, rows."""


class _Endpoint(msgspec.Struct, frozen=True):
    metadata: bytes
    address: int
    """Of the inbox in its owner's memory."""
    layout: Layout


class _Peer:
    def __init__(self, name: str, address: int) -> None:
        self.name, self.address = name, address
        self.lost = False


class NixlTransport:
    """See `Transport`. A killed peer is reported by `lost` within about 0.2 s, also while nothing is sent to it by the
    caller; a stopped one is not."""

    def __init__(self, rank: int, layout: Layout, group: str) -> None:
        self.rank, self.layout = rank, layout
        memory, staging = (torch.zeros(layout.size, dtype=torch.uint8) for _ in range(2))
        self.inbox, self._staging = Inbox(layout, memory.numpy()), Inbox(layout, staging.numpy())
        self._staging_address = staging.data_ptr()
        # The random part makes the name, and so every message under it, that of this incarnation alone.
        self._agent = NixlAgent(f"{group}-ep-{rank}-{os.getpid()}-{secrets.token_hex(4)}", poll_s=None)
        self._agent.register(memory)
        self._agent.register(staging)
        self._endpoint = msgspec.msgpack.encode(_Endpoint(self._agent.metadata(), memory.data_ptr(), layout))
        self._bell = Bell(np.zeros(1, np.uint32))
        self._lock = threading.Lock()
        self._peers: dict[int, _Peer] = {}
        self._slots: dict[str, int] = {}
        self._under_way: list[tuple[int, Transfer]] = []
        self._newly_lost: list[int] = []
        self._polled = self._heard = self._probed = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"ep nixl {rank}", daemon=True)
        self._thread.start()

    def endpoint(self) -> bytes:
        return self._endpoint

    def connect(self, peer: int, endpoint: bytes, *, deadline_s: float, give_up: Callable[[], bool] = never) -> None:
        try:
            at = msgspec.msgpack.decode(endpoint, type=_Endpoint)
        except msgspec.MsgspecError as error:
            raise ElasticError(f"rank {peer}: its endpoint is none of the nixl EP backend: {error}") from error
        if at.layout != self.layout:
            raise ElasticError(f"rank {peer}: its EP buffers are laid out as {at.layout}, ours as {self.layout}")
        self.disconnect(peer)
        name = ""
        try:
            name = self._agent.add_peer(at.metadata)
            # A real write, of the counts of an empty record to our own place: the connection is up when it has arrived.
            start = self._record(DISPATCH, self.rank)
            empty = Copy(
                self._staging_address + self._record(DISPATCH, peer), at.address + start, self.layout.row_bytes
            )
            self._staging.counts[peer] = 0
            self._agent.write(name, [empty], deadline_s=deadline_s, give_up=give_up)
        except ElasticError as error:
            # A dead process of this host is refused by UCX at once, one of another host does not answer.
            self._agent.remove_peer(name)
            raise Retryable(f"rank {peer}: cannot connect to its EP memory: {error}") from error
        with self._lock:
            self._peers[peer], self._slots[name] = _Peer(name, at.address), peer

    def disconnect(self, peer: int) -> None:
        with self._lock:
            gone = self._peers.pop(peer, None)
            if gone is not None:
                self._slots.pop(gone.name, None)
                self._under_way = [(to, t) for to, t in self._under_way if to != peer]
                self._newly_lost = [p for p in self._newly_lost if p != peer]
        if gone is not None:
            self._agent.remove_peer(gone.name)

    def outbox(self, peer: int) -> Outbox:
        if peer == self.rank:
            return self.inbox.places_of(peer)
        return self._staging.places_of(peer)

    def post(self, peer: int, channel: int, word: int, rows: int = 0) -> None:
        to = self._peers.get(peer)
        if to is None or to.lost:
            return
        note = _note.pack(channel, word, rows)
        try:
            if rows == 0:
                self._agent.notify(to.name, note)
                return
            size = (rows + (self.layout.header_rows if channel == DISPATCH else 0)) * self.layout.row_bytes
            here, there = self._record(channel, peer), self._record(channel, self.rank)
            copy = Copy(self._staging_address + here, to.address + there, size)
            transfer = self._agent.start("WRITE", to.name, [copy], note)
        except PeerError:
            with self._lock:
                self._lose(peer)
            return
        if not transfer.done:
            with self._lock:
                self._under_way.append((peer, transfer))

    def settle(self, *, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        while self._under_way and time.monotonic() < until:
            self._progress()
            time.sleep(POLL_MIN_S)
        with self._lock:
            self._under_way.clear()

    def ticket(self) -> int:
        return self._bell.ticket()

    def wait(self, ticket: int, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not self._progress() and self._bell.ticket() == ticket:
            now = time.monotonic()
            if now >= until:
                return
            if now - max(self._heard, self._probed) > PROBE_S:
                self._probe(now)
            pause = min(POLL_MAX_S, max(POLL_MIN_S, (now - self._heard) / 16))
            self._bell.wait(ticket, min(pause, until - now))

    def ring(self) -> None:
        self._bell.ring()

    def lost(self) -> tuple[int, ...]:
        if not self._newly_lost:
            return ()
        with self._lock:
            found, self._newly_lost = tuple(self._newly_lost), []
        return found

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5)
        self._agent.close()

    def _record(self, channel: int, sender: int) -> int:
        """Offset of a sender's record in an inbox."""
        layout = self.layout
        if channel == COMBINE:
            return layout.combine_at + sender * layout.cells * layout.row_bytes
        return layout.dispatch_at + sender * layout.record_rows * layout.row_bytes

    def _progress(self) -> bool:
        """Take what has arrived; whether there was anything."""
        with self._lock:
            self._polled = time.monotonic()
            heard = False
            for name, note in self._agent.notifications():
                slot = self._slots.get(name)
                if slot is None or len(note) != _note.size:
                    continue
                channel, word, rows = _note.unpack(note)
                if channel == DISPATCH and rows == 0:
                    self.inbox.counts[slot] = 0
                self.inbox.words[channel, slot] = word
                heard, self._heard = True, self._polled
            if self._under_way:
                for peer, transfer in self._under_way:
                    if transfer.error is not None:
                        self._lose(peer)
                self._under_way = [(p, t) for p, t in self._under_way if not t.done and t.error is None]
            return heard

    def _probe(self, now: float) -> None:
        self._probed = now
        for slot, peer in list(self._peers.items()):
            if peer.lost:
                continue
            try:
                self._agent.notify(peer.name, b"")
            except PeerError:
                with self._lock:
                    self._lose(slot)

    def _lose(self, peer: int) -> None:
        """With the lock held. Ends a wait, so that its caller asks for `lost`."""
        known = self._peers.get(peer)
        if known is not None and not known.lost:
            known.lost = True
            self._newly_lost.append(peer)
            self._bell.ring()

    def _serve(self) -> None:
        """The polling thread."""
        while not self._closed.wait(BACKGROUND_POLL_S):
            if time.monotonic() - self._polled > BACKGROUND_POLL_S / 2 and self._progress():
                self._bell.ring()
