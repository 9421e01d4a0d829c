"""A typed, bounded wrapper on the NIXL agent with the UCX back end: one-sided reads and writes between processes and hosts.

Failure semantics first, as seen with NIXL 1.5.1:

* A killed peer: work in flight, and the first work after the death, raises `PeerError("disconnect")` within 0.2 s.
* A stopped peer: nothing at all is reported, so every wait here has a deadline and ends in `PeerError("timeout")`.
* A read that timed out is *not over*: over TCP its bytes still land in local memory when the peer goes on, even after the
  peer was removed, and bytes of a timed-out write still land in the peer's. NIXL cannot cancel it. Local memory of such a
  transfer must not be used for anything else until `Transfer.settled`; the agent keeps it alive itself until `close`.
* A transfer that failed may have written any part of its bytes.

NIXL's own progress thread spins a whole core for each agent, so it stays off and a thread here polls instead. A rank polls
in order to *serve* its memory: over TCP, and while a connection is made, one-sided transfers still need the owner's hand.

NIXL and UCX print to stdout and stderr at every failed transfer. What can be quieted is: set UCX_LOG_LEVEL or
NIXL_LOG_LEVEL in the environment to hear them again.
"""

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from elastic.errors import ElasticError, Retryable
from elastic.rank.comm.base import never

PeerFailure = Literal["disconnect", "timeout"]

_NUDGE = b"\0nudge"
"""Asks the receiver to poll eagerly for a while; never shown to the user of `notifications`."""
_PING = b"\0ping"
"""Asks for nothing; never shown either."""
_NUDGE_EVERY_S = 0.05
_EAGER_FOR_S = 0.1
_EAGER_POLL_S = 0.0005
_CHECK_S = 0.0001
LONG_POLL_S = 0.001
"""With work inside, such as to take down the connection to a dead peer, when NIXL keeps Python's lock."""
_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
"""`nixl` 1.5 forwards to the wheel that carries the code; bundles of 1.4 may come without the forwarding package."""


class PeerError(Retryable):
    """A peer did not answer. `what` is "disconnect" (the transport reported it gone) or "timeout" (silence)."""

    def __init__(self, peer: str, what: PeerFailure, doing: str) -> None:
        reason = "is gone (disconnected)" if what == "disconnect" else "did not answer in time"
        super().__init__(f"nixl peer {peer!r} {reason} while {doing}; replace the rank or use another source")
        self.peer = peer
        self.what: PeerFailure = what


class Memory(NamedTuple):
    """Where one side of a transfer lies."""

    kind: Literal["DRAM", "VRAM"] = "DRAM"
    device: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Memory":
        return cls("VRAM", tensor.device.index or 0) if tensor.is_cuda else cls()


HOST = Memory()


class Copy(NamedTuple):
    """One contiguous piece of a transfer: addresses in the memory registered here and at the peer, and its length."""

    local: int
    remote: int
    size: int


class _State(Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    LOST_SIGHT = "lost sight"
    """The peer was removed while this ran: NIXL tells nothing more about it, and its bytes may still land."""


class Transfer:
    """A started transfer. Made by `NixlAgent.start`; only the agent changes it."""

    def __init__(self, peer: str, doing: str, handle: Any) -> None:
        self.peer = peer
        self.doing = doing
        self.error: PeerError | None = None
        self._handle = handle
        self._state = _State.RUNNING

    @property
    def ended(self) -> bool:
        """Done or failed; then `error` says how."""
        return self._state is not _State.RUNNING

    @property
    def done(self) -> bool:
        """All bytes have arrived."""
        return self._state is _State.DONE

    @property
    def settled(self) -> bool:
        """Nothing more will be read from or written to local memory by it."""
        return self._state in (_State.DONE, _State.FAILED)


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    name: str
    nixl: bytes


def _load_api() -> Any:
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    reasons: list[str] = []
    for module in _MODULES:
        raise_exceptions = logging.raiseExceptions
        try:
            return importlib.import_module(module)
        except (ImportError, OSError) as error:
            reasons.append(f"{module}: {error}")
        finally:
            logging.raiseExceptions = raise_exceptions  # importing nixl turns it off for the whole process
    raise ElasticError(
        "the NIXL library is not usable here; install it with `pip install 'healer[embedded]'` ("
        + "; ".join(reasons)
        + ")"
    )


class NixlAgent:
    """One endpoint of one process. Thread-safe: one lock around the library, which itself is not.

    `register` everything that peers may touch before `metadata` is given out; memory that is only the local side of
    transfers may be registered at any time. `name` must be unique among all agents that ever meet, incarnations included.
    """

    def __init__(self, name: str, *, poll_s: float | None = 0.01) -> None:
        """Start the agent, in about 0.4 s, and a thread that polls every `poll_s` (more often while a peer works with
        this memory). With None there is no thread and the owner must call `poll` itself. Raises ElasticError where NIXL
        or its UCX back end is missing."""
        api = _load_api()
        self.name = name
        self._lock = threading.Lock()
        try:
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        except Exception as error:
            raise ElasticError(f"nixl agent {name!r} cannot start: {type(error).__name__}: {error}") from error
        if "UCX" not in self._agent.backends:
            raise ElasticError(f"nixl agent {name!r}: the UCX back end is missing; reinstall nixl")
        self._registered: list[tuple[torch.Tensor, Any]] = []
        self._peers: dict[str, bytes] = {}
        self._unsettled: list[Transfer] = []
        self._notes: list[tuple[str, bytes]] = []
        self._eager_until = 0.0
        self._closed = threading.Event()
        self.on_long_poll: Callable[[str, float, float], None] = lambda what, begin, end: None
        """Called by the polling thread with the times of a poll that took long."""
        self._thread: threading.Thread | None = None
        if poll_s is not None:
            self._thread = threading.Thread(target=self._serve, args=(poll_s,), name=f"nixl {name}", daemon=True)
            self._thread.start()

    def register(self, tensor: torch.Tensor) -> None:
        """Make a contiguous tensor usable in transfers; kept alive and in place until `close`."""
        with self._lock:
            self._registered.append((tensor, self._agent.register_memory([tensor])))

    def metadata(self) -> bytes:
        """What a peer needs for `add_peer`: name, addresses of this process, memory registered so far."""
        with self._lock:
            return msgspec.msgpack.encode(_Metadata(self.name, bytes(self._agent.get_agent_metadata())))

    def add_peer(self, metadata: bytes) -> str:
        """Know a peer; returns its name. No traffic. The same metadata again does nothing; new metadata under a known
        name (a new incarnation) replace the old. Raises ElasticError where `metadata` are not an agent's."""
        try:
            meta = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            raise ElasticError(f"nixl agent {self.name!r}: peer metadata are malformed: {error}") from error
        with self._lock:
            if self._peers.get(meta.name) == metadata:
                return meta.name
            self._forget(meta.name)
            try:
                self._agent.add_remote_agent(meta.nixl)
            except Exception as error:
                raise ElasticError(f"nixl agent {self.name!r}: peer {meta.name!r} is refused: {error}") from error
            self._peers[meta.name] = metadata
        return meta.name

    def remove_peer(self, name: str) -> None:
        """Forget a peer, dead or alive. Its unsettled transfers keep their local memory until `close`."""
        with self._lock:
            self._forget(name)

    def read(self, peer: str, copies: Sequence[Copy], *, deadline_s: float) -> None:
        """Fetch from the peer's memory; on return all bytes are here. Raises PeerError."""
        self._finish(self.start("READ", peer, copies), deadline_s)

    def write(
        self,
        peer: str,
        copies: Sequence[Copy],
        notification: bytes = b"",
        *,
        deadline_s: float,
        give_up: Callable[[], bool] = never,
    ) -> None:
        """Put into the peer's memory; the peer gets `notification` after all bytes. Raises PeerError."""
        self._finish(self.start("WRITE", peer, copies, notification), deadline_s, give_up)

    def start(
        self,
        operation: Literal["READ", "WRITE"],
        peer: str,
        copies: Sequence[Copy],
        notification: bytes = b"",
        *,
        here: Memory = HOST,
        there: Memory = HOST,
    ) -> Transfer:
        """Begin a transfer between one kind of memory here and one at the peer. Within one host large pieces are copied before this returns; nothing here waits for the peer.

        Raises PeerError("disconnect") for a dead or unknown peer; ElasticError where memory is not registered.
        """
        doing = f"a {operation.lower()} of {sum(c.size for c in copies)} bytes in {len(copies)} pieces"
        with self._lock:
            if peer not in self._peers:
                raise PeerError(peer, "disconnect", doing)
            agent = self._agent
            local = agent.get_xfer_descs([(c.local, c.size, here.device) for c in copies], here.kind)
            remote = agent.get_xfer_descs([(c.remote, c.size, there.device) for c in copies], there.kind)
            try:
                handle = agent.initialize_xfer(operation, local, remote, peer, notification)
            except Exception as error:
                # 1.4 forgets a peer by itself when it dies
                if _is_disconnect(error) or not agent.check_remote_metadata(peer):
                    raise PeerError(peer, "disconnect", doing) from error
                raise ElasticError(
                    f"nixl agent {self.name!r}: {doing} with peer {peer!r} is refused ({type(error).__name__}); "
                    "is the memory registered on both sides?"
                ) from error
            transfer = Transfer(peer, doing, handle)
            self._advance(transfer, lambda: str(agent.transfer(handle)))
            if transfer.error is not None:
                raise transfer.error
            if not transfer.done:
                self._unsettled.append(transfer)
                self._nudge(peer)
        return transfer

    def wait(
        self,
        transfers: Sequence[Transfer],
        *,
        deadline_s: float,
        first: bool = False,
        give_up: Callable[[], bool] = never,
    ) -> list[PeerError]:
        """Wait until all transfers (with `first`: one of them) ended, or the deadline, or `give_up` says so; returns one
        PeerError for each that is not done, in their order."""
        begun = nudged = time.monotonic()
        while True:
            with self._lock:
                running = [t for t in transfers if not self._check(t)]
                now = time.monotonic()
                if running and now - nudged > _NUDGE_EVERY_S:
                    nudged = now
                    for peer in {t.peer for t in running}:
                        self._nudge(peer)
            if not running or (first and len(running) < len(transfers)) or now - begun >= deadline_s or give_up():
                break
            time.sleep(_CHECK_S)
        return [t.error or PeerError(t.peer, "timeout", t.doing) for t in transfers if not t.done]

    def notify(self, peer: str, message: bytes) -> None:
        """Send a short message. Returns before it arrives; raises PeerError("disconnect") for a peer known to be gone."""
        with self._lock:
            try:
                self._agent.send_notif(peer, message)
            except Exception as error:
                raise PeerError(peer, "disconnect", "a notification") from error

    def ping(self, peer: str) -> None:
        """Send a message that only the library sees. Raises PeerError("disconnect") once the peer's death is known here;
        a stopped peer raises nothing."""
        self.notify(peer, _PING)

    def notifications(self) -> list[tuple[str, bytes]]:
        """(peer name, message) of all that arrived since the last call, in the order of each peer."""
        self.poll()
        with self._lock:
            notes, self._notes = self._notes, []
        return notes

    def poll(self) -> None:
        """Let the library work: serve peers, receive notifications, settle late transfers. About 1 us when idle."""
        with self._lock:
            for peer, messages in self._agent.get_new_notifs().items():
                if any(message != _PING for message in messages):
                    self._eager_until = time.monotonic() + _EAGER_FOR_S
                self._notes += [(peer, message) for message in messages if message not in (_NUDGE, _PING)]
            self._unsettled = [t for t in self._unsettled if not self._check(t) or not t.settled]

    def close(self) -> None:
        """End the thread and give back everything. Peers see a disconnect. Idempotent; nothing may be called after it."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        with self._lock:
            for transfer in self._unsettled:
                self._release(transfer)
            for peer in list(self._peers):
                self._forget(peer)
            for _, registration in self._registered:
                try:
                    self._agent.deregister_memory(registration)
                except Exception:
                    continue  # the process is leaving; the kernel takes the rest
            self._agent = None
            self._registered.clear()
            self._unsettled.clear()

    # --- below: called with the lock held ---

    def _check(self, transfer: Transfer) -> bool:
        """Whether it has ended, well or badly."""
        if not transfer.ended:
            self._advance(transfer, lambda: str(self._agent.check_xfer_state(transfer._handle)))
        return transfer.ended

    def _advance(self, transfer: Transfer, step: Any) -> None:
        try:
            state = step()
        except Exception as error:
            known = transfer.peer in self._peers
            transfer._state = _State.FAILED if known and _is_disconnect(error) else _State.LOST_SIGHT
            transfer.error = PeerError(transfer.peer, "disconnect", transfer.doing)
            transfer.error.__cause__ = error
        else:
            if state == "ERR":
                transfer._state = _State.LOST_SIGHT
                transfer.error = PeerError(transfer.peer, "disconnect", transfer.doing)
            elif state == "DONE":
                transfer._state = _State.DONE
        if transfer.settled:
            self._release(transfer)

    def _release(self, transfer: Transfer) -> None:
        handle, transfer._handle = transfer._handle, None
        if handle is not None:
            try:
                self._agent.release_xfer_handle(handle)
            except Exception:
                return  # the library keeps it and tries again itself

    def _forget(self, name: str) -> None:
        if self._peers.pop(name, None) is None:
            return
        for transfer in self._unsettled:
            if transfer.peer == name and not self._check(transfer):
                transfer._state = _State.LOST_SIGHT
                transfer.error = PeerError(name, "disconnect", transfer.doing)
        with contextlib.suppress(Exception):  # 1.4 may have forgotten it already
            self._agent.remove_remote_agent(name)

    def _nudge(self, peer: str) -> None:
        try:
            self._agent.send_notif(peer, _NUDGE)
        except Exception:
            return  # the transfer itself will tell

    # --- the polling thread ---

    def _serve(self, poll_s: float) -> None:
        while not self._closed.wait(_EAGER_POLL_S if time.monotonic() < self._eager_until else poll_s):
            began = time.monotonic()
            self.poll()
            if (ended := time.monotonic()) - began > LONG_POLL_S:
                self.on_long_poll("weights agent", began, ended)

    def _finish(self, transfer: Transfer, deadline_s: float, give_up: Callable[[], bool] = never) -> None:
        for error in self.wait([transfer], deadline_s=deadline_s, give_up=give_up):
            raise error


def _is_disconnect(error: Exception) -> bool:
    return type(error).__name__ == "nixlRemoteDisconnectError"
