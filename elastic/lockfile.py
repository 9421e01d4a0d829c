"""Lock files: one owner of a directory at a time. The kernel drops the lock with the process, however that ends."""

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import IO

from elastic.errors import ElasticError

PATIENCE_S = 0.5
"""A killed process is a zombie, for whoever restarts it, before its last thread has closed its files: under load tens of
milliseconds pass."""
POLL_S = 0.005


class Held(ElasticError):
    """Another process has the lock. `holder`: its pid as it wrote it, or "unknown"."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path}: held by another process (pid {holder})")
        self.holder = holder


def claim(path: Path) -> IO[str]:
    """Take the lock; closing the file lets it go. Raises Held after `PATIENCE_S`, and OSError where the file cannot be
    opened."""
    file = path.open("a+")
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() - began > PATIENCE_S:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                file.close()
                raise Held(path, holder) from None
            time.sleep(POLL_S)
        else:
            break
    # a hint for whoever is refused: a full disk must not keep the owner away
    with contextlib.suppress(OSError):
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), str(os.getpid()).encode())
    return file
