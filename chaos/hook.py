"""Where a scenario and the daemon that it hurts meet: a folder of files and a socket.

A scenario arms *points*, states of the executor's sequences. When the daemon comes to one it connects to the socket, says which,
and stands still until it is let go: so a fault can be put exactly there, whatever kind it is. Between points nothing is
slowed down.
"""

import contextlib
import mmap
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

FOLDER_VARIABLE = "HEALER_CHAOS_HOOKS"
ARMED, EVENTS, SOCKET, CLOCK, DISK, GPUS = "armed.json", "events.jsonl", "socket", "clock", "disk", "gpus.json"
ANY = "any"
ENDING_S = 10.0
"""For a fault that is being put in place when the hook is closed."""


class Point(msgspec.Struct, frozen=True):
    """A state. The steps are those of `elastic.controller.phases.Step`; besides ``ended`` (a sequence has ended), and, without a
    sequence, ``rank-gone`` (a death was seen, nothing has been decided)."""

    sequence: str
    """form, loss, join, retire, or ``any``; empty with ``rank-gone``."""
    step: str

    def fits(self, here: "Point") -> bool:
        return self.step == here.step and self.sequence in (ANY, here.sequence)

    def __str__(self) -> str:
        return f"{self.sequence} reaches {self.step}" if self.sequence else f"{self.step}"


class Reached(msgspec.Struct, frozen=True):
    point: Point
    epoch: int
    """As last raised."""
    slots: tuple[int, ...]
    """Of the sequence: lost, joining or leaving."""
    daemon_pid: int


class Gpus(msgspec.Struct, frozen=True):
    """The stand-in for NVML that a daemon shall load."""

    library: str
    root: str
    kernel_log: str
    environment: dict[str, str]


class Hook:
    """The scenario's side. Close it. `on_point` is called in a thread of its own, while the daemon stands; the daemon goes on when
    it returns."""

    def __init__(self, folder: Path, on_point: Callable[[Reached], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.on_point = on_point
        clock = folder / CLOCK
        clock.write_bytes(struct.pack("<d", 0.0))
        with clock.open("r+b") as file:
            self._clock = mmap.mmap(file.fileno(), 8)
        self.arm(())
        (folder / SOCKET).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen(8)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="chaos hook", daemon=True)
        self._thread.start()

    @property
    def events(self) -> Path:
        """What the executors of all daemons said, as lines of `chaos.records.SequenceLine`."""
        return self.folder / EVENTS

    def arm(self, points: tuple[Point, ...]) -> None:
        """Instead of those that were armed."""
        part = self.folder / f".{ARMED}.part"
        part.write_bytes(msgspec.json.encode(points))
        part.replace(self.folder / ARMED)

    def jump(self, by_s: float) -> None:
        """Put the daemon's wall clock off by so much from the true time."""
        struct.pack_into("<d", self._clock, 0, by_s)

    def slow_disk(self, by_s: float) -> None:
        """Let each wait for the disk take so much longer; 0: not any more."""
        if by_s:
            (self.folder / DISK).write_text(str(by_s))
        else:
            (self.folder / DISK).unlink(missing_ok=True)

    def close(self) -> None:
        self._closed = True
        # else the thread would stand in accept for ever, and could come to serve whoever gets its descriptor next
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(ENDING_S)
        self._listener.close()
        (self.folder / SOCKET).unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.settimeout(2.0)
                    reached = msgspec.json.decode(connection.makefile("rb").readline(), type=Reached)
                    self.on_point(reached)
                    connection.sendall(b"g")
                except (OSError, msgspec.MsgspecError):
                    print(
                        f"chaos hook: a daemon could not be heard: {traceback.format_exc()}",
                        file=sys.stderr,
                        flush=True,
                    )
