"""The service manager's side of the daemon (`sd_notify(3)`): ready, alive, stopping. Without a service manager it does nothing.

The watchdog is fed by the supervisor's loop and by nothing else: a daemon whose API still answers while its loop stands
must be restarted. Half of `WatchdogSec` lies between two signs of life, as systemd recommends.
"""

import contextlib
import os
import socket
from collections.abc import Mapping

MICROSECONDS = 1e-6


class Notifier:
    """Datagrams to the socket that systemd names in the environment. Never blocks and never raises."""

    def __init__(self, environment: Mapping[str, str] = os.environ, pid: int | None = None) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        self._socket: socket.socket | None = None
        if self._address:
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
        self.watchdog_s = _watchdog_s(environment, os.getpid() if pid is None else pid) if self._socket else 0.0
        """Between two signs of life; 0: nobody waits for them."""
        self._next = 0.0
        self._said = ""

    def ready(self, sentence: str) -> None:
        self._send(f"READY=1\nSTATUS={_line(sentence)}")

    def status(self, sentence: str) -> None:
        """What `systemctl status` shows."""
        if sentence != self._said:
            self._said = sentence
            self._send(f"STATUS={_line(sentence)}")

    def alive(self, now: float) -> None:
        """Called in each round of the loop, with its monotonic time."""
        if self.watchdog_s and now >= self._next:
            self._next = now + self.watchdog_s
            self._send("WATCHDOG=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _send(self, text: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(text.encode(), self._address)


def _watchdog_s(environment: Mapping[str, str], pid: int) -> float:
    if environment.get("WATCHDOG_PID", str(pid)) != str(pid):
        return 0.0
    try:
        return int(environment.get("WATCHDOG_USEC", "0")) * MICROSECONDS / 2
    except ValueError:
        return 0.0


def _line(text: str) -> str:
    return " ".join(text.split())[:500]
