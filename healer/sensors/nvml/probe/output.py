"""Lines to the daemon."""

import json
import os
import threading
import time
from typing import Any

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Output:
    """Thread-safe; each line is written whole. When nobody reads any more, lines are dropped and `gone` is set: the end of
    the process is the main thread's, which closes NVML first."""

    def __init__(self, fd: int) -> None:
        self.gone = False
        self._fd, self._lock = fd, threading.Lock()

    def say(self, kind: str, /, **fields: Any) -> None:
        line = (_encode({"t": kind, "at": time.monotonic(), **fields}) + "\n").encode()
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except BrokenPipeError:
                self.gone = True
