"""Rank processes on this host, each in a session of its own so that they outlive the daemon."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from elastic import process
from elastic.config import GroupConfig
from elastic.errors import ElasticError
from elastic.launch.base import Launched
from elastic.paths import log_path, tier_path

LOG_TAIL_BYTES = 4096
KEPT_LOGS = 20
"""Of each slot, one for each incarnation: the newest."""


class LocalLauncher:
    """Implements `Launcher` with subprocesses; logs below `run_dir/logs`."""

    def __init__(self, config: GroupConfig) -> None:
        self._config = config
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def launch(self, slot: int, incarnation: int) -> Launched:
        self._forget_logs(slot)
        return self._spawn(
            f"rank-{slot}.{incarnation}",
            ["elastic.rank", "--run-dir", self._config.run_dir, "--slot", str(slot), "--incarnation", str(incarnation)],
        )

    def launch_spare(self, number: int) -> Launched:
        return self._spawn(
            f"spare-{number}", ["elastic.rank", "--run-dir", self._config.run_dir, "--spare", str(number)]
        )

    def launch_gateway(self) -> Launched:
        c = self._config
        return self._spawn(
            "gateway",
            [
                "elastic.gateway",
                *("--group", c.name, "--run-dir", c.run_dir, "--checkpoint", c.checkpoint),
                *("--model", c.model_name or Path(c.checkpoint).name),
                *("--host", c.gateway_host, "--port", str(c.gateway_port), "--max-queued", str(c.gateway_max_queued)),
                *("--max-model-len", str(c.max_model_len)),
            ],
        )

    async def build_tier(self, *, deadline_s: float) -> None:
        arguments = ["-m", "elastic.rank.tier", "build", self._config.checkpoint, str(tier_path(self._config.root))]
        if self._config.on_gpu:
            arguments += ["--dtype", "bfloat16"]
        builder = await asyncio.create_subprocess_exec(
            *process.ordinary([sys.executable, *arguments]), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            async with asyncio.timeout(deadline_s):
                _, errors = await builder.communicate()
        except TimeoutError:
            raise ElasticError(f"the host-memory tier was not built within {deadline_s:g} s") from None
        finally:
            if builder.returncode is None:
                builder.kill()
                await builder.wait()
        if builder.returncode:
            raise ElasticError(
                _last_words(errors.decode(errors="replace")) or f"tier builder: exit {builder.returncode}"
            )

    def last_words(self, name: str) -> str:
        path = log_path(self._config.root, name)
        try:
            with path.open("rb") as log:
                log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError as error:
            return f"no log: {error}"
        return _last_words(text) or f"ended without a word; see {path}"

    def end(self, process_: Launched) -> None:
        process.send_signal(process_.pid, process_.pid_start, signal.SIGKILL)
        self.reap()

    def strays(self) -> list[Launched]:
        found: list[Launched] = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = each.cmdline()
                mine = "--run-dir" in line and line[line.index("--run-dir") + 1] == self._config.run_dir
                if mine and any(m in line for m in ("elastic.rank", "elastic.gateway")):
                    found.append(Launched(each.pid, process.start_time(each.pid)))
        return found

    async def ended(self, *, deadline_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while any(process.is_alive(p.pid, p.pid_start) for p in self.strays()):  # noqa: ASYNC110 (others' children)
                    await asyncio.sleep(0.02)
        self.reap()

    def reap(self) -> None:
        """Collect ended children, so that no zombie stays for the life of the daemon."""
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                del self._children[pid]

    def _forget_logs(self, slot: int) -> None:
        """All but the newest, so that a slot that fails for months does not fill the disk."""
        found: dict[int, Path] = {}
        for path in log_path(self._config.root, "any").parent.glob(f"rank-{slot}.*.log"):
            incarnation = path.name.split(".")[1]
            if incarnation.isdigit():
                found[int(incarnation)] = path
        for old in sorted(found)[: 1 - KEPT_LOGS]:
            with contextlib.suppress(OSError):
                found[old].unlink()

    def _spawn(self, name: str, arguments: list[str]) -> Launched:
        self.reap()
        path = log_path(self._config.root, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as log:
                child = subprocess.Popen(
                    process.ordinary([sys.executable, "-m", *arguments]),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=os.environ | {"PYTHONUNBUFFERED": "1"},
                )
        except OSError as error:
            raise ElasticError(f"{name}: cannot be started: {error}") from error
        self._children[child.pid] = child
        return Launched(child.pid, process.start_time(child.pid))


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    return lines[-1][:300] if lines else ""
