"""Transport between processes of one host: inboxes in shared memory, mapped by the peers.

An inbox is a memfd: it has no name in any file system, so nothing can be left behind by a process that is killed. A peer
opens it through /proc/<pid>/fd/<number> of its owner, which works for processes of the same user in one pid namespace.
A record becomes visible before its word because x86 keeps the order of stores; other machines are refused.
"""

import mmap
import os
import platform
import secrets
import threading
from collections.abc import Callable

import msgspec
import numpy as np

from elastic.errors import ElasticError, Retryable
from elastic.rank.comm.base import never
from elastic.rank.comm.futex import Bell
from elastic.rank.comm.transport import Inbox, Layout, Outbox


class _Endpoint(msgspec.Struct, frozen=True):
    pid: int
    fd: int
    mark: bytes
    """Random, also in the inbox: a process that got the pid of a dead one is not taken for it."""
    shape: tuple[int, int, int, int, int]


class _Peer:
    def __init__(self, inbox: Inbox, rank: int) -> None:
        self.outbox = inbox.places_of(rank)
        self.words = inbox.words[:, rank]
        self.bell = Bell(inbox.bell)


class ShmTransport:
    """See `Transport`. Never reports a peer as lost: its death is seen by the caller's timeout, or told by `release`."""

    def __init__(self, rank: int, layout: Layout, group: str) -> None:
        if platform.machine() != "x86_64":
            raise ElasticError(
                f"the shm EP backend relies on the store order of x86_64 and cannot run on {platform.machine()}; "
                "set ep_backend to nixl"
            )
        self.rank, self.layout = rank, layout
        self._fd = os.memfd_create(f"{group}-ep-{rank}", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, layout.size)
        self.inbox = Inbox(layout, mmap.mmap(self._fd, layout.size))
        mark = secrets.token_bytes(16)
        self.inbox.mark[:] = np.frombuffer(mark, np.uint8)
        self._endpoint = msgspec.msgpack.encode(_Endpoint(os.getpid(), self._fd, mark, _shape(layout)))
        self._bell = Bell(self.inbox.bell)
        self._lock = threading.Lock()
        self._peers: dict[int, _Peer] = {rank: _Peer(self.inbox, rank)}

    def endpoint(self) -> bytes:
        return self._endpoint

    def connect(self, peer: int, endpoint: bytes, *, deadline_s: float, give_up: Callable[[], bool] = never) -> None:
        """Never waits."""
        try:
            at = msgspec.msgpack.decode(endpoint, type=_Endpoint)
        except msgspec.MsgspecError as error:
            raise ElasticError(f"rank {peer}: its endpoint is none of the shm EP backend: {error}") from error
        if at.shape != _shape(self.layout):
            raise ElasticError(f"rank {peer}: its EP buffers are shaped {at.shape}, ours {_shape(self.layout)}")
        try:
            fd = os.open(f"/proc/{at.pid}/fd/{at.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Retryable(f"rank {peer}: cannot open the EP memory of process {at.pid}: {error}") from error
        try:
            if os.fstat(fd).st_size != self.layout.size:
                raise Retryable(f"rank {peer}: process {at.pid} is not the one that announced this EP memory")
            inbox = Inbox(self.layout, mmap.mmap(fd, self.layout.size))
        finally:
            os.close(fd)
        if inbox.mark.tobytes() != at.mark:
            raise Retryable(f"rank {peer}: process {at.pid} is not the one that announced this EP memory")
        with self._lock:
            self._peers[peer] = _Peer(inbox, self.rank)

    def disconnect(self, peer: int) -> None:
        with self._lock:
            self._peers.pop(peer, None)

    def outbox(self, peer: int) -> Outbox:
        return self._peers[peer].outbox

    def post(self, peer: int, channel: int, word: int, rows: int = 0) -> None:
        # The rows were written in place; this store comes after them in program order and so in the peer's eyes.
        if (to := self._peers.get(peer)) is not None:
            to.words[channel] = word
            to.bell.ring()

    def settle(self, *, deadline_s: float) -> None:
        """Nothing is ever under way: a post is done when it returns."""

    def ticket(self) -> int:
        return self._bell.ticket()

    def wait(self, ticket: int, timeout_s: float) -> None:
        self._bell.wait(ticket, timeout_s)

    def ring(self) -> None:
        self._bell.ring()

    def lost(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        with self._lock:
            self._peers = {}
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def _shape(layout: Layout) -> tuple[int, int, int, int, int]:
    return layout.capacity, layout.experts_per_rank, layout.max_tokens, layout.hidden, layout.top_k
