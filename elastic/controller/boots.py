"""Rank processes on their way up: adopted from the spares or launched, in the background, and kept until a join takes
them in."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

from elastic import process
from elastic.config import GroupConfig
from elastic.controller.guard import GuardedLauncher
from elastic.controller.link import RankLink
from elastic.controller.records import BootFailed, Event
from elastic.controller.roster import Roster
from elastic.controller.spares import Spares
from elastic.errors import ElasticError, Retryable, Superseded
from elastic.launch.base import Launched
from elastic.paths import socket_path, unnamed_socket

ATTEMPTS = 3
"""Launches of one slot without a successful join before it is quarantined."""
BACKOFF_S = (0.0, 1.0, 5.0)
POLL_S = 0.02
ANSWER_S = 5.0
STOPPED_S = 5.0
"""A process that stands still for so long in its boot does not come up: it can do nothing until somebody continues it."""

log = logging.getLogger(__name__)


class Boots:
    """Lives in the executor's loop; no sequence waits for a boot, a boot that ends calls `wake`."""

    def __init__(
        self,
        config: GroupConfig,
        launcher: GuardedLauncher,
        spares: Spares,
        roster: Roster,
        on_event: Callable[[Event], None],
        wake: Callable[[], None],
        term: int = 0,
    ) -> None:
        self.ready: dict[int, RankLink] = {}
        self.quarantined: dict[int, str] = {}
        self._config, self._launcher, self._spares = config, launcher, spares
        self._roster = roster
        self._on_event, self._wake, self._term = on_event, wake, term
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._failures: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._from_spare: set[int] = set()

    @property
    def booting(self) -> set[int]:
        return set(self._tasks)

    def ensure(self, slots: Collection[int]) -> None:
        """Have a process coming up, or up, in each of these slots."""
        for slot in slots:
            if slot not in self.ready and slot not in self._tasks and slot not in self.quarantined:
                self._since[slot] = time.monotonic()
                self._tasks[slot] = asyncio.create_task(self._boot(slot), name=f"boot of slot {slot}")

    def since(self, slots: Collection[int]) -> float:
        """When the first of these was asked for; now, for processes that were found running."""
        now = time.monotonic()
        return min((self._since.get(s, now) for s in slots), default=now)

    def from_spare(self, slot: int) -> bool:
        """Whether the process that is up in this slot was a spare."""
        return slot in self._from_spare

    def take(self, slot: int) -> RankLink:
        """The join has committed: the process belongs to the view now."""
        self._failures.pop(slot, None)
        return self.ready.pop(slot)

    def failed(self, link: RankLink, why: str) -> None:
        """A ready process died or could not be prepared: end it and count it, once, whoever notices first."""
        slot = link.member.slot
        if self.ready.get(slot) is not link:
            return
        del self.ready[slot]
        self._drop(slot, link.member.incarnation, Launched(link.member.pid, link.member.pid_start))
        self._count(slot, link.member.incarnation, why)
        self._wake()

    def pardon(self, slots: Collection[int]) -> None:
        """Somebody asks for these slots anew."""
        for slot in slots:
            self.quarantined.pop(slot, None)
            self._failures.pop(slot, None)

    async def cancel(self, slots: Collection[int]) -> None:
        """End what is on its way up in slots that are not wanted any more."""
        for slot in slots:
            if (task := self._tasks.pop(slot, None)) is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if (link := self.ready.pop(slot, None)) is not None:
                await link.aclose()
                self._drop(slot, link.member.incarnation, Launched(link.member.pid, link.member.pid_start))

    async def close(self) -> None:
        """Let go; processes that are up stay up, those on their way end, since nobody would watch them."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for link in self.ready.values():
            await link.aclose()

    async def _boot(self, slot: int) -> None:
        try:
            while slot not in self.quarantined:
                await asyncio.sleep(BACKOFF_S[min(self._failures.get(slot, 0), len(BACKOFF_S) - 1)])
                incarnation = self._roster.next_incarnation(slot)
                started: Launched | None = None
                try:
                    self._roster.remember(slot, incarnation, None)
                    self._from_spare.discard(slot)
                    if (started := await self._spares.adopt(slot, incarnation)) is not None:
                        self._from_spare.add(slot)
                    else:
                        started = self._launcher.launch(slot, incarnation)
                    self._roster.remember(slot, incarnation, started)
                    self.ready[slot] = await self._up(slot, incarnation, started)
                    return
                except asyncio.CancelledError:
                    self._drop(slot, incarnation, started)
                    raise
                except Superseded:
                    # whoever has taken the group decides about this process too
                    return
                except Exception as error:
                    # a bug too: the process must not be lost sight of, and the attempt counts
                    self._drop(slot, incarnation, started)
                    why = str(error) or type(error).__name__
                    if slot in self._from_spare:
                        # a spare that fails has cost nothing but its own: the next one, or a fresh process, at once
                        log.warning("slot %d: the spare that was to be rank %d.%d: %s", slot, slot, incarnation, why)
                    else:
                        self._count(slot, incarnation, why)
        finally:
            self._tasks.pop(slot, None)
            self._wake()

    async def _up(self, slot: int, incarnation: int, started: Launched) -> RankLink:
        address = socket_path(self._config.root, slot, incarnation)
        ran = time.monotonic()
        deadline = ran + self._config.prepare_deadline_s
        while not Path(address).exists():
            state, now = process.state(started.pid, started.pid_start), time.monotonic()
            if state in process.ENDED:
                raise ElasticError(self._launcher.last_words(f"rank-{slot}.{incarnation}"))
            ran = ran if state == "T" else now
            if now - ran > STOPPED_S:
                raise Retryable(f"rank {slot}.{incarnation} was stopped while it booted, and for {STOPPED_S:g} s")
            if now > deadline:
                raise Retryable(f"rank {slot}.{incarnation} was not up within {self._config.prepare_deadline_s:g} s")
            await asyncio.sleep(POLL_S)
        link = await RankLink.open(
            slot, incarnation, address, self._config.name, self._on_event, deadline_s=ANSWER_S, term=self._term
        )
        if link.gone:
            raise ElasticError(self._launcher.last_words(f"rank-{slot}.{incarnation}"))
        return link

    def _drop(self, slot: int, incarnation: int, started: Launched | None) -> None:
        if started is not None:
            self._launcher.end(started)
        address = socket_path(self._config.root, slot, incarnation)
        for path in (address, unnamed_socket(address)):
            self._launcher.remove(path)
        self._roster.remember(slot, incarnation, None)

    def _count(self, slot: int, incarnation: int, why: str) -> None:
        attempt = self._failures.get(slot, 0) + 1
        self._failures[slot] = attempt
        gave_up = attempt >= ATTEMPTS
        if gave_up:
            self.quarantined[slot] = why
        self._on_event(BootFailed(slot, incarnation, why, attempt, gave_up, time.monotonic()))
