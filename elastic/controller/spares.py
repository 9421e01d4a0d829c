"""Processes that stand by to become ranks: kept at the wanted number in the background, taken by boots.

A spare is no rank: no sequence counts it, and its death changes nothing but the time of the next refill.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from elastic import process
from elastic.channel import Channel
from elastic.config import GroupConfig
from elastic.controller.guard import GuardedLauncher
from elastic.controller.records import SpareStage, SpareState
from elastic.errors import ElasticError, Retryable, Superseded
from elastic.launch.base import Launched
from elastic.paths import spare_socket, unnamed_socket
from elastic.protocol import Adopt, Done, Hello, Query, SpareStatus

ATTEMPTS = 3
"""Spares of one number that ended unused, one soon after the other, before no more are started."""
BACKOFF_S = (0.0, 1.0, 5.0)
STEADY_S = 60.0
"""A spare that stood for so long before it died does not count towards the attempts."""
CALM_S = 5.0
"""A spare that was used is replaced when no sequence has run for so long: while a process makes its CUDA context, launches and
copies of its neighbours on the GPU stall for up to 30 ms (seen on an H200), which would lengthen the next pause."""
POLL_S = 0.02
ANSWER_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Spare:
    number: int
    process: Launched
    slots: tuple[int, ...]
    since: float
    channel: Channel


class Spares:
    """Lives in the executor's loop."""

    def __init__(
        self,
        config: GroupConfig,
        launcher: GuardedLauncher,
        wake: Callable[[], None],
        term: int = 0,
        on_superseded: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_superseded`: told why when a spare listens to a controller of a higher term."""
        self._config, self._launcher, self._wake = config, launcher, wake
        self._term, self._on_superseded = term, on_superseded
        self._ready: dict[int, _Spare] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._failures: dict[int, int] = {}
        self._why: dict[int, str] = {}
        """Of each number that was given up."""
        self._starting: set[int] = set()
        """Numbers with a process on its way; the other tasks wait."""
        self._calm_from = 0.0

    def ensure(self) -> None:
        """Have a process coming up, or up, for each number."""
        for number in range(self._config.spares):
            if number not in self._ready and number not in self._tasks and number not in self._why:
                self._tasks[number] = asyncio.create_task(self._boot(number), name=f"spare {number}")

    def disturbed(self) -> None:
        """A sequence of a group that serves has begun or ended."""
        self._calm_from = time.monotonic() + CALM_S

    def pardon(self) -> None:
        """Somebody asks for ranks anew: what was given up is tried again."""
        self._why.clear()
        self._failures.clear()

    async def adopt(self, slot: int, incarnation: int) -> Launched | None:
        """Make a spare the rank of this slot. None where none may take it, or those that might died on the way."""
        fitting = [s for s in self._ready.values() if slot in s.slots]
        # one that may take few slots first: the others stay for what it cannot take
        for spare in sorted(fitting, key=lambda s: (len(s.slots), s.slots[0] != slot, s.number)):
            if self._ready.pop(spare.number, None) is None:
                continue  # it was taken, or died, while another one was asked
            spare.channel.on_close = lambda _: None
            order = Adopt(id=spare.channel.next_id(), slot=slot, incarnation=incarnation)
            try:
                await spare.channel.call(order, Done, deadline_s=ANSWER_S)
            except Superseded as error:
                self._on_superseded(str(error))
                raise
            except ElasticError as error:
                self._failed(spare.number, spare.process, spare.since, f"not adopted into slot {slot}: {error}")
            except BaseException:
                self._end(spare.number, spare.process)
                raise
            else:
                self._failures.pop(spare.number, None)
                return spare.process
            finally:
                await spare.channel.aclose()
        return None

    def status(self) -> tuple[SpareState, ...]:
        found = []
        for number in sorted({*range(self._config.spares), *self._ready}):
            spare = self._ready.get(number)
            coming: SpareStage = "booting" if number in self._starting else "absent"
            found.append(
                SpareState(
                    number=number,
                    state="ready" if spare else "given-up" if number in self._why else coming,
                    pid=spare.process.pid if spare else 0,
                    slots=spare.slots if spare else (),
                    why=self._why.get(number, ""),
                )
            )
        return tuple(found)

    async def find(self) -> set[int]:
        """Take over the spares that an earlier controller left in the run directory; returns their pids. Those that do
        not answer are none: they are strays. Raises Superseded where one has seen a controller of a higher term."""
        numbers = range(self._config.spares)
        sockets = [n for n in numbers if Path(spare_socket(self._config.root, n)).exists()]
        for number in sockets:
            try:
                self._stands(await self._open(number))
            except Superseded:
                raise
            except ElasticError:
                continue
        return {spare.process.pid for spare in self._ready.values()}

    async def close(self) -> None:
        """Let go of those that stand; those on their way end, since nobody would watch them."""
        await self._cancel()
        for spare in self._ready.values():
            await spare.channel.aclose()

    async def stop(self) -> None:
        await self._cancel()
        for spare in list(self._ready.values()):
            await spare.channel.aclose()
            self._end(spare.number, spare.process)
        self._ready.clear()

    async def _cancel(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _boot(self, number: int) -> None:
        started: Launched | None = None
        began = time.monotonic()
        try:
            await asyncio.sleep(BACKOFF_S[min(self._failures.get(number, 0), len(BACKOFF_S) - 1)])
            self._unlink([number])
            # the moment moves on while it waits
            while (wait := self._calm_from - time.monotonic()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(wait)
            self._starting.add(number)
            began, started = time.monotonic(), self._launcher.launch_spare(number)
            self._stands(await self._up(number, started))
        except asyncio.CancelledError:
            if started is not None:
                self._end(number, started)
            raise
        except Superseded:
            # whoever has taken the group decides about this process too
            return
        except Exception as error:
            # a bug too: the process must not be lost sight of, and the attempt counts
            self._failed(number, started, began, str(error) or type(error).__name__)
        finally:
            self._tasks.pop(number, None)
            self._starting.discard(number)
            self._wake()

    async def _up(self, number: int, started: Launched) -> _Spare:
        deadline = time.monotonic() + self._config.prepare_deadline_s
        while not Path(spare_socket(self._config.root, number)).exists():
            if not process.is_alive(started.pid, started.pid_start):
                raise ElasticError(self._launcher.last_words(f"spare-{number}"))
            if time.monotonic() > deadline:
                raise Retryable(f"spare {number} was not up within {self._config.prepare_deadline_s:g} s")
            await asyncio.sleep(POLL_S)
        return await self._open(number)

    async def _open(self, number: int) -> _Spare:
        address, name = spare_socket(self._config.root, number), f"spare {number}"
        hello = Hello(role="controller", group=self._config.name, term=self._term)
        channel = await Channel.open(address, hello, name, deadline_s=ANSWER_S)
        channel.start()
        try:
            status = await channel.call(Query(id=channel.next_id()), SpareStatus, deadline_s=ANSWER_S)
        except BaseException:
            await channel.aclose()
            raise
        return _Spare(number, Launched(status.pid, status.pid_start), status.slots, time.monotonic(), channel)

    def _stands(self, spare: _Spare) -> None:
        self._ready[spare.number] = spare
        spare.channel.on_close = lambda why: self._gone(spare, why)
        if spare.channel.closed:
            self._gone(spare, "it ended at once")

    def _gone(self, spare: _Spare, why: str) -> None:
        if spare.channel.superseded:
            self._on_superseded(spare.channel.superseded)
        elif self._ready.get(spare.number) is spare:
            del self._ready[spare.number]
            self._failed(spare.number, spare.process, spare.since, f"ended while it stood by: {why}")
            self._wake()

    def _failed(self, number: int, started: Launched | None, since: float, why: str) -> None:
        if started is not None:
            self._end(number, started)
        if time.monotonic() - since > STEADY_S:
            self._failures.pop(number, None)
        attempt = self._failures[number] = self._failures.get(number, 0) + 1
        if attempt >= ATTEMPTS:
            self._why[number] = why
        end = ", no more are started" if attempt >= ATTEMPTS else ""
        log.warning("spare %d: %s (attempt %d of %d%s)", number, why, attempt, ATTEMPTS, end)

    def _end(self, number: int, started: Launched) -> None:
        self._launcher.end(started)
        self._unlink([number])

    def _unlink(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            address = spare_socket(self._config.root, number)
            for path in (address, unnamed_socket(address)):
                self._launcher.remove(path)
