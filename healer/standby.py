"""A daemon that does not hold the lease: it watches, answers what it knows, refuses orders, and waits for its turn."""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import structlog

from elastic.controller.records import GroupStatus
from elastic.errors import ElasticError, Superseded
from healer import __version__, logs
from healer.address import read_acting
from healer.clock import Clock
from healer.journal import Answer, Entry, Kind, incident_entries, open_readonly, recent, timeline
from healer.leaseholder import Leaseholder
from healer.metrics import Metrics
from healer.orders import Carried, Order
from healer.policy.memory import Memory
from healer.policy.schema import Policy
from healer.reload import PolicyFile
from healer.status import DaemonStatus, JournalStatus, healing_status
from healer.systemd import Notifier as ServiceManager

log = structlog.get_logger("healer")

TICK_S = 0.1
SHOWN_S = 1.0
"""Between two looks at what the service manager should show."""


class Archive:
    """The journal that the acting daemon writes, as far as it can be read from here: never written, opened for each look."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def incidents(self, limit: int) -> list[Entry]:
        with self._open() as connection:
            return incident_entries(connection, limit) if connection is not None else []

    def timeline(self, incident: str) -> list[Entry]:
        with self._open() as connection:
            return timeline(connection, incident) if connection is not None else []

    def recent(self, kind: Kind, limit: int) -> list[Entry]:
        with self._open() as connection:
            return recent(connection, kind, limit) if connection is not None else []

    def answered(self, request: str) -> Answer | None:
        return None

    def answer(self, request: str, answer: Answer) -> None:
        """A standby answers nothing that is worth remembering."""

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection | None]:
        try:
            connection = open_readonly(self.path)
        except ElasticError:
            yield None
            return
        with contextlib.closing(connection):
            yield connection


class Standby:
    """Answers the API until `run` returns; owned by the daemon's loop."""

    def __init__(
        self,
        policy: Policy,
        policy_file: Path | None,
        journal: Path,
        holder: Leaseholder,
        clock: Clock,
        service: ServiceManager,
    ) -> None:
        self.journal = Archive(journal)
        self.metrics = Metrics(self, lambda: 0)
        self.policy = policy
        """As the file has it now, to take over with."""
        self._holder, self._clock, self._service = holder, clock, service
        self._file = PolicyFile(policy_file, policy, clock)
        self._started_at = self._last_round = clock.monotonic()
        self._ended = asyncio.Event()

    async def run(self) -> bool:
        """Until this daemon holds the lease: True; or until it is told to end: False."""
        shown_at = 0.0
        self._service.ready(self._why())
        while not self._ended.is_set() and not self._holder.armed():
            now = self._last_round = self._clock.monotonic()
            self._service.alive(now)
            found = self._file.poll(now)
            if isinstance(found, Policy):
                self.policy = found
            elif found is not None:
                log.error("policy.rejected", why=found)
            if now >= shown_at:
                shown_at = now + SHOWN_S
                self._service.status(self._why())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._ended.wait()
        await self._file.close()
        return not self._ended.is_set()

    @property
    def loop_age_s(self) -> float:
        return self._clock.monotonic() - self._last_round

    def end(self, *, stop: bool, who: str) -> None:
        """Raises Superseded where serving is to be stopped: that is the holder's to do."""
        if stop:
            raise Superseded(self._refusal())
        self._service.stopping()
        self._ended.set()

    def reload(self) -> None:
        self._file.reload()

    def order(self, order: Order, *, who: str) -> Carried:
        raise Superseded(self._refusal())

    def observe(self) -> GroupStatus:
        """Nothing is known of the group here: its ranks listen to the holder."""
        target = self.policy.spec.target
        return GroupStatus(
            name=self.policy.metadata.name,
            epoch=0,
            live=(),
            target=(),
            max_ranks=target.max_ranks,
            sequence=None,
            placement_hash="",
            uncovered=0,
            losses_survivable=0,
            slots=(),
        )

    def status(self) -> DaemonStatus:
        now = self._clock.monotonic()
        return DaemonStatus(
            state="standby",
            why=self._why(),
            version=__version__,
            pid=os.getpid(),
            policy=self.policy.metadata.name,
            policy_file=self._file.status,
            dry_run=self.policy.spec.dry_run,
            lease=self._holder.status(),
            acts=False,
            uptime_s=now - self._started_at,
            loop_age_s=self.loop_age_s,
            started="",
            serving="",
            incident=None,
            decision="",
            healing=healing_status(self.policy, Memory(), ()),
            scaling=None,
            group=self.observe(),
            live=(),
            verdicts=(),
            gpus=(),
            hosts=(),
            placed=(),
            sensors=(),
            journal=JournalStatus(str(self.journal.path), 0, "", "", 0, 0),
            log_dropped=logs.dropped(),
        )

    def _why(self) -> str:
        lease = self._holder.status()
        held = f"{lease.holder} holds the lease" if lease.holder else "nobody holds the lease yet"
        return f"{held}{f'; the store: {lease.error}' if lease.error else ''}"

    def _refusal(self) -> str:
        acting = read_acting(self.journal.path.parent)
        where = f"; ask it at {acting.http}" if acting is not None else ""
        return f"this daemon stands by: {self._why()}{where}"
