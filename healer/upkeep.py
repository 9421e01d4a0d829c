"""Keeping the journal in order, away from the hot path: folding its log into the file, having the disk keep it after an
action, forgetting what is too old, and saying when it cannot be written."""

import asyncio
from collections.abc import Callable

from healer.journal import Journal
from healer.logs import LateLog
from healer.metrics import Metrics
from healer.retention import Retention

IDLE_BYTES, BUSY_BYTES = 256 << 10, 16 << 20
"""Size of the write-ahead log from which on it is folded into the file: while nothing happens, and during an incident."""


class Upkeep:
    """Owned by the supervisor's loop."""

    def __init__(self, journal: Journal, metrics: Metrics, log: LateLog, retention: Retention) -> None:
        self.retention = retention
        self._journal, self._metrics, self._log = journal, metrics, log
        self._error = ""
        self._threads: dict[str, asyncio.Task[None]] = {}

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

    def tidy(self, open_incident: str) -> None:
        """Once a second. While nothing happens: forget one batch of what is too old, a millisecond or two. Begin to fold the
        log, in a thread, where there is enough of it."""
        if not open_incident:
            self._journal.prune(self.retention, open_incident)
        if self._journal.wal_bytes > (BUSY_BYTES if open_incident else IDLE_BYTES):
            self._begin("checkpoint", self._journal.checkpoint)

    def harden(self) -> None:
        """After an action was handed over: have the disk keep what led to it, in a thread."""
        self._begin("harden", self._journal.harden)

    async def close(self, deadline_s: float) -> None:
        if self._threads:
            await asyncio.wait(self._threads.values(), timeout=deadline_s)

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        if name not in self._threads or self._threads[name].done():
            self._threads[name] = asyncio.create_task(asyncio.to_thread(work), name=name)
