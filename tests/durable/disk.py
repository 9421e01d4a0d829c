"""A disk that fails on demand, under the journal of one daemon: full, read-only, slow, or torn by a loss of power."""

import ctypes
import mmap
import os
import struct
import subprocess
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_name("disk.c")


class Mode(IntEnum):
    WELL = 0
    FULL = 1
    READ_ONLY = 2
    SLOW = 3
    """Each fsync takes the delay longer, of any file."""
    TORN = 4
    """Of the next long write only the first half arrives, and the process is killed."""


class Disk:
    def __init__(self, folder: Path) -> None:
        """Builds the library that is preloaded. Raises CalledProcessError with the compiler's words."""
        self._library, self._page_path = folder / "disk.so", folder / "disk"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", self._library, SOURCE, "-ldl"], check=True)
        self._page_path.write_bytes(bytes(mmap.PAGESIZE))
        with self._page_path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "DISK": str(self._page_path)}

    def is_(self, mode: Mode, *, delay_s: float = 0.0) -> None:
        words = ctypes.sizeof(ctypes.c_long)
        struct.pack_into("@q", self._page, 2 * words, 0)
        struct.pack_into("@q", self._page, 3 * words, int(delay_s * 1000))
        struct.pack_into("@q", self._page, 0, mode)

    @property
    def hits(self) -> int:
        """Calls that failed, or waited, because of it, since the mode was set."""
        return int(struct.unpack_from("@q", self._page, 2 * ctypes.sizeof(ctypes.c_long))[0])


def without() -> dict[str, str]:
    """An environment for processes that are to see the disk as it is."""
    return {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "DISK")}
