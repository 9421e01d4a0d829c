"""The daemon with hooks: `python -m chaos.hooked_daemon --policy FILE`, with the hooks' folder in HEALER_CHAOS_HOOKS.

It is `healer run` over the same target, through which each event of the executor passes once more: it is written down at once,
and at a state that somebody waits for (see `chaos.hook`) the daemon stands still until the fault is there. What a machine
without GPUs lacks comes from the folder too: a stand-in for NVML, a kernel log, a wall clock that can jump, a slow disk.
"""

import argparse
import contextlib
import functools
import json
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from chaos.hook import ARMED, CLOCK, DISK, EVENTS, FOLDER_VARIABLE, GPUS, SOCKET, Gpus, Point, Reached
from chaos.hosts import HOSTS, Made, interpreter_of
from chaos.records import DaemonEvent, PhaseEvent, ReportEvent, SequenceLine
from elastic.controller.records import BootFailed, Event, Fenced, PhaseBegan, RankGone, SequenceEnded
from elastic.errors import ElasticError
from healer import daemon, logs
from healer.authority import Authority
from healer.clock import Clock, SystemClock
from healer.policy.load import load_policy
from healer.policy.schema import Policy
from healer.targets import Target

WAIT_S = 10.0
"""The longest that the daemon stands at a point: whoever armed it may be gone."""


class JumpingClock(SystemClock):
    """Its wall clock is off by what stands in a file."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 8)

    def wall(self) -> float:
        offset_s: float = struct.unpack_from("<d", self._page)[0]
        return time.time() + offset_s


class Tap:
    """Between executor and daemon. Called in the daemon's loop."""

    def __init__(self, folder: Path, on_event: Callable[[Event], None]) -> None:
        self._folder, self._on_event = folder, on_event
        self._pid = os.getpid()
        self._encoder = msgspec.json.Encoder()
        self._file = os.open(folder / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._epoch = 0
        self._write(DaemonEvent(at=time.monotonic(), daemon_pid=self._pid, what="began"))

    def __call__(self, event: Event) -> None:
        line = self._line(event)
        if line is not None:
            self._write(line)
            if (reached := self._reached(event)) is not None:
                self._stand(reached)
        self._on_event(event)

    def _line(self, event: Event) -> SequenceLine | None:
        pid = self._pid
        match event:
            case PhaseBegan(kind, phase, epoch, slots, at):
                return PhaseEvent(at=at, daemon_pid=pid, kind=kind, phase=phase, epoch=epoch, slots=slots)
            case SequenceEnded(report):
                return ReportEvent(at=report.ended, daemon_pid=pid, report=report)
            case RankGone(member, witness, _, at):
                what, slot, incarnation = "rank-gone", member.slot, member.incarnation
                return DaemonEvent(
                    at=at,
                    daemon_pid=pid,
                    what="rank-gone",
                    slot=slot,
                    incarnation=incarnation,
                    text=f"{what}: {witness}",
                )
            case BootFailed(slot, incarnation, why, _, _, at):
                return DaemonEvent(
                    at=at, daemon_pid=pid, what="boot-failed", slot=slot, incarnation=incarnation, text=why
                )
            case Fenced(why, at):
                return DaemonEvent(at=at, daemon_pid=pid, what="fenced", text=why)
        return None

    def _reached(self, event: Event) -> Reached | None:
        """The point that the event is, where it is armed."""
        match event:
            case PhaseBegan(kind, phase, epoch, slots, _):
                self._epoch = epoch
                here = Point(sequence=kind, step=phase)
            case SequenceEnded(report):
                here, slots = Point(sequence=report.kind, step="ended"), report.slots
            case RankGone(member):
                here, slots = Point(sequence="", step="rank-gone"), (member.slot,)
            case _:
                return None
        if not any(armed.fits(here) for armed in self._points()):
            return None
        return Reached(point=here, epoch=self._epoch, slots=slots, daemon_pid=self._pid)

    def _points(self) -> tuple[Point, ...]:
        try:
            return msgspec.json.decode((self._folder / ARMED).read_bytes(), type=tuple[Point, ...])
        except (OSError, msgspec.MsgspecError) as error:
            _complain(f"cannot read what is armed: {error!r}")
            return ()

    def _stand(self, reached: Reached) -> None:
        try:
            with socket.socket(socket.AF_UNIX) as there:
                there.settimeout(WAIT_S)
                there.connect(str(self._folder / SOCKET))
                there.sendall(self._encoder.encode(reached) + b"\n")
                if not there.recv(1):
                    _complain(f"was let go from {reached.point} without a word")
        except OSError as error:
            _complain(f"cannot stand at {reached.point}: {error!r}")

    def _write(self, line: SequenceLine) -> None:
        os.write(self._file, self._encoder.encode(line) + b"\n")


def _complain(what: str) -> None:
    """In the daemon's log: a scenario whose fault does not come must not leave people guessing."""
    print(f"chaos hook: {what}", file=sys.stderr, flush=True)


def _install(folder: Path) -> None:
    clock = JumpingClock(folder / CLOCK)
    daemon.__dict__["SystemClock"] = lambda: clock
    _slow_disk(folder / DISK)
    if (folder / GPUS).exists():
        gpus = msgspec.json.decode((folder / GPUS).read_bytes(), type=Gpus)
        daemon.__dict__["this_machine"] = lambda clock, *_: _machine(clock, gpus)


def _slow_disk(path: Path) -> None:
    """Each wait for the disk takes as many seconds longer as stand in the file."""
    for name in ("fsync", "fdatasync"):
        real: Callable[[int], None] = getattr(os, name)

        def slow(fd: int, real: Callable[[int], None] = real) -> None:
            with contextlib.suppress(OSError, ValueError):
                time.sleep(float(path.read_text()))
            real(fd)

        setattr(os, name, slow)


def _machine(clock: Clock, gpus: Gpus) -> Any:
    from healer.identity import IdentityMap
    from healer.machine import GpuMachine, catalogue
    from healer.sensors.kernel_log import KernelLogSensor
    from healer.sensors.nvml import NvmlConfig, NvmlSensor

    config = NvmlConfig(
        fast_s=0.2,
        medium_s=0.5,
        slow_s=1.0,
        deadline_s=1.0,
        library_dir=Path(gpus.library),
        environment=gpus.environment,
    )
    nvml = NvmlSensor(clock, config, IdentityMap(), root=Path(gpus.root))
    log = KernelLogSensor(clock, path=Path(gpus.kernel_log), identity=nvml.identity)
    return GpuMachine(nvml, (log,), catalogue())


def _between_hosts(folder: Path) -> daemon.TargetMaker | None:
    """Of a group whose ranks are in network namespaces."""
    if not (folder / HOSTS).exists():
        return None
    from elastic.controller.executor import Executor
    from elastic.launch.base import Launched
    from elastic.launch.local import LocalLauncher
    from healer.targets.embedded import EmbeddedTarget

    count = len(msgspec.json.decode((folder / HOSTS).read_bytes(), type=Made).namespaces)

    class HostLauncher(LocalLauncher):
        def launch(self, slot: int, incarnation: int) -> Launched:
            own, sys.executable = sys.executable, str(folder / interpreter_of(slot % count))
            try:
                return super().launch(slot, incarnation)
            finally:
                sys.executable = own

    def make(policy: Policy, on_event: Callable[[Event], None], authority: Authority) -> Target:
        config = policy.group()
        executor = functools.partial(Executor, launcher=HostLauncher(config))
        return EmbeddedTarget(config, on_event, executor, authority=authority)  # type: ignore[arg-type]

    return make


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.hooked_daemon", description="The daemon, for chaos runs.")
    parser.add_argument("--policy", type=Path, required=True)
    given = parser.parse_args()
    folder = Path(os.environ[FOLDER_VARIABLE])
    logs.configure("json", "info")

    def make_target(policy: Policy, on_event: Callable[[Event], None], authority: Authority) -> Target:
        tap = Tap(folder, on_event)
        return daemon.of_kind(policy, tap, authority) if between is None else between(policy, tap, authority)

    between = _between_hosts(folder)
    try:
        _install(folder)
        daemon.run(load_policy(given.policy), make_target, policy_file=given.policy)
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except json.JSONDecodeError as error:
        print(f"error: {folder}: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
