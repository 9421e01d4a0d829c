"""What a rank's log says that no endpoint does. Stock vLLM 0.33 reports failures of NIXL EP in two places only: lines of the
kernels on the worker's output, and the mask in the text of the exception that follows.

The words are those of vLLM 0.33.0 and NIXL EP 1.5.1.
"""

import os
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

READ_BYTES = 1 << 20
"""At most, at a time; what is older is skipped: a sign that is repeated thousands of times is one sign."""


class Sign(StrEnum):
    PEER_TIMEOUT = "timeout"
    """NIXL EP waited for a peer in vain, 30 s by default."""
    MASKED = "masked"
    """A step was run without a peer, and discarded."""
    EPLB_STOPPED = "eplb-stopped"
    """The thread that rebalances experts has ended: nothing else says so, and rebalancing stops for good."""
    FAULT = "fault"
    """The engine met a fault. The fault status says so too, but not behind the shut gates of a commit, which then never ends."""
    STICKY = "sticky"
    """An error of the CUDA context: every later call fails too, and no retry cures it."""


class Said(msgspec.Struct, frozen=True):
    sign: Sign
    peers: tuple[int, ...] = ()
    """EP ranks that are named: DP rank x TP size + TP rank."""
    text: str = ""


_TIMEOUT = re.compile(
    r"Nixl-?EP timeout for (?:dispatch|combine|barrier).*?\b(?:src_rank|dst_rank) (\d+)", re.IGNORECASE
)
_MASK = re.compile(r"Fault detected in EP all2all communication.*?\[([01, ]+)\]")
_EPLB = re.compile(r"async loop error \(Rank \d+\)")
_STICKY = re.compile(
    r"CUDA error: (?:an illegal memory access|unspecified launch failure|misaligned address|uncorrectable|device-side assert"
    r"|invalid program counter|an illegal instruction|hardware)|cudaError(?:NvlinkUncorrectable|ECCUncorrectable"
    r"|IllegalAddress|LaunchFailure)"
)
_FAULT = re.compile(r"\[FT\] Engine \d+ status -> UNHEALTHY")
_ANY = ("timeout for", "-> UNHEALTHY", "Fault detected", "async loop error", "CUDA error", "cudaError")
SHOWN_CHARS = 200


def read_line(line: str) -> Said | None:
    """None: nothing of interest."""
    if not any(word in line for word in _ANY):
        return None
    text = line.strip()[-SHOWN_CHARS:]
    if found := _TIMEOUT.search(line):
        return Said(Sign.PEER_TIMEOUT, (int(found[1]),), text)
    if found := _MASK.search(line):
        flags = re.findall(r"[01]", found[1])
        return Said(Sign.MASKED, tuple(i for i, flag in enumerate(flags) if flag == "1"), text)
    if _EPLB.search(line):
        return Said(Sign.EPLB_STOPPED, (), text)
    if _FAULT.search(line):
        return Said(Sign.FAULT, (), text)
    return Said(Sign.STICKY, (), text) if _STICKY.search(line) else None


class LogTail:
    """The new lines of one log, from where it stood when this was made. A file that was cut is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest = path, b""
        self._at = self._size()

    def new(self) -> Iterator[Said]:
        size = self._size()
        if size < self._at:
            self._at, self._rest = 0, b""
        if size == self._at:
            return
        if size - self._at > READ_BYTES:
            self._at, self._rest = size - READ_BYTES, b""
        try:
            with self._path.open("rb") as log:
                log.seek(self._at)
                data = log.read(READ_BYTES)
        except OSError:
            return
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-4096:]
        for line in lines:
            if said := read_line(line.decode(errors="replace")):
                yield said

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:
            return 0
