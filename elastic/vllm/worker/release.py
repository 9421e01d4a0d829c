"""Frees what waits for a dead peer, while the worker's main thread stands in a step and answers nobody.

A thread of the worker listens for the engine's datagrams (`interface.release_address`). On the first word of a death a flag is set on
the device, the rank is masked in NIXL's buffer, so that later kernels skip it, and the words that a waiting kernel spins on are
written, again and again until the device has ended the step. What words do not end is aborted after them (`member`).

The step's result is wrong, and is thrown away: the flag was set before the first word. The mask alone would not do: while a joiner is
staged it cannot be set without waiting for the step (`exchange`), and later kernels are freed by words then.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from elastic.vllm.worker.interface import release_address

log = logging.getLogger("vllm.healer.in_place")

WRITE_EVERY_S = 0.0003
END_S = 5.0
QUIET_AFTER_S = 60.0
"""A release that nobody has ended by then is given up: no order followed it."""


class Listener:
    """Owns the socket and its thread, which calls `on_dead(slots)`; an epoch below the last one that was heard is ignored."""

    def __init__(self, engine_pid: int, local_rank: int, on_dead: Callable[[int, list[int]], None]) -> None:
        self._on_dead, self._epoch = on_dead, -1
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(release_address(engine_pid, local_rank))
        self._thread = threading.Thread(target=self._listen, name="healer release", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                message = self._socket.recv(65536)
            except OSError:
                return
            try:
                found = json.loads(message)
                epoch, dead = int(found["epoch"]), [int(slot) for slot in found["dead"]]
            except (ValueError, KeyError, TypeError):
                log.warning("[in-place] a release that is none: %r", message[:200])
                continue
            if epoch < self._epoch:
                continue
            self._epoch = epoch
            try:
                self._on_dead(epoch, dead)
            except Exception:  # the next word must be heard too
                log.exception("[in-place] releasing slots %s", dead)

    def close(self) -> None:
        self._socket.close()


class WordWriter:
    """Writes the signal words of dead peers until told that the step is over. One thread while there is something to free.

    `sign()` makes a step that ends from now on a faulty one, `mask(rank)` masks a peer, or returns False where that would wait for
    the step, `write(ranks)` writes their words once: all are called in the thread, within `on_side()`, a context that puts work on
    a stream of high priority. What the stream is given in an order it does in that order.
    """

    def __init__(
        self,
        sign: Callable[[], None],
        mask: Callable[[int], bool],
        write: Callable[[Collection[int]], None],
        on_side: Any,
    ) -> None:
        self._sign, self._mask, self._write, self._on_side = sign, mask, write, on_side
        self._lock = threading.Lock()
        self._wanted: set[int] = set()
        self._thread: threading.Thread | None = None
        self._until = 0.0
        self.written = 0
        """Rounds of writes so far."""
        self._round = threading.Condition(self._lock)

    def release(self, ranks: Collection[int]) -> None:
        """Returns at once."""
        with self._lock:
            self._wanted |= set(ranks)
            self._until = time.monotonic() + QUIET_AFTER_S
            if self._thread is None and self._wanted:
                self._thread = threading.Thread(target=self._run, name="healer words", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """The step is over: returns when nothing is written any more."""
        until = time.monotonic() + END_S
        while True:
            with self._lock:
                # again each time: who is released now waits in no step
                self._wanted.clear()
                thread = self._thread
            if thread is None:
                return
            thread.join(10 * WRITE_EVERY_S)
            if thread.is_alive() and time.monotonic() > until:
                raise TimeoutError(f"words are still being written {END_S:g} s after the step's end")

    def wait_for_words(self, timeout_s: float) -> None:
        """Until words have been written once more, or nothing is being written; at most for so long."""
        with self._lock:
            before = self.written
            self._round.wait_for(lambda: self.written > before or self._thread is None, timeout_s)

    @property
    def writes(self) -> bool:
        with self._lock:
            return self._thread is not None

    def _run(self) -> None:
        masked: set[int] = set()
        while True:
            with self._lock:
                wanted = set(self._wanted)
                if not wanted or time.monotonic() > self._until:
                    self._wanted.clear()
                    self._thread = None
                    self._round.notify_all()
                    return
            try:
                with self._on_side():
                    # each time: cleaning up after an earlier death takes the sign away
                    self._sign()
                    masked |= {rank for rank in wanted - masked if self._mask(rank)}
                    self._write(wanted)
                with self._lock:
                    self.written += 1
                    self._round.notify_all()
            except Exception:
                log.exception("[in-place] releasing ranks %s", sorted(wanted))
                with self._lock:
                    self._wanted.clear()
                    self._thread = None
                    self._round.notify_all()
                return
            time.sleep(WRITE_EVERY_S)
