"""A deployment of its own in a temporary directory: the daemon with a generated policy, as a process. For the demo,
benchmarks and tests; a real one is `healer run --policy FILE`."""

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from elastic.errors import ElasticError, Retryable

T = TypeVar("T")

POLL_S = 0.02
WATCH_S = 0.1
END_DEADLINE_S = 10.0
TEMP_LIMIT = 45
"""Characters of the directory for temporary files: a Unix socket's path holds 107 bytes, run directories keep to 70."""

Progress = Callable[[dict[str, Any]], None]
"""Called with the group's status each time that it was asked."""


async def eventually(probe: Callable[[], Awaitable[T | None]], what: str, deadline_s: float) -> T:
    """Poll until `probe` gives something. Raises Retryable with `what` and the last error."""
    end, last = time.monotonic() + deadline_s, ""
    while time.monotonic() < end:
        try:
            if (found := await probe()) is not None:
                return found
        except (httpx.HTTPError, ElasticError, OSError, ValueError) as error:
            last = f" (last error: {error!r})"
        await asyncio.sleep(POLL_S)
    raise Retryable(f"not within {deadline_s:g} s: {what}{last}")


class Deployment:
    """`target`, `detection` and `spec` override the generated policy. The owner must call `end`."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        target: Mapping[str, Any] | None = None,
        detection: Mapping[str, Any] | None = None,
        spec: Mapping[str, Any] | None = None,
    ) -> None:
        place = tempfile.gettempdir()
        self.root = Path(tempfile.mkdtemp(prefix="healer-", dir=place if len(place) <= TEMP_LIMIT else "/tmp"))
        self.run_dir, self.policy = self.root / "run", self.root / "policy.yaml"
        self.daemon: subprocess.Popen[bytes] | None = None
        self._target = {
            "kind": "embedded",
            "checkpoint": str(checkpoint),
            "runDir": str(self.run_dir),
            "ranks": 4,
            "maxRanks": 6,
            "slotsPerRank": 8,
            "redundantExperts": 8,
            "gateway": {"port": 0},
        } | dict(target or {})
        self._spec = {"target": self._target, "api": {"port": 0}} | dict(spec or {})
        if detection:
            self._spec["detection"] = dict(detection)

    def change(self, **spec: Any) -> None:
        """Change keys of `spec` in the policy of daemons that are started from now on."""
        self._spec |= spec

    def write_policy(self) -> None:
        text = {"apiVersion": "healer/v1", "kind": "Policy", "metadata": {"name": "local"}, "spec": self._spec}
        self.policy.write_text(json.dumps(text, indent=1))  # JSON is YAML

    def spawn(self, *more: str, write: bool = True) -> subprocess.Popen[bytes]:
        """Start the daemon, with `more` arguments of `healer run`, and return at once; `write` the policy first."""
        if write:
            self.write_policy()
        with (self.root / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "healer.cli", "run", "--policy", str(self.policy), *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in a terminal is for the owner, who ends all in order
                start_new_session=True,
            )
        return self.daemon

    async def start(self, deadline_s: float = 120.0, progress: Progress | None = None) -> dict[str, Any]:
        """Start the daemon and wait until the group serves; returns its status. Raises ElasticError as `settled`."""
        self.spawn()
        return await self.settled(deadline_s, progress)

    async def settled(self, deadline_s: float = 60.0, progress: Progress | None = None) -> dict[str, Any]:
        """Wait until every target slot is live and no sequence runs; returns the group's status. Raises ElasticError with
        the last words of a daemon that ended, or what is still open at the deadline."""
        why = ""

        async def probe() -> dict[str, Any] | None:
            nonlocal why
            self._check()
            status = await self.get("/status")
            why, group = status["why"], status["group"]
            if progress is not None:
                progress(group)
            return group if group["live"] and group["live"] == group["target"] and not group["sequence"] else None

        try:
            return await eventually(probe, "every slot of the target is live", deadline_s)
        except _Ended as error:
            raise ElasticError(str(error)) from None
        except Retryable as error:
            raise ElasticError(f"{error}; {why}" if why else str(error)) from None

    async def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`; when the daemon ends meanwhile, cancel it and raise ElasticError with the daemon's last words."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([task], timeout=WATCH_S))[0]:
                self._check()
            return task.result()
        except _Ended as error:
            raise ElasticError(str(error)) from None
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def stop(self, deadline_s: float = 30.0) -> None:
        """Ask the daemon to end serving and itself. Raises ElasticError when it refuses or does not end in time."""
        answer = await self.post("/stop", {})
        if answer.is_error:
            raise ElasticError(f"the daemon refused to stop: {answer.text}")

        async def ended() -> bool | None:
            return True if self.daemon is None or self.daemon.poll() is not None else None

        await eventually(ended, "the daemon has ended", deadline_s)

    def kill_daemon(self, signum: signal.Signals = signal.SIGKILL) -> None:
        """End the daemon alone; the group goes on."""
        if self.daemon is not None:
            self.daemon.send_signal(signum)
            self.daemon.wait()

    def log(self) -> str:
        return (self.root / "daemon.log").read_text()

    def api(self) -> str:
        return str(json.loads((self.run_dir / "healer.json").read_text())["http"])

    def gateway(self) -> str:
        return str(json.loads((self.run_dir / "gateway.json").read_text())["http"])

    async def get(self, path: str) -> Any:
        async with _client() as client:
            return (await client.get(self.api() + path, timeout=10)).raise_for_status().json()

    async def post(self, path: str, body: Any) -> httpx.Response:
        async with _client() as client:
            return await client.post(self.api() + path, json=body, timeout=30)

    async def counters(self) -> dict[int, dict[str, int]]:
        """By live slot."""
        group = (await self.get("/status"))["group"]
        return {s["slot"]: s["counters"] for s in group["slots"] if s["state"] == "live"}

    def processes(self) -> list[psutil.Process]:
        """Everything that belongs to this deployment and still runs."""
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self._owns(each.cmdline()) and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each)
        return found

    def end(self, *, keep: bool = False) -> None:
        """End whatever is left, and remove its files; with `keep` logs, journal and policy stay. Never raises."""
        if self.daemon is not None:
            # first, since it would start others anew
            self.daemon.kill()
            self.daemon.wait()
        deadline = time.monotonic() + END_DEADLINE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for each in left:
                with contextlib.suppress(psutil.Error):
                    each.kill()
            time.sleep(POLL_S)
        for tier in Path("/dev/shm").glob(f"elastic-tier-*{self.root.name}*"):
            with contextlib.suppress(OSError):
                tier.unlink()
        if not keep:
            shutil.rmtree(self.root, ignore_errors=True)

    def _owns(self, line: list[str]) -> bool:
        """Of one of this project's modules, and named by an argument: not whoever reads a log in there."""
        module = line[line.index("-m") + 1] if "-m" in line[:-1] else ""
        ours = module.partition(".")[0] in ("chaos", "elastic", "healer")
        return ours and any(self.root.name in argument for argument in line)

    def _check(self) -> None:
        if self.daemon is not None and self.daemon.poll() is not None:
            raise _Ended(f"the daemon ended with exit code {self.daemon.returncode}: {self._last_words()}")

    def _last_words(self) -> str:
        lines = [line for line in self.log().splitlines() if line.strip()]
        said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (said or lines or ["it left no word"])[-1][:500]


class _Ended(Exception):
    """The daemon is gone: no use to ask again."""


def _client() -> httpx.AsyncClient:
    # no proxy for this machine, and no CA bundle, which takes 15 ms to load each time
    return httpx.AsyncClient(trust_env=False, verify=False)
