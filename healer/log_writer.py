"""Lines on their way to a file descriptor, written by a thread of their own.

A write to a pipe that nobody reads never returns, and one to a slow disk returns late: neither may hold up the loop that
heals. So `put` only queues. The queue is bounded; what does not fit is dropped and counted, since the journal has the
decisions anyway. The descriptor stays as it is: O_NONBLOCK would hold for every process that shares it.
"""

import contextlib
import io
import os
import select
import threading
import time

MAX_BYTES = 1 << 20
DRAIN_S = 0.5
"""For what is still queued when somebody flushes, such as a process that ends."""
_WRITE_BYTES = 64 << 10


class Writer:
    """`put` and `drain` are for any thread."""

    def __init__(self, fd: int, max_bytes: int) -> None:
        self._fd, self._max_bytes = fd, max_bytes
        self._queued = bytearray()
        self._writing = 0
        self._dropped = 0
        self._full = False
        # re-entrant: a collection of garbage within may log
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None

    @property
    def dropped(self) -> int:
        """Lines that were given up: no room for them, or the descriptor took them no more."""
        return self._dropped

    @property
    def waiting(self) -> int:
        """Bytes that are not written yet."""
        return len(self._queued) + self._writing

    @property
    def has_room(self) -> bool:
        """False from the first line that was dropped until half of the queue is written: one gap, and not many."""
        if self._full and self.waiting <= self._max_bytes // 2:
            self._full = False
        return not self._full

    def put(self, data: bytes) -> bool:
        """Whole lines. Never waits. False: there was no room, and they are dropped."""
        with self._changed:
            if not self.has_room or self.waiting + len(data) > self._max_bytes:
                self._full = True
                self._dropped += data.count(b"\n")
                return False
            self._queued += data
            if self._thread is None:
                # begun with the first line, so that a process may fork before; a daemon: a write may never return
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def drain(self, deadline_s: float = DRAIN_S) -> bool:
        """Wait until all is written. False: it is not."""
        end = time.monotonic() + deadline_s
        with self._changed:
            while self.waiting:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queued:
                    self._changed.wait()
                part = bytes(self._queued[:_WRITE_BYTES])
                del self._queued[:_WRITE_BYTES]
                self._writing = len(part)
            lost = _write(self._fd, part)
            with self._changed:
                self._writing = 0
                self._dropped += lost
                self._changed.notify_all()


def _write(fd: int, data: bytes) -> int:
    """All of it, however long it takes. Returns the lines that the descriptor refused: a full disk, a reader that is gone."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            # whoever shares the descriptor has made it so
            select.select((), (fd,), ())
        except OSError:
            return bytes(left).count(b"\n")
    return 0


class Stream(io.TextIOBase):
    """A text file over a writer, to stand for `sys.stderr`: tracebacks and last words go the same way as log lines."""

    encoding = "utf-8"

    def __init__(self, writer: Writer, fd: int) -> None:
        self._writer, self._fd = writer, fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._writer.put(text.encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Of whoever wants his words to be out: waits, but not for ever."""
        self._writer.drain()

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        with contextlib.suppress(OSError):
            return os.isatty(self._fd)
        return False
