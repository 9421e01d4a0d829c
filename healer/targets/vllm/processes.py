"""The ranks' processes on this host: each `vllm serve` leads a session of its own, whose number is its pid. So all that it
starts is found by the session, whoever is left of it, and nothing else is ever signalled."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from elastic import process
from elastic.errors import ElasticError
from elastic.launch.base import Launched
from elastic.paths import log_path
from healer.targets.vllm.records import Part, Process

KEPT_LOGS = 5
"""Of earlier incarnations, for each slot."""
POLL_S = 0.1
TAIL_BYTES = 65536
GONE_S = 10.0
"""For the kernel to take a killed process down: a GPU's memory takes its time."""
_DEAD = frozenset("ZXx")


def log_name(slot: int, incarnation: int) -> str:
    return f"rank-{slot}.{incarnation}"


def free_port() -> int:
    """A port of loopback that nobody had a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def sessions(leaders: Collection[int], proc: Path = Path("/proc")) -> dict[int, list[Process]]:
    """All processes of these sessions, by the leader's pid, which the kernel gives to nobody else while one of them lives. One
    pass over /proc."""
    found: dict[int, list[Process]] = {leader: [] for leader in leaders}
    if not found:
        return found
    for entry in os.scandir(proc):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text()
        except OSError:
            continue
        fields = text[text.rindex(")") + 2 :].split()
        session = int(fields[3])
        if session in found:
            pid = int(entry.name)
            found[session].append(Process(pid, int(fields[19]), fields[0], _part(entry.path, pid == session)))
    return found


def _part(path: str, leads: bool) -> Part:
    """By the title that vLLM gives its processes: VLLM::EngineCore_DP0, VLLM::Worker_DP0_TP0, VLLM::DPCoordinator."""
    if leads:
        return Part.API
    try:
        title = Path(path, "cmdline").read_bytes().split(b"\0", 1)[0]
    except OSError:
        return Part.OTHER
    for word, part in ((b"Coordinator", Part.COORDINATOR), (b"EngineCore", Part.ENGINE), (b"Worker", Part.WORKER)):
        if word in title:
            return part
    return Part.OTHER


def alive(one: Process) -> bool:
    return one.state not in _DEAD


class Processes:
    """Owned by the target, used in its loop. Children of an earlier daemon are adopted by pid and start time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def launch(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], stdin: int = subprocess.DEVNULL
    ) -> Launched:
        """Start a process that survives this one. `stdin`: a file descriptor. Raises ElasticError when it cannot be started."""
        path = log_path(self._run_dir, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as log:
                child = subprocess.Popen(
                    process.ordinary(command),
                    stdin=stdin,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=dict(environment),
                    cwd=self._run_dir,
                )
        except OSError as error:
            raise ElasticError(f"{command[0]}: cannot be started: {error.strerror or error}") from error
        self._children[child.pid] = child
        return Launched(child.pid, process.start_time(child.pid))

    def reap(self) -> None:
        """Collect ended children, so that no zombie stays for the life of the daemon."""
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                del self._children[pid]

    async def fence(self, leaders: Iterable[Launched]) -> None:
        """SIGKILL to all that these API servers started, and to themselves, at once; returns when the kernel has taken them
        down, or after a deadline."""
        wanted = [one for one in leaders if one.pid]
        end = time.monotonic() + GONE_S
        while left := self._left(wanted):
            for one in left:
                process.send_signal(one.pid, one.pid_start, signal.SIGKILL)
            if time.monotonic() > end:
                return
            await asyncio.sleep(POLL_S)

    def kill(self, leader: Launched) -> None:
        """SIGKILL to this session, without waiting for its end."""
        for one in self._left([leader]):
            process.send_signal(one.pid, one.pid_start, signal.SIGKILL)

    async def end(self, leaders: Iterable[Launched], *, deadline_s: float) -> None:
        """SIGTERM to the API servers, which end their engines; what is left after the deadline is killed."""
        wanted = [one for one in leaders if one.pid]
        for one in wanted:
            process.send_signal(one.pid, one.pid_start, signal.SIGTERM)
        until = time.monotonic() + deadline_s
        while self._left(wanted) and time.monotonic() < until:  # noqa: ASYNC110 (others' children)
            await asyncio.sleep(POLL_S)
        await self.fence(wanted)

    def _left(self, leaders: Collection[Launched]) -> list[Process]:
        self.reap()
        # a leader that is gone, and whose pid another process got, leads no session of ours any more
        pids = {one.pid for one in leaders if not _is_another(one)}
        return [each for found in sessions(pids).values() for each in found if alive(each)]

    def last_words(self, name: str) -> str:
        """The last error in a log, else its last line."""
        try:
            with log_path(self._run_dir, name).open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
                lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError as error:
            return f"no log: {error.strerror}"
        errors = [line for line in lines if "Error" in line and "Traceback" not in line]
        return (errors or lines or ["ended without a word"])[-1][-300:]

    def tidy_logs(self, slot: int) -> None:
        """Remove the logs of all but the latest incarnations of a slot."""
        found = []
        for path in log_path(self._run_dir, "x").parent.glob(f"rank-{slot}.*.log*"):
            with contextlib.suppress(ValueError):
                found.append((int(path.name.split(".")[1]), path))
        kept = sorted({number for number, _ in found})[-KEPT_LOGS:]
        for number, path in found:
            if number not in kept:
                path.unlink(missing_ok=True)

    def cut_log(self, name: str, limit_bytes: int) -> bool:
        """A log that has grown beyond the limit becomes its `.1`, which it replaces, and starts anew. The rank goes on
        writing into the same file: what it writes in the moment between copy and cut is lost."""
        path = log_path(self._run_dir, name)
        try:
            if path.stat().st_size <= limit_bytes:
                return False
            with path.open("rb") as source, path.with_name(f"{path.name}.1").open("wb") as copy:
                while chunk := source.read(1 << 20):
                    copy.write(chunk)
            os.truncate(path, 0)
        except OSError:
            return False
        return True


def _is_another(one: Launched) -> bool:
    found = process.stat(one.pid)
    return found is not None and found[1] != one.pid_start
