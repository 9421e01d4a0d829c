"""Faults that hit a simulated group at a chosen step of a sequence: the daemon's process sends the signal itself, so that it
comes exactly there."""

import os
import signal
from pathlib import Path

import msgspec

from elastic.controller.state import GroupState
from elastic.errors import ElasticError
from elastic.paths import read_json, state_path


class Fault(msgspec.Struct, frozen=True):
    at: str
    """What a point's label begins with, as "step join load"."""
    slot: int
    signum: int = signal.SIGKILL
    later: int = 0
    """So many points after it."""


def write(path: Path, faults: list[Fault]) -> None:
    path.write_bytes(msgspec.json.encode(faults))


class Planned:
    """In the daemon: carries the faults out in their order, each once."""

    def __init__(self, path: Path, run_dir: Path) -> None:
        self._path, self._run_dir = path, run_dir
        self._wait = -1

    def consider(self, label: str) -> None:
        try:
            faults = msgspec.json.decode(self._path.read_bytes(), type=list[Fault])
        except FileNotFoundError:
            return
        if not faults:
            return
        if self._wait < 0 and label.startswith(faults[0].at):
            self._wait = faults[0].later
        elif self._wait > 0:
            self._wait -= 1
        if self._wait == 0:
            self._wait = -1
            write(self._path, faults[1:])
            self._send(faults[0])

    def _send(self, fault: Fault) -> None:
        try:
            members = read_json(state_path(self._run_dir), GroupState).members
        except ElasticError:
            return
        for member in members:
            if member.slot == fault.slot:
                try:
                    os.kill(member.pid, fault.signum)
                except ProcessLookupError:
                    continue
