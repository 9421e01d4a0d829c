"""The daemon itself: killed, stopped, two at once, its clock and its disk; and orders that an operator gives meanwhile."""

import os
import signal
import sqlite3
import threading
import time
from contextlib import closing
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from chaos.hook import Hook
from chaos.injectors.base import Daemons, Done, Duration, Family, Injector, Place
from elastic.errors import ElasticError


class _OfDaemon(Injector):
    family: ClassVar[Family] = "daemon"
    needs: ClassVar[tuple[str, ...]] = ("daemons",)

    def daemon(self, place: Place) -> tuple[Daemons, int]:
        self.checked(place)
        assert place.daemons is not None
        pid = place.daemons.pid()
        if not pid:
            raise ElasticError(f"{self.kind}: no daemon runs")
        return place.daemons, pid


class DaemonKill(_OfDaemon):
    """SIGKILL to the daemon; the next is started after `away`, as a service manager would."""

    kind: Literal["daemon-kill"]
    away_s: Annotated[float, Field()] = 0.0

    def inject(self, place: Place) -> Done:
        daemons, pid = self.daemon(place)
        at = time.monotonic()
        daemons.kill()
        if self.away_s:
            later = threading.Timer(self.away_s, daemons.start)
            later.daemon = True
            later.start()
        else:
            daemons.start()
        return Done(at=at, daemon_pid=pid)


class DaemonStop(_OfDaemon):
    """SIGSTOP to the daemon: it sees nothing for a while and wakes with a late view of the world."""

    lasts: ClassVar[bool] = True
    kind: Literal["daemon-stop"]

    def inject(self, place: Place) -> Done:
        _, pid = self.daemon(place)
        at = time.monotonic()
        os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return

        return Done(at=at, daemon_pid=pid, undo=f"kill -CONT {pid}", take_back=go_on)


class DaemonSecond(_OfDaemon):
    """A second daemon with the same policy: it must be refused, or wait for the lease."""

    kind: Literal["daemon-second"]

    def inject(self, place: Place) -> Done:
        daemons, _ = self.daemon(place)
        at = time.monotonic()
        return Done(at=at, daemon_pid=daemons.start_second())


class DiskFull(Injector):
    """No room is left where the group keeps its files. Only a file system of the run's own is filled, with one file."""

    family: ClassVar[Family] = "disk"
    needs: ClassVar[tuple[str, ...]] = ("own_disk",)
    lasts: ClassVar[bool] = True
    kind: Literal["disk-full"]

    def inject(self, place: Place) -> Done:
        self.checked(place)
        assert place.own_disk is not None
        if not place.own_disk.is_mount():
            raise ElasticError(f"{place.own_disk}: is no file system of its own, so it is not filled")
        balloon, at, block = place.own_disk / "balloon", time.monotonic(), b"\0" * (1 << 20)
        with balloon.open("wb", buffering=0) as file:
            while block:
                try:
                    file.write(block)
                except OSError:
                    block = block[: len(block) // 2]
        return Done(at=at, undo=f"rm {balloon}", take_back=lambda: balloon.unlink(missing_ok=True))


class DiskSlow(Injector):
    """Each wait of the daemon for the disk takes `delay` longer."""

    family: ClassVar[Family] = "disk"
    needs: ClassVar[tuple[str, ...]] = ("hook",)
    lasts: ClassVar[bool] = True
    kind: Literal["disk-slow"]
    delay_s: Duration = 1.0

    def inject(self, place: Place) -> Done:
        self.checked(place)
        hook: Hook | None = place.hook
        assert hook is not None
        at = time.monotonic()
        hook.slow_disk(self.delay_s)
        return Done(at=at, undo="the disk is as fast as it is", take_back=lambda: hook.slow_disk(0.0))


class JournalLocked(Injector):
    """Somebody has the journal open in a transaction: nothing can be written to it."""

    family: ClassVar[Family] = "disk"
    lasts: ClassVar[bool] = True
    kind: Literal["journal-locked"]

    def inject(self, place: Place) -> Done:
        path = place.run_dir / "journal.db"
        if not path.exists():
            raise ElasticError(f"{path}: no journal")
        at, over = time.monotonic(), threading.Event()
        held = threading.Event()

        def hold() -> None:
            with closing(sqlite3.connect(path, timeout=2.0, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                held.set()
                over.wait()
                connection.execute("ROLLBACK")

        holder = threading.Thread(target=hold, name="journal lock", daemon=True)
        holder.start()
        if not held.wait(3.0):
            raise ElasticError(f"{path}: could not be locked")

        def release() -> None:
            over.set()
            holder.join(2.0)

        return Done(at=at, undo="ends the transaction", take_back=release)


class ClockJump(Injector):
    """The daemon's wall clock is off by `by` seconds, such as after a wrong time server; negative: it goes back."""

    family: ClassVar[Family] = "clock"
    needs: ClassVar[tuple[str, ...]] = ("hook",)
    lasts: ClassVar[bool] = True
    kind: Literal["clock-jump"]
    by_s: float = 3600.0

    def inject(self, place: Place) -> Done:
        self.checked(place)
        hook: Hook | None = place.hook
        assert hook is not None
        at = time.monotonic()
        hook.jump(self.by_s)
        return Done(at=at, undo="sets the clock right", take_back=lambda: hook.jump(0.0))


class _Order(_OfDaemon):
    """No fault: something that happens meanwhile."""

    family: ClassVar[Family] = "operator"

    def path(self) -> str:
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        raise NotImplementedError

    def inject(self, place: Place) -> Done:
        daemons, pid = self.daemon(place)
        at = time.monotonic()
        daemons.order(self.path(), self.body())
        return Done(at=at, daemon_pid=pid)


class Scale(_Order):
    """`healer scale`: to so many ranks, or to these slots."""

    kind: Literal["scale"]
    ranks: Annotated[int, Field(ge=1, le=4096)]

    def path(self) -> str:
        return "/scale"

    def body(self) -> dict[str, Any]:
        return {"ranks": self.ranks}


class Order(_Order):
    """Any other order of the daemon's API, such as /drain with {slots: [1]}."""

    kind: Literal["order"]
    call: str
    with_: Annotated[dict[str, Any], Field(alias="with", default_factory=dict)]

    def path(self) -> str:
        return self.call

    def body(self) -> dict[str, Any]:
        return self.with_
