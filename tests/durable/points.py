"""Points at which a daemon ends or stops itself, and the page of memory through which a test arms and watches them."""

import mmap
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

_PAGE = 4096
_AT, _COUNT, _SIGNAL, _LABEL, _WANTED = 0, 8, 16, 128, 256
_LABEL_BYTES = 120


class Points:
    """Both sides map the same file; the daemon counts, the test sets."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_PAGE))
        self.log = path.with_suffix(".log")
        self._moves = path.with_suffix(".moves")
        self.on_pass: Callable[[str], None] = lambda _: None
        """Called in the daemon at every point, armed or not."""
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _PAGE)

    # --- the test's side ------------------------------------------------------------------------------------------

    def arm(self, at: int, signum: signal.Signals = signal.SIGKILL) -> None:
        """Have the daemon send itself `signum` at its `at`-th point from now on, counted from 1. 0: never."""
        self._set(_AT, 0)
        self._set(_COUNT, 0)
        self._set(_SIGNAL, signum)
        self._write(_LABEL, "")
        self._write(_WANTED, "")
        self._set(_AT, at)

    def arm_at(self, label: str) -> None:
        """End the daemon at the first point whose label begins so."""
        self.arm(0)
        self._write(_WANTED, label)
        self._set(_AT, -1)

    def disarm(self) -> None:
        """Pass all points from now on; count and label stay."""
        self._set(_AT, 0)

    @property
    def count(self) -> int:
        """Points passed since it was armed, the last one included."""
        return self._get(_COUNT)

    @property
    def label(self) -> str:
        """Of the newest point."""
        return self._read(_LABEL)

    def moves(self) -> set[tuple[str, str, str]]:
        """What the sequences of all daemons did: kind, state, next state or end."""
        lines = self._moves.read_text().splitlines() if self._moves.exists() else []
        return {(kind, state, to) for kind, state, to in (line.split(" ") for line in lines)}

    # --- the daemon's side ----------------------------------------------------------------------------------------

    def note_move(self, kind: str, state: str, to: str) -> None:
        with self._moves.open("a") as file:
            file.write(f"{kind} {state} {to}\n")

    def pass_(self, label: str) -> None:
        self.on_pass(label)
        at = self._get(_AT)
        if not at:
            return
        count = self._get(_COUNT) + 1
        self._set(_COUNT, count)
        self._write(_LABEL, label)
        if at >= COUNTING:
            with self.log.open("a") as log:
                log.write(f"{count} {label}\n")
        if count == at or (at < 0 and label.startswith(self._read(_WANTED))):
            self._set(_AT, 0)
            os.kill(os.getpid(), self._get(_SIGNAL))

    def _read(self, at: int) -> str:
        return bytes(self._page[at : at + _LABEL_BYTES]).rstrip(b"\0").decode()

    def _write(self, at: int, text: str) -> None:
        self._page[at : at + _LABEL_BYTES] = text.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES, b"\0")

    def _get(self, at: int) -> int:
        return int(struct.unpack_from("<q", self._page, at)[0])

    def _set(self, at: int, value: int) -> None:
        struct.pack_into("<q", self._page, at, value)


COUNTING = 1 << 30
"""Armed at this, a daemon never ends, and the points that it passes are listed in `Points.log`."""
