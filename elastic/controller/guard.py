"""The last check before anything is done to a process: a controller that may not act any more starts and ends nothing."""

import logging
from collections.abc import Callable
from pathlib import Path

from elastic.errors import Superseded
from elastic.launch.base import Launched, Launcher
from elastic.paths import socket_path

log = logging.getLogger(__name__)


class GuardedLauncher:
    """A `Launcher` for the executor's own parts. Ranks refuse the commands of an older controller themselves, but a signal,
    a launch or a removed file asks nobody."""

    def __init__(self, launcher: Launcher, why_not: Callable[[], str], root: Path) -> None:
        """`why_not`: asked at the last moment before each act; empty where this controller may act. `root`: the run
        directory."""
        self._launcher, self._why_not, self._root = launcher, why_not, root

    def launch(self, slot: int, incarnation: int) -> Launched:
        """Raises Superseded, as the others that start something, where this controller may not act."""
        self._check()
        started = self._launcher.launch(slot, incarnation)
        if (why := self._why_not()) and not Path(socket_path(self._root, slot, incarnation)).exists():
            # stopped for long since the check: whoever acts now cannot have met this process yet, and nobody waits for it
            log.warning("pid %d is ended, it was started too late: %s", started.pid, why)
            self._launcher.end(started)
        self._check()
        return started

    def launch_spare(self, number: int) -> Launched:
        self._check()
        return self._launcher.launch_spare(number)

    def launch_gateway(self) -> Launched:
        self._check()
        return self._launcher.launch_gateway()

    async def build_tier(self, *, deadline_s: float) -> None:
        self._check()
        await self._launcher.build_tier(deadline_s=deadline_s)

    def last_words(self, name: str) -> str:
        return self._launcher.last_words(name)

    def end(self, process: Launched) -> None:
        """Nothing, where this controller may not act: who does decides."""
        if why := self._why_not():
            log.warning("pid %d is left alone: %s", process.pid, why)
        else:
            self._launcher.end(process)

    def remove(self, path: str | Path) -> None:
        """Remove a file that a process has left; nothing, where this controller may not act."""
        if not self._why_not():
            Path(path).unlink(missing_ok=True)

    def strays(self) -> list[Launched]:
        return self._launcher.strays()

    async def ended(self, *, deadline_s: float) -> None:
        if not self._why_not():
            await self._launcher.ended(deadline_s=deadline_s)

    def _check(self) -> None:
        if why := self._why_not():
            raise Superseded(why)
