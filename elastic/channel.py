"""Framed messages over a Unix socket: the client side, used by the controller and the gateway."""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from elastic.errors import ElasticError, NeedsReplan, Retryable, Superseded, Unreachable
from elastic.fence import NO_ID
from elastic.protocol import MAX_FRAME_BYTES, AnyMessage, Command, Failed, Hello, Refused, decode, encode

T = TypeVar("T")

SLICE_S = 0.5
LATE_S = 0.1
"""A slice of a wait that takes longer by this was spent standing still."""


async def read_frame(reader: asyncio.StreamReader) -> AnyMessage:
    """The next message. Raises IncompleteReadError at the end, ElasticError on a frame that is not ours."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_FRAME_BYTES:
        raise ElasticError(
            f"a frame of {size} bytes is above the limit of {MAX_FRAME_BYTES}; not a peer of this version?"
        )
    body = await reader.readexactly(size)
    try:
        return decode(body)
    except msgspec.MsgspecError as error:
        raise ElasticError(f"a frame that is no message of this version: {error}") from error


class Channel:
    """One connection. `on_event` gets every message that answers no command; `on_close` is called once, when the other
    side is gone: for a rank that is the liveness signal, raised by the kernel when the process dies."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        self.name = name
        self.on_event: Callable[[AnyMessage], None] = lambda _: None
        self.on_close: Callable[[str], None] = lambda _: None
        self.closed = False
        self.superseded = ""
        """Why the other side listens to a later controller instead; empty: it does not."""
        self._reader, self._writer = reader, writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[AnyMessage]] = {}
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, address: str, hello: Hello, name: str, *, deadline_s: float) -> "Channel":
        """Connect and send the first frame. Raises Retryable when nobody answers in time."""
        try:
            async with asyncio.timeout(deadline_s):
                reader, writer = await asyncio.open_unix_connection(address)
        except (OSError, TimeoutError) as error:
            raise Retryable(f"{name}: cannot connect to {address}: {error or 'no answer'}") from error
        channel = cls(reader, writer, name)
        writer.write(encode(hello))
        return channel

    def start(
        self,
        on_event: Callable[[AnyMessage], None] = lambda _: None,
        on_close: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Begin to read. The owner must `aclose` in the end."""
        self.on_event, self.on_close = on_event, on_close
        self._task = asyncio.create_task(self._read(), name=f"channel {self.name}")

    def next_id(self) -> int:
        return next(self._ids)

    def send(self, message: AnyMessage) -> None:
        """Queue one message; a closed channel swallows it, since `on_close` has told the owner."""
        if not self.closed:
            self._writer.write(encode(message))

    async def call(self, message: Command, answer: type[T] | tuple[type[T], ...], *, deadline_s: float) -> T:
        """Send a command and wait for its answer.

        Raises Retryable on the deadline or a closed channel, NeedsReplan when the rank refuses (epoch or phase), and
        ElasticError with the rank's own words when the command failed there: Unreachable where other ranks were the
        reason; Superseded when the other side listens to a later controller. Time in which this process itself stood
        still does not count towards the deadline.
        """
        if self.closed:
            raise self._closed_by("connection is closed")
        future: asyncio.Future[AnyMessage] = asyncio.get_running_loop().create_future()
        self._waiting[message.id] = future
        self.send(message)
        what = type(message).__name__
        try:
            if not await _done(future, deadline_s):
                raise Retryable(f"{self.name}: no answer to {what} within {deadline_s:g} s")
            got = future.result()
        finally:
            self._waiting.pop(message.id, None)
        if isinstance(got, Refused):
            raise NeedsReplan(f"{self.name}: refused {what}: {got.why}")
        if isinstance(got, Failed):
            text = f"{self.name}: {what} failed: {got.why}"
            raise Unreachable(text, got.unreachable) if got.unreachable else ElasticError(text)
        if not isinstance(got, answer):
            raise ElasticError(f"{self.name}: answered {what} with {type(got).__name__}")
        return got

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._close("closed by this side", tell=False)

    def _close(self, why: str, *, tell: bool = True) -> None:
        if self.closed:
            return
        self.closed = True
        self._writer.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._closed_by(f"connection closed: {why}"))
        if tell:
            self.on_close(why)

    def _closed_by(self, why: str) -> ElasticError:
        if self.superseded:
            return Superseded(f"{self.name}: {self.superseded}")
        return Retryable(f"{self.name}: {why}")

    async def _read(self) -> None:
        try:
            while True:
                message = await read_frame(self._reader)
                if isinstance(message, Refused) and message.id == NO_ID:
                    self.superseded = message.why
                    self._close(message.why)
                    return
                future = self._waiting.get(getattr(message, "id", 0))
                if future is not None and not future.done():
                    future.set_result(message)
                else:
                    self.on_event(message)
        except (asyncio.IncompleteReadError, OSError):
            self._close("end of stream")
        except ElasticError as error:
            self._close(str(error))
        except Exception as error:
            # a bug in `on_event`: a channel that looks open but reads nothing would be worse than one that is closed
            self._close(f"{type(error).__name__}: {error}")
            raise


async def _done(future: asyncio.Future[AnyMessage], deadline_s: float) -> bool:
    """Wait in slices, each of which counts at most its own length. After a stop of this process (SIGSTOP, a suspended
    machine) the answers that came meanwhile lie unread, and every timer is due at once: that is no silence of a peer."""
    left, late = deadline_s, False
    while not future.done() and (left > 0 or late):
        slice_s = min(left, SLICE_S) if left > 0 else SLICE_S
        began = time.monotonic()
        await asyncio.wait([future], timeout=slice_s)
        late = left > 0 and time.monotonic() - began > slice_s + LATE_S
        left -= slice_s
    return future.done()
