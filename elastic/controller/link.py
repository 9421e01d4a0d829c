"""The controller's end of one rank: its channel, its last heartbeat, and the witnesses of its death."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from typing import TypeVar

from elastic import lifeline, process
from elastic.channel import Channel
from elastic.controller.records import Event, Fenced, PeerFaultSeen, RankBeat, RankGone
from elastic.errors import Retryable
from elastic.protocol import AnyMessage, Command, Counters, Fault, Heartbeat, Hello, Query, Resumed, Status
from elastic.view import Member

T = TypeVar("T")


class RankLink:
    """One incarnation of a rank, from its first answer until it is gone. Lives in the controller's loop."""

    def __init__(self, member: Member, channel: Channel, status: Status, on_event: Callable[[Event], None]) -> None:
        self.member = member
        self.status = status
        self.counters: Counters = status.counters
        """The newest known."""
        self.beat: Heartbeat | None = None
        self.beat_at = time.monotonic()
        self.gone = False
        self.resumed: asyncio.Queue[Resumed] = asyncio.Queue()
        self._channel, self._on_event = channel, on_event
        self._pidfd: int | None = None

    @classmethod
    async def open(
        cls,
        slot: int,
        incarnation: int,
        address: str,
        group: str,
        on_event: Callable[[Event], None],
        *,
        deadline_s: float,
        term: int = 0,
        observe: bool = False,
    ) -> "RankLink":
        """Connect and ask who is there; with `observe` as one who gives no orders, and is refused by nobody. Raises Retryable when nobody answers in time, Superseded when the rank has seen a
        controller of a higher `term`."""
        name = f"rank {slot}.{incarnation}"
        hello = Hello(role="observer" if observe else "controller", group=group, term=term)
        channel = await Channel.open(address, hello, name, deadline_s=deadline_s)
        events: list[AnyMessage] = []
        channel.start(events.append)
        try:
            status = await channel.call(Query(id=channel.next_id()), Status, deadline_s=deadline_s)
        except BaseException:
            await channel.aclose()
            raise
        member = Member(status.slot, status.incarnation, status.pid, status.pid_start, address)
        link = cls(member, channel, status, on_event)
        link._watch()
        return link

    async def call(self, message: Command, answer: type[T] | tuple[type[T], ...], *, deadline_s: float) -> T:
        """As Channel.call."""
        return await self._channel.call(message, answer, deadline_s=deadline_s)

    def tell(self, message: Command) -> None:
        """Send a command whose answer nobody waits for."""
        self._channel.send(message)

    def next_id(self) -> int:
        return self._channel.next_id()

    async def refresh(self, *, deadline_s: float) -> Status:
        self.status = await self.call(Query(id=self.next_id()), Status, deadline_s=deadline_s)
        self.counters = self.status.counters
        return self.status

    async def aclose(self) -> None:
        """Stop watching; the rank goes on."""
        self.gone = True
        self._unwatch()
        await self._channel.aclose()

    # --- witnesses ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._channel.on_event, self._channel.on_close = self._event, self._closed
        if self._channel.closed:
            self._closed("")
            return
        loop = asyncio.get_running_loop()

        def died() -> None:
            # from the watcher's thread, maybe after the loop has ended
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._lost, "lifeline")

        if self.status.lifeline:
            lifeline.watch(self.status.lifeline, died)
        try:
            self._pidfd = os.pidfd_open(self.member.pid)
        except OSError:
            # not ours to watch (another host, or gone in this instant): the socket remains
            return
        loop.add_reader(self._pidfd, self._lost, "pidfd")

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _closed(self, _: str) -> None:
        if not self._channel.superseded:
            self._lost("socket")
        elif not self.gone:
            # the rank lives, for another
            self.gone = True
            self._unwatch()
            self._on_event(Fenced(f"{self.member}: {self._channel.superseded}", time.monotonic()))

    def _lost(self, witness: str) -> None:
        self._unwatch()
        if self.gone:
            return
        self.gone = True
        state = process.state(self.member.pid, self.member.pid_start)
        self._on_event(RankGone(self.member, witness, state, time.monotonic()))

    def _event(self, message: AnyMessage) -> None:
        now = time.monotonic()
        if isinstance(message, Heartbeat):
            self.beat, self.beat_at, self.counters = message, now, message.counters
            self._on_event(RankBeat(self.member, message, now))
        elif isinstance(message, Resumed):
            self.resumed.put_nowait(message)
        elif isinstance(message, Fault):
            self._on_event(PeerFaultSeen(self.member, message.peer, message.what, message.source, now))

    async def next_resumed(self, epoch: int, *, deadline_s: float) -> Resumed:
        """The rank's report of its first step after the commit of `epoch`. Raises Retryable on the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                while (found := await self.resumed.get()).epoch != epoch:
                    pass
        except TimeoutError:
            raise Retryable(f"{self.member}: no step within {deadline_s:g} s after epoch {epoch}") from None
        return found
