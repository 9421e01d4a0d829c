"""Keeping the journal in order, away from the hot path: folding its log into the file, having the disk keep it after an
action, forgetting what is too old, and saying when it cannot be written."""

import asyncio
from collections.abc import Callable

from healer.journal import Journal
from healer.logs import LateLog
from healer.metrics import Metrics
from healer.retention import Retention
from healer.status import JournalStatus

IDLE_BYTES, BUSY_BYTES = 256 << 10, 16 << 20
"""Size of the write-ahead log from which on it is folded into the file: while nothing happens, and during an incident."""

CHECKPOINT, HARDEN, REOPEN = "checkpoint", "harden", "reopen"
"""The threads that wait for the disk."""


class Upkeep:
    """Owned by the supervisor's loop."""

    def __init__(self, journal: Journal, metrics: Metrics, log: LateLog, retention: Retention) -> None:
        self.retention = retention
        self._journal, self._metrics, self._log = journal, metrics, log
        self._error = ""
        self._set_aside = journal.set_aside
        self._threads: dict[str, asyncio.Task[None]] = {}

    @property
    def trouble(self) -> str:
        """Why the journal cannot be written, and what that means by now; empty when it can."""
        journal = self._journal
        if not journal.error:
            return ""
        lost = f", {journal.dropped} were given up" if journal.dropped else ""
        return f"{journal.error}; {journal.waiting} entries wait in memory{lost}"

    def status(self) -> JournalStatus:
        journal = self._journal
        set_aside = str(journal.set_aside or "")
        return JournalStatus(
            str(journal.path), journal.entries, journal.error, set_aside, journal.waiting, journal.dropped
        )

    def check(self) -> None:
        """After each flush: say once that the journal cannot be written, and once that it can again."""
        journal = self._journal
        if journal.set_aside != self._set_aside:
            self._set_aside = journal.set_aside
            self._log.say("error", "journal.set_aside", damaged=str(journal.set_aside), path=str(journal.path))
        if journal.error == self._error:
            return
        self._error = journal.error
        if self._error:
            self._metrics.errors.labels("journal").inc()
            self._log.say("error", "journal.unwritable", error=self._error, waiting=journal.waiting)
        else:
            self._log.say("info", "journal.writable", dropped=journal.dropped)

    def tidy(self, open_incident: str) -> None:
        """Once a second. While nothing happens: forget one batch of what is too old, a millisecond or two. Begin to fold the
        log, in a thread, where there is enough of it; or to find the file again, where it is lost."""
        self._journal.flush()
        if self._journal.lost_its_file():
            # not beside a thread that has the old file open
            if not any(map(self._runs, (CHECKPOINT, REOPEN))):
                self._journal.let_go()
                self._begin(REOPEN, self._journal.reopen)
            self.check()
            return
        self.check()
        if not open_incident:
            self._journal.prune(self.retention, open_incident)
        if self._journal.wal_bytes > (BUSY_BYTES if open_incident else IDLE_BYTES):
            self._begin(CHECKPOINT, self._journal.checkpoint)

    def harden(self) -> None:
        """After an action was handed over: have the disk keep what led to it, in a thread."""
        self._begin(HARDEN, self._journal.harden)

    async def close(self, deadline_s: float) -> None:
        if self._threads:
            await asyncio.wait(self._threads.values(), timeout=deadline_s)

    def _runs(self, name: str) -> bool:
        return name in self._threads and not self._threads[name].done()

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        if not self._runs(name):
            self._threads[name] = asyncio.create_task(asyncio.to_thread(work), name=name)
