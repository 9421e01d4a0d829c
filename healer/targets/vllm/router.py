"""The router's process, as the daemon sees it: started where none runs, told who serves, found again after a restart."""

import os
import signal
import sys
import time
from pathlib import Path

import structlog

from elastic import process
from elastic.errors import ElasticError
from elastic.paths import read_json, write_json
from healer.policy.schema import Gateway
from healer.router.config import Limits, RankSpec, RouterConfig
from healer.router.files import Announcement
from healer.targets.vllm.processes import Processes

log = structlog.get_logger("healer.vllm")

NAME = "router"
START_S = 30.0
RESTART_PAUSE_S = 2.0


def routes_path(run_dir: Path) -> Path:
    return run_dir / "routes.json"


class RouterLink:
    """Owned by the target's loop. All methods return at once; `keep` is called with every poll."""

    def __init__(self, run_dir: Path, gateway: Gateway, processes: Processes, *, hold_s: float) -> None:
        self.trouble = "no router yet"
        self.http = ""
        self._run_dir, self._processes = run_dir, processes
        limits = Limits(hold_s=hold_s, max_queued=gateway.max_queued)
        self._config = RouterConfig(epoch=0, ranks=(), host=gateway.host, port=gateway.port, limits=limits)
        self._found: Announcement | None = None
        self._started: tuple[int, int, float] | None = None
        self._next_start = 0.0

    @property
    def epoch(self) -> int:
        """Of the newest file that is known here, or that the router has."""
        return max(self._config.epoch, self._found.epoch if self._found else 0)

    def route(self, epoch: int, ranks: tuple[RankSpec, ...]) -> None:
        """Write who serves and tell the router."""
        self._config = RouterConfig(
            epoch=epoch, ranks=ranks, host=self._config.host, port=self._config.port, limits=self._config.limits
        )
        try:
            write_json(routes_path(self._run_dir), self._config)
        except OSError as error:
            self.trouble = f"the router's file cannot be written: {error.strerror}"
            return
        self._tell()

    def look(self) -> None:
        """Read the announcement of a router that may run."""
        try:
            found = read_json(self._run_dir / "router.json", Announcement)
        except ElasticError:
            self._found = None
            return
        self._found = found if process.is_alive(found.pid, found.pid_start) else None

    def keep(self, *, start: bool) -> None:
        """Look after it, and start one where none runs, unless not `start`."""
        self.look()
        found, now = self._found, time.monotonic()
        if found is not None:
            self.http, self._started = found.http, None
            self.trouble = f"the router refused its file: {found.refused}" if found.refused else ""
            if 0 <= found.epoch < self._config.epoch:
                self._tell()
            return
        if self._started is not None:
            pid, pid_start, began = self._started
            if process.is_alive(pid, pid_start) and now - began < START_S:
                self.trouble = "the router starts"
                return
            self._started = None
            self.trouble = f"no router: {self._processes.last_words(NAME)}"
            log.error("router.ended", why=self.trouble)
            process.send_signal(pid, pid_start, signal.SIGKILL)
            self._next_start = now + RESTART_PAUSE_S
        if not start or now < self._next_start:
            return
        command = [sys.executable, "-m", "healer.router", "--config", str(routes_path(self._run_dir))]
        try:
            if not routes_path(self._run_dir).exists():
                write_json(routes_path(self._run_dir), self._config)
            launched = self._processes.launch(NAME, command, os.environ)
        except (ElasticError, OSError) as error:
            self.trouble, self._next_start = f"no router: {error}", now + RESTART_PAUSE_S
            return
        self._started = (launched.pid, launched.pid_start, now)

    def stop(self) -> None:
        """Ask it to end: it lets requests in flight end first."""
        self.look()
        if self._found is not None:
            process.send_signal(self._found.pid, self._found.pid_start, signal.SIGTERM)
        elif self._started is not None:
            process.send_signal(self._started[0], self._started[1], signal.SIGTERM)

    def _tell(self) -> None:
        self.look()
        if self._found is not None:
            process.send_signal(self._found.pid, self._found.pid_start, signal.SIGHUP)
