"""Keeping the journal in order, away from the hot path: folding its log into the file, and saying when it cannot be written."""

import asyncio

from healer.journal import Journal
from healer.logs import LateLog
from healer.metrics import Metrics

IDLE_BYTES, BUSY_BYTES = 256 << 10, 16 << 20
"""Size of the write-ahead log from which on it is folded into the file: while nothing happens, and during an incident."""


class Upkeep:
    """Owned by the supervisor's loop."""

    def __init__(self, journal: Journal, metrics: Metrics, log: LateLog) -> None:
        self._journal, self._metrics, self._log = journal, metrics, log
        self._error = ""
        self._checkpoint: asyncio.Task[None] | None = None

    def check(self) -> None:
        """After each flush: say once that the journal cannot be written, and once that it can again."""
        if self._journal.error == self._error:
            return
        self._error = self._journal.error
        if self._error:
            self._metrics.errors.labels("journal").inc()
            self._log.say("error", "journal.unwritable", error=self._error)
        else:
            self._log.say("info", "journal.writable")

    def checkpoint(self, *, busy: bool) -> None:
        """Begin one, in a thread, where there is enough to fold."""
        limit = BUSY_BYTES if busy else IDLE_BYTES
        if self._journal.wal_bytes > limit and (self._checkpoint is None or self._checkpoint.done()):
            self._checkpoint = asyncio.create_task(asyncio.to_thread(self._journal.checkpoint), name="checkpoint")

    async def close(self, deadline_s: float) -> None:
        if self._checkpoint is not None:
            await asyncio.wait([self._checkpoint], timeout=deadline_s)
