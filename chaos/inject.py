"""Faults for the ranks of one group, by slot.

Only a process that the group's run directory lists as a rank is ever signalled, and only while both its pid and its start
time match: a pid that the kernel has given to another process since is refused. Every slot is checked before the first
signal is sent, so a refused injection has done nothing.
"""

import shlex
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from elastic import process
from elastic.controller.state import GroupState
from elastic.errors import ElasticError, Retryable
from elastic.paths import config_path, fault_path, read_config, read_json, state_path
from elastic.view import Member

OwnFault = Literal["illegal-address", "misaligned-address", "device-assert", "gpu-memory", "context-freed", "stuck"]
"""A rank commits these itself, see `elastic.rank.faults`."""
FaultName = Literal["kill", "stop", "cont"] | OwnFault

_SIGNALS: dict[FaultName, signal.Signals] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "cont": signal.SIGCONT,
}
_POLL_S = 0.0005


class Injection(msgspec.Struct, frozen=True):
    """One fault that was given to one rank."""

    fault: FaultName
    member: Member
    state_before: str
    """One letter of /proc/<pid>/stat: "T" is stopped."""
    sent: float
    """Seconds of this host's monotonic clock, right before the signal."""
    undo: str | None
    """The command that takes it back, or None: a killed rank is for the daemon to replace."""


def kill(run_dir: Path, slots: Iterable[int]) -> tuple[Injection, ...]:
    """SIGKILL the ranks in `slots`, as a machine check or the kernel's OOM killer would.

    Raises ElasticError where a slot has no living rank; then nothing was sent.
    """
    return _inject("kill", run_dir, slots)


def stop(run_dir: Path, slots: Iterable[int]) -> tuple[Injection, ...]:
    """SIGSTOP the ranks in `slots`: they hang with their sockets open, like a rank in a stuck kernel. Raises as `kill`."""
    return _inject("stop", run_dir, slots)


def cont(run_dir: Path, slots: Iterable[int]) -> tuple[Injection, ...]:
    """SIGCONT the ranks in `slots`; harmless where they run. Raises as `kill`."""
    return _inject("cont", run_dir, slots)


def within(fault: FaultName, run_dir: Path, slots: Iterable[int]) -> tuple[Injection, ...]:
    """Have the ranks in `slots` commit a fault themselves.

    Raises ElasticError as `kill`, and where the group's configuration does not allow it.
    """
    if not read_config(config_path(run_dir)).fault_injection:
        raise ElasticError(f"{config_path(run_dir)}: faultInjection is not set, so its ranks commit no faults")
    return _inject(fault, run_dir, slots)


def living_ranks(run_dir: Path) -> dict[int, Member]:
    """The ranks that can be named, by slot: the newest living incarnation of each.

    Raises ElasticError where the run directory has no readable group state.
    """
    path = state_path(run_dir)
    if not path.exists():
        raise ElasticError(f"{path}: no such file, so no group runs here; name its run directory with --run-dir")
    members = sorted(read_json(path, GroupState).members, key=lambda m: (m.slot, m.incarnation))
    return {m.slot: m for m in members if process.is_alive(m.pid, m.pid_start)}


def await_effect(injections: Iterable[Injection], *, deadline_s: float) -> None:
    """Block until every injection shows in the process's state: dead, stopped, or no longer stopped.

    A rank that is gone counts as reached, whatever was sent: the daemon may have replaced it meanwhile. Raises Retryable,
    naming the first rank that the deadline has passed for.
    """
    end = time.monotonic() + deadline_s
    for injection in injections:
        while not _shows(injection):
            if time.monotonic() > end:
                raise Retryable(
                    f"{injection.member}: {injection.fault} was sent but shows no effect after {deadline_s} s"
                )
            time.sleep(_POLL_S)


def _inject(fault: FaultName, run_dir: Path, slots: Iterable[int]) -> tuple[Injection, ...]:
    ranks = living_ranks(run_dir)
    chosen = sorted(set(slots))
    absent = [slot for slot in chosen if slot not in ranks]
    if absent:
        there = ", ".join(map(str, ranks)) or "none"
        raise ElasticError(f"{run_dir}: no living rank in slot {', '.join(map(str, absent))}; slots with one: {there}")
    return tuple(_send(fault, run_dir, ranks[slot]) for slot in chosen)


def _send(fault: FaultName, run_dir: Path, member: Member) -> Injection:
    before = process.state(member.pid, member.pid_start)
    sent = time.monotonic()
    if fault not in _SIGNALS:
        _write(fault_path(run_dir, member.slot, member.incarnation), fault)
        there = process.is_alive(member.pid, member.pid_start)
    else:
        there = process.send_signal(member.pid, member.pid_start, _SIGNALS[fault])
    if not there:
        raise ElasticError(
            f"{member}: ended before it could be signalled; look at the group again with `healer status`"
        )
    undo = None
    if fault == "stop":
        undo = f"healer-chaos inject cont --slot {member.slot} --run-dir {shlex.quote(str(run_dir))}"
    return Injection(fault=fault, member=member, state_before=before, sent=sent, undo=undo)


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def _shows(injection: Injection) -> bool:
    member = injection.member
    if not process.is_alive(member.pid, member.pid_start):
        return True
    stopped = process.state(member.pid, member.pid_start) == "T"
    # what a rank commits itself shows in its log and in the group, not in its process's state
    return {"kill": False, "stop": stopped, "cont": not stopped}.get(injection.fault, True)
