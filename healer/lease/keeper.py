"""Keeps a lease: one thread that reads, renews and takes over; everybody else asks `armed`."""

import os
import socket
import threading
import time
from collections.abc import Callable

from elastic.errors import ElasticError
from healer.lease import LeaseStore
from healer.lease.election import Election, Role, Timing


def unique_name() -> str:
    """Of this process, on any host, at any time."""
    return f"{socket.gethostname()}/{os.getpid()}/{time.time_ns():x}"


class Keeper:
    """`on_change(role)` is called in the keeper's thread whenever the role changes; `start` and `close` by the owner."""

    def __init__(
        self,
        store: LeaseStore,
        timing: Timing,
        on_change: Callable[[Role], None],
        *,
        name: str | None = None,
        floor: int = 0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`floor`: a term that was given already. Raises ElasticError where the timing cannot work."""
        if problems := timing.problems():
            raise ElasticError("lease: " + "; ".join(problems))
        self.error = ""
        """Of the last call; empty when it worked."""
        self._store, self._timing, self._on_change, self._monotonic = store, timing, on_change, monotonic
        self._election = Election(name or unique_name(), timing, floor)
        self._role = Role.STANDBY
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    @property
    def name(self) -> str:
        return self._election.name

    @property
    def term(self) -> int:
        return self._election.term

    @property
    def holder(self) -> str:
        return self._election.holder

    @property
    def role(self) -> Role:
        return self._election.role(self._monotonic())

    def armed(self) -> bool:
        """Whether to act, at this very moment. True for the holder only, and never beyond its time."""
        return self._election.armed(self._monotonic())

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Give the lease back, so that a standby need not wait for its end. Bounded by two calls to the store."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(3 * self._timing.call_deadline_s)

    def turn(self) -> None:
        """Read, and write what there is to write. One round of the thread; for tests that have no thread."""
        deadline_s = self._timing.call_deadline_s
        try:
            seen = self._store.read(deadline_s=deadline_s)
            self._election.observed(seen, self._monotonic())
            proposal = self._election.proposal(self._monotonic())
            if proposal is not None:
                record, version = proposal
                began = self._monotonic()
                if self._store.replace(record, version, deadline_s=deadline_s):
                    self._election.written(record, began)
            self.error = ""
        except ElasticError as error:
            self.error = str(error)
        self._say()

    def _say(self) -> None:
        role = self.role
        if role is not self._role:
            self._role = role
            self._on_change(role)

    def _run(self) -> None:
        while True:
            self.turn()
            if self._end.wait(self._timing.renew_s):
                break
            self._say()
        deadline_s = self._timing.call_deadline_s
        try:
            # the version of one's own last write is known to the store alone
            self._election.observed(self._store.read(deadline_s=deadline_s), self._monotonic())
            farewell = self._election.farewell(self._monotonic())
            if farewell is not None:
                self._store.replace(*farewell, deadline_s=deadline_s)
        except ElasticError as error:
            self.error = str(error)
        self._say()
