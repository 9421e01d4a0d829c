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
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from elastic.errors import ElasticError, Retryable

T = TypeVar("T")

POLL_S = 0.02


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
        # short: a Unix socket's path holds 107 bytes
        self.root = Path(tempfile.mkdtemp(prefix="healer-"))
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

    def write_policy(self) -> None:
        text = {"apiVersion": "healer/v1", "kind": "Policy", "metadata": {"name": "local"}, "spec": self._spec}
        self.policy.write_text(json.dumps(text, indent=1))  # JSON is YAML

    def spawn(self, *, write: bool = True) -> subprocess.Popen[bytes]:
        """Start the daemon and return at once; `write` the policy first."""
        if write:
            self.write_policy()
        with (self.root / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "healer.cli", "run", "--policy", str(self.policy)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self.daemon

    async def start(self, deadline_s: float = 120.0) -> None:
        """Start the daemon and wait until the group serves. Raises ElasticError with the daemon's log."""
        self.spawn()
        await self.settled(deadline_s)

    async def settled(self, deadline_s: float = 60.0) -> dict[str, Any]:
        """Wait until every target slot is live and no sequence runs; returns the group's status."""

        async def probe() -> dict[str, Any] | None:
            if self.daemon is not None and self.daemon.poll() is not None:
                raise SystemError(f"the daemon ended with exit code {self.daemon.returncode}")
            group: dict[str, Any] = (await self.get("/status"))["group"]
            return group if group["live"] and group["live"] == group["target"] and not group["sequence"] else None

        try:
            return await eventually(probe, "live slots equal the target", deadline_s)
        except (SystemError, Retryable) as error:
            raise ElasticError(f"{error}\n{self.log()[-3000:]}") from None

    def kill_daemon(self) -> None:
        """SIGKILL; the group goes on."""
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait()

    def log(self) -> str:
        return (self.root / "daemon.log").read_text()

    def api(self) -> str:
        return str(json.loads((self.run_dir / "healer.json").read_text())["http"])

    def gateway(self) -> str:
        return str(json.loads((self.run_dir / "gateway.json").read_text())["http"])

    async def get(self, path: str) -> Any:
        async with httpx.AsyncClient() as client:
            return (await client.get(self.api() + path, timeout=10)).raise_for_status().json()

    async def post(self, path: str, body: Any) -> httpx.Response:
        async with httpx.AsyncClient() as client:
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
                mine = any(str(self.root) in argument for argument in each.cmdline())
                if mine and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each)
        return found

    def end(self, *, keep: bool = False) -> None:
        """End whatever is left, and remove its files unless `keep`."""
        if self.daemon is not None:
            if self.daemon.poll() is None:
                self.daemon.send_signal(signal.SIGKILL)
            self.daemon.wait()
        for each in self.processes():
            with contextlib.suppress(psutil.Error):
                each.kill()
        if not keep:
            shutil.rmtree(self.root, ignore_errors=True)
            for tier in Path("/dev/shm").glob(f"elastic-tier-*{self.root.name}*"):
                tier.unlink(missing_ok=True)
