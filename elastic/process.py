"""Processes by pid and start time, so that a recycled pid is never taken for ours; read from /proc (Linux)."""

import os
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

GONE = "X"
"""No such process, or one whose main thread is exiting (PF_EXITING) and can never return."""

ENDED = frozenset((GONE, "Z", "x"))
"""States of a process that runs no more."""

_PF_EXITING = 0x4

FIRST_NICE = -10
"""Of a daemon that must get a core at once: on two busy cores a woken thread waited up to 7 ms for one."""


def stat(pid: int) -> tuple[str, int] | None:
    """State letter (GONE for an exiting one) and start time (clock ticks since boot) of a process, or None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # the command in parentheses may itself contain blanks and parentheses
    fields = text[text.rindex(")") + 2 :].split()
    letter = GONE if int(fields[6]) & _PF_EXITING and fields[0] != "Z" else fields[0]
    return letter, int(fields[19])


def start_time(pid: int) -> int:
    """Field 22 of /proc/<pid>/stat; 0 when the process is gone."""
    found = stat(pid)
    return found[1] if found else 0


def state(pid: int, pid_start: int) -> str:
    """State letter of exactly this process; GONE when it ended or its pid was given to another."""
    found = stat(pid)
    return found[0] if found and found[1] == pid_start else GONE


def is_alive(pid: int, pid_start: int) -> bool:
    """False for a zombie too, and for one on its way out: it serves nobody."""
    return state(pid, pid_start) not in ENDED


def send_signal(pid: int, pid_start: int, signum: signal.Signals) -> bool:
    """Signal exactly this process; False when it is gone. The pidfd is opened before the check, so the process that is
    checked is the process that is signalled."""
    try:
        fd = os.pidfd_open(pid)
    except (ProcessLookupError, OSError):
        return False
    try:
        if state(pid, pid_start) == GONE:
            return False
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def ordinary(command: Sequence[str]) -> list[str]:
    """The command, to be started at ordinary priority: a child inherits the nice value of who starts it, and the daemon's own
    threads go before the processes that it watches."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    # what cannot be started must fail as it is, and not as an error of `nice`
    known = own < 0 and shutil.which("nice") and shutil.which(command[0])
    return ["nice", "-n", str(-own), *command] if known else [*command]


def go_first() -> bool:
    """Have this thread, and those that it will start, run before ordinary ones. False where the user may not."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), FIRST_NICE)
    except PermissionError:
        return False
    return True
