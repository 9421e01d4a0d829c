"""Resources of ranks that run short: memory until the kernel's OOM killer comes, and processor time.

Where this user may, a control group of its own is made for the rank (version 1 or 2), so that nothing else can be hit; it is
removed again. Without that right the OOM is the limit of the process's address space (its next large allocation fails), and
the slow processor is SIGSTOP and SIGCONT in turn.
"""

import contextlib
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from chaos.injectors.base import Done, Family, OfRanks, Place, members_in
from chaos.injectors.within import tell
from elastic import process
from elastic.errors import ElasticError
from elastic.view import Member

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
SLICE_S = 0.02
"""Of SIGSTOP and SIGCONT in turn: short against `stallAfter`, long against a context switch."""
OOM_S = 5.0
LEFT_BYTES = 4 << 20


class Oom(OfRanks):
    """Memory is taken away until the kernel ends the process."""

    family: ClassVar[Family] = "resources"
    kind: Literal["oom"]

    def inject(self, place: Place) -> Done:
        members = members_in(place.run_dir, self.chosen(place))
        at, undo = time.monotonic(), ""
        for member in members:
            group = Group.make(member, "memory")
            if group is None:
                _limit_addresses(member)
                continue
            try:
                group.starve()
                # a rank that serves takes no new memory by itself
                with contextlib.suppress(ElasticError):
                    tell(place.run_dir, [member], "host-memory")
                _await_end(member)
            finally:
                group.remove()
        return Done(
            at=at,
            members=members,
            undo=undo,
            must_be_replaced=True,
            parameters={"slots": [m.slot for m in members]},
        )


class Throttle(OfRanks):
    """The rank gets only a share of one core: a noisy neighbour, a machine that swaps."""

    family: ClassVar[Family] = "resources"
    lasts: ClassVar[bool] = True
    kind: Literal["throttle"]
    share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    is_fault: bool = False
    """Whether healing may remove the rank for it."""

    def inject(self, place: Place) -> Done:
        members = members_in(place.run_dir, self.chosen(place))
        at, made = time.monotonic(), list[Group | Cycle]()
        for member in members:
            group = Group.make(member, "cpu")
            if group is not None:
                group.throttle(self.share)
                made.append(group)
            else:
                made.append(Cycle(member, self.share))

        def release() -> None:
            for one in made:
                one.remove()

        return Done(
            at=at,
            members=members,
            undo="removes the control group, or ends the SIGSTOPs",
            take_back=release,
            must_be_replaced=self.is_fault,
            parameters={"slots": [m.slot for m in members]},
        )


class Group:
    """A control group with one process in it."""

    def __init__(self, path: Path, back: Path, member: Member, version: int) -> None:
        self._path, self._back, self._member, self._version = path, back, member, version

    @classmethod
    def make(cls, member: Member, controller: str) -> "Group | None":
        """None: this user may not, or the controller is not there."""
        two = (ROOT / "cgroup.controllers").exists()
        parent = ROOT if two else ROOT / controller
        path = parent / f"healer-chaos-{os.getpid()}-{member.slot}.{member.incarnation}"
        try:
            if two and controller not in (ROOT / "cgroup.subtree_control").read_text().split():
                return None
            path.mkdir()
        except OSError:
            return None
        group = cls(path, _home(member.pid, parent, "" if two else controller), member, 2 if two else 1)
        try:
            (path / "cgroup.procs").write_text(str(member.pid))
            if not process.is_alive(member.pid, member.pid_start):
                raise ElasticError(f"{member}: ended before it could be limited")
        except (OSError, ElasticError):
            group.remove()
            return None
        return group

    def starve(self) -> None:
        """Let the kernel find no room for the next page: pages from before are charged elsewhere, so the limit is tiny."""
        if self._version == 2:
            (self._path / "memory.max").write_text("0")
            return
        limit = self._path / "memory.limit_in_bytes"
        try:
            limit.write_text(str(64 << 10))
        except OSError:
            # more than that is in use by now and cannot be given back
            used = int((self._path / "memory.usage_in_bytes").read_text())
            limit.write_text(str(used + LEFT_BYTES))

    def throttle(self, share: float) -> None:
        quota = max(1000, int(share * PERIOD_US))
        if self._version == 2:
            (self._path / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            return
        (self._path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._path / "cpu.cfs_quota_us").write_text(str(quota))

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            (self._back / "cgroup.procs").write_text(str(self._member.pid))
        end = time.monotonic() + 2.0
        while True:
            try:
                self._path.rmdir()
                return
            except OSError:
                if time.monotonic() > end:
                    return
                time.sleep(0.01)


def _home(pid: int, parent: Path, controller: str) -> Path:
    """The control group that a process is in, below `parent`; `parent` itself where that cannot be read."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                return parent / path.lstrip("/")
    return parent


class Cycle:
    """SIGSTOP and SIGCONT in turn, by a thread."""

    def __init__(self, member: Member, share: float) -> None:
        self._member, self._share = member, share
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"throttle {member.slot}", daemon=True)
        self._thread.start()

    def remove(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        pid, start = self._member.pid, self._member.pid_start
        try:
            while not self._over.is_set() and process.send_signal(pid, start, signal.SIGSTOP):
                self._over.wait(SLICE_S * (1 - self._share) / self._share)
                process.send_signal(pid, start, signal.SIGCONT)
                self._over.wait(SLICE_S)
        finally:
            process.send_signal(pid, start, signal.SIGCONT)


def _limit_addresses(member: Member) -> None:
    """The next large allocation fails, which no step of a rank survives."""
    soft, hard = resource.prlimit(member.pid, resource.RLIMIT_AS)
    try:
        resource.prlimit(member.pid, resource.RLIMIT_AS, (1 << 20, hard))
    except (OSError, ValueError) as error:
        raise ElasticError(f"{member}: its memory cannot be limited ({error}); soft limit {soft}") from None


def _await_end(member: Member) -> None:
    end = time.monotonic() + OOM_S
    while process.is_alive(member.pid, member.pid_start):
        if time.monotonic() > end:
            raise ElasticError(f"{member}: lives {OOM_S:g} s after its memory was taken away")
        time.sleep(0.005)
