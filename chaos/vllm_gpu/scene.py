"""The deployment that all parts share: healer's daemon with its group, its processes, and what it wrote down."""

import asyncio
import contextlib
import json
import os
import signal
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from chaos.vllm_gpu.boot import gaps
from chaos.vllm_gpu.profile import Profile
from chaos.vllm_gpu.records import Boot, Phase, Sequence
from elastic.client import Tokens, random_prompts
from elastic.controller.records import SequenceReport
from elastic.errors import ElasticError
from elastic.paths import log_path
from healer.address import journal_path
from healer.deployment import Deployment
from healer.journal import Kind, open_readonly, recent
from healer.targets.vllm.processes import log_name, sessions
from healer.targets.vllm.records import Part as Kin
from healer.targets.vllm.state import load as load_state

PROMPTS = 32
FIRST_ID = 2
POLL_S = 0.1
MODEL_S = 120.0
END_S = 30.0


class Scene:
    """Owned by the scenario; `end` it."""

    def __init__(self, profile: Profile, out: Path, say: Callable[[str], None]) -> None:
        self.profile, self._out, self.say = profile, out, say
        self.deployment = Deployment(profile.model)
        self.deployment.change(**profile.policy(self.deployment.run_dir))
        self.prompts = [
            [token + FIRST_ID for token in p] for p in random_prompts(PROMPTS, profile.vocabulary - FIRST_ID, 7)
        ]
        self.want: list[Tokens] = []
        self.began = time.monotonic()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began

    # --- before the group -----------------------------------------------------------------------------------------

    async def write_model(self) -> float:
        """Seconds that it took; 0 where it is there. Raises ElasticError."""
        profile, began = self.profile, time.monotonic()
        if not profile.writes_model or (profile.model / "model.safetensors").exists():
            return 0.0
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [profile.env.get("PYTHONPATH")])]
        maker = await asyncio.create_subprocess_exec(
            str(profile.python),
            *("-m", "chaos.vllm_gpu.model", str(profile.model)),
            env=os.environ | profile.env | {"PYTHONPATH": ":".join(paths)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await asyncio.wait_for(maker.communicate(), MODEL_S)
        except TimeoutError:
            maker.kill()
            raise ElasticError(f"the model was not written within {MODEL_S:g} s") from None
        if maker.returncode:
            raise ElasticError(f"the model could not be written: {said.decode(errors='replace')[-500:]}")
        return time.monotonic() - began

    # --- the group ------------------------------------------------------------------------------------------------

    async def router(self) -> str:
        return str((await self.deployment.get("/status"))["serving"])

    async def members(self) -> dict[int, dict[str, Any]]:
        """By slot: pid, incarnation, address."""
        slots = (await self.deployment.get("/status"))["group"]["slots"]
        return {one["slot"]: one["member"] for one in slots if one["member"]}

    async def incarnations(self) -> dict[int, int]:
        return {slot: one["incarnation"] for slot, one in (await self.members()).items()}

    async def engines(self, slot: int) -> list[int]:
        """Pids of a rank's engine and workers. Raises ElasticError where it has none."""
        leader = (await self.members())[slot]["pid"]
        found = [one.pid for one in sessions({leader})[leader] if one.part in (Kin.ENGINE, Kin.WORKER)]
        if not found:
            raise ElasticError(f"slot {slot} has no engine")
        return found

    def url(self, slot: int) -> str:
        return f"http://127.0.0.1:{self.profile.base_port + slot}"

    async def scale(self, ranks: int) -> None:
        """Ask for it. Raises ElasticError when it is refused."""
        answer = await self.deployment.post("/scale", {"ranks": ranks})
        if answer.is_error:
            raise ElasticError(f"scaling to {ranks} was refused: {answer.text}")

    async def until(self, holds: Callable[[dict[str, Any]], bool], what: str, deadline_s: float) -> float:
        """Wait for a group of the target's size at rest of which `holds` is true of the status; returns the moment. Raises
        ElasticError."""
        end, why = time.monotonic() + deadline_s, ""
        while time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError, OSError, ValueError):
                status = await self.deployment.get("/status")
                group, why = status["group"], status["why"]
                rests = status["state"] == "ok" and group["live"] == group["target"] and not group["sequence"]
                if rests and holds(status):
                    return time.monotonic()
            await asyncio.sleep(POLL_S)
        raise ElasticError(f"not within {deadline_s:g} s: {what}; {why}")

    async def until_anew(self, before: dict[int, int], deadline_s: float) -> float:
        """Until every rank is another incarnation than before; returns the moment."""

        def anew(status: dict[str, Any]) -> bool:
            members = [s["member"] for s in status["group"]["slots"] if s["member"]]
            return all(m["incarnation"] > before.get(m["slot"], -1) for m in members)

        return await self.until(anew, "every rank is another incarnation", deadline_s)

    # --- what it wrote --------------------------------------------------------------------------------------------

    def sequences(self, since: float, event_at: float) -> tuple[Sequence, ...]:
        """Those that ended after `since`; both on the monotonic clock."""
        connection = open_readonly(journal_path(self.deployment.run_dir))
        try:
            entries = recent(connection, Kind.OUTCOME, 100)
        finally:
            connection.close()
        found = []
        for entry in entries:
            if "report" not in entry.body or entry.monotonic < since:
                continue
            report = msgspec.convert(entry.body["report"], SequenceReport, str_keys=True)
            phases = tuple(Phase(p.name, p.start - event_at, p.seconds) for p in report.phases)
            found.append(
                Sequence(
                    kind=str(report.kind),
                    outcome=str(report.outcome),
                    reason=report.reason,
                    began_s=report.began - event_at,
                    ended_s=report.ended - event_at,
                    phases=phases,
                )
            )
        return tuple(sorted(found, key=lambda s: s.began_s))

    async def boots(self, ready: float, slots: tuple[int, ...] | None = None) -> tuple[Boot, ...]:
        """How the ranks that live now came up, from their logs. `ready`: when they had, on the monotonic clock."""
        found, ready_wall = [], time.time() - (time.monotonic() - ready)
        for slot, member in sorted((await self.members()).items()):
            if slots is not None and slot not in slots:
                continue
            with contextlib.suppress(OSError, psutil.Error):
                launched = psutil.Process(member["pid"]).create_time()
                path = log_path(self.deployment.run_dir, log_name(slot, member["incarnation"]))
                lines = path.read_text(errors="replace").splitlines()
                found.append(
                    Boot(
                        slot=slot, incarnation=member["incarnation"], gaps=gaps(lines, launched, ready_wall - launched)
                    )
                )
        return tuple(found)

    # --- the end --------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Keep the logs, and end all that runs. Never raises."""
        with contextlib.suppress(OSError, tarfile.TarError):
            self._keep()
        run_dir = self.deployment.run_dir
        if self.deployment.daemon is not None:
            self.deployment.daemon.kill()  # it would start others anew
            self.deployment.daemon.wait()
        with contextlib.suppress(OSError, ElasticError):
            state = load_state(run_dir, "local")
            leaders = {rank.pid for rank in state.ranks if rank.pid} if state is not None else set[int]()
            until = time.monotonic() + END_S
            while time.monotonic() < until:
                left = [one for found in sessions(leaders).values() for one in found if one.state not in "ZX"]
                if not left:
                    break
                for one in left:
                    with contextlib.suppress(OSError):
                        os.kill(one.pid, signal.SIGKILL)
                time.sleep(POLL_S)
        with contextlib.suppress(OSError, ValueError, KeyError):
            os.kill(json.loads((run_dir / "router.json").read_text())["pid"], signal.SIGKILL)
        self.deployment.end()

    def _keep(self) -> None:
        with tarfile.open(self._out / "vllm-gpu-logs.tar.gz", "w:gz") as kept:
            for path in (self.deployment.root / "daemon.log", self.deployment.policy, *self._logs()):
                if path.exists():
                    kept.add(path, path.name)

    def _logs(self) -> list[Path]:
        return sorted(log_path(self.deployment.run_dir, "x").parent.glob("*.log*"))
