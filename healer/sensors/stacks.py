"""Where a rank stands that makes no progress: its Python stacks, without stopping it and without trusting it.

py-spy where it is installed: it reads the process from outside, so it also works on one that holds the interpreter's lock or
is stopped. Else the rank's own faulthandler, which writes to its log on SIGUSR1; a process that does not catch that signal
would die of it and is left alone.
"""

import asyncio
import contextlib
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from elastic import process

_POLL_S = 0.02
_MAX_BYTES = 1 << 16


class Stack(msgspec.Struct, frozen=True):
    text: str
    frames: int
    how: str
    """"py-spy" or "faulthandler"."""


class NoStack(Exception):
    """Why there is none, in one sentence."""


def find_py_spy() -> str | None:
    """On PATH, or beside this interpreter."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if beside.exists() else None)


async def capture(pid: int, pid_start: int, *, deadline_s: float, py_spy: str | None) -> Stack:
    """Of exactly this process. Raises NoStack, at the latest after `deadline_s`."""
    try:
        async with asyncio.timeout(deadline_s):
            if process.stat(pid) is None or process.start_time(pid) != pid_start:
                raise NoStack("the process is gone")
            return await (_from_outside(pid, py_spy) if py_spy else _from_within(pid, pid_start))
    except TimeoutError:
        raise NoStack(f"no answer within {deadline_s:g} s") from None


async def _from_outside(pid: int, py_spy: str) -> Stack:
    dump = await asyncio.create_subprocess_exec(
        py_spy,
        "dump",
        "--nonblocking",
        "--pid",
        str(pid),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await dump.communicate()
    finally:
        if dump.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                dump.kill()
            await dump.wait()
    if dump.returncode:
        said = errors.decode(errors="replace").strip().splitlines()
        raise NoStack(f"py-spy: {said[-1] if said else f'exit code {dump.returncode}'}")
    text = out.decode(errors="replace")
    return Stack(text, sum(line.startswith("    ") for line in text.splitlines()), "py-spy")


async def _from_within(pid: int, pid_start: int) -> Stack:
    if not _catches(pid, signal.SIGUSR1):
        raise NoStack("py-spy is not installed, and the process does not answer SIGUSR1")
    log = Path(f"/proc/{pid}/fd/2")
    try:
        info = log.stat()
        if not stat.S_ISREG(info.st_mode):
            raise NoStack("py-spy is not installed, and the process writes to no log file")
        with log.open("rb") as file:  # noqa: ASYNC230 (a local log)
            file.seek(info.st_size)
            process.send_signal(pid, pid_start, signal.SIGUSR1)
            text = await _until_quiet(file.read)
    except OSError as error:
        raise NoStack(f"its log cannot be read: {error}") from None
    return Stack(text, text.count('\n  File "'), "faulthandler")


async def _until_quiet(read: Callable[[int], bytes]) -> str:
    """Until a dump has come and nothing more follows."""
    text = b""
    while True:
        await asyncio.sleep(_POLL_S)
        more = read(_MAX_BYTES)
        text += more
        if not more and b"most recent call first" in text:
            return text[:_MAX_BYTES].decode(errors="replace")


def _catches(pid: int, signum: signal.Signals) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(mask >> (signum - 1) & 1)
