"""The group that scenarios hurt: started once, used by one scenario after the other, ended with everything that belongs to it."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from chaos import fake_nvml, inject
from chaos.fake_nvml import Script
from chaos.hook import FOLDER_VARIABLE, GPUS, Gpus, Hook
from chaos.hosts import DEVICE, Hosts
from chaos.injectors.gpus import follow_ranks
from chaos.load import Generator
from chaos.machine import gpus
from chaos.records import Baseline, GroupFacts, Prompt, tokens_hash
from chaos.scenario import Group, Load
from elastic.client import Tokens, random_prompts, traffic
from elastic.config import read_model_shape
from elastic.errors import ElasticError
from elastic.paths import config_path, read_config
from healer.deployment import Deployment, eventually

VOCAB = 512
START_S = 120.0
DAEMON_S = 30.0
BASELINE_S = 2.0
BETWEEN_HOSTS = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DEVICE}
MODEL_ARGUMENTS = ("--vocab", str(VOCAB))
GPU_MODEL_ARGUMENTS = (
    *("--layers", "8", "--experts", "8", "--hidden", "2048", "--expert-intermediate", "128"),
    *("--heads", "16", "--kv-heads", "4", "--head-dim", "64"),
)
"""NIXL EP's kernels are built for some widths only, of which this is the smallest."""


class Skip(ElasticError):
    """This machine lacks what the scenario needs; nothing was started."""


class HookedDeployment(Deployment):
    """A `Deployment` whose daemon is `chaos.hooked_daemon`, with its hooks in `hooks`."""

    def __init__(self, checkpoint: Path, *, target: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, target=target, spec=spec)
        self.hooks = self.root / "hooks"
        self.environment: dict[str, str] = {}
        """Of its daemons and their ranks, besides this process's own."""
        self.others: list[subprocess.Popen[bytes]] = []
        """Daemons that were started beside the first."""

    def spawn(self, *more: str, write: bool = True) -> "subprocess.Popen[bytes]":
        if write:
            self.write_policy()
        self.daemon = self._popen("daemon.log")
        return self.daemon

    def spawn_second(self) -> "subprocess.Popen[bytes]":
        second = self._popen("second-daemon.log")
        self.others.append(second)
        return second

    def end(self, *, keep: bool = False) -> None:
        for other in self.others:
            other.kill()
            other.wait()
        super().end(keep=keep)

    def _popen(self, log: str) -> "subprocess.Popen[bytes]":
        with (self.root / log).open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "chaos.hooked_daemon", "--policy", str(self.policy)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | self.environment | {FOLDER_VARIABLE: str(self.hooks)},
            )


class Stage:
    """Use as `async with`. Also the `Daemons` of injectors, whose methods may be called from any thread."""

    def __init__(self, group: Group, model: Path) -> None:
        """`model`: a checkpoint to copy. Raises Skip where this machine cannot hold such a group."""
        self.group = group
        self.spoiled = ""
        """Why no other scenario may use it; empty: any may."""
        self.runs = 0
        self.restarts_s: tuple[float, ...] = ()
        """As measured on this machine, if it was."""
        self._disk: Path | None = None
        self._gpus: _Followed | None = None
        self._hosts: Hosts | None = None
        self._prompts: dict[tuple[int, int, int], tuple[Prompt, ...]] = {}
        self._baselines: dict[str, Baseline] = {}
        self._lock = threading.Lock()
        self.deployment = self._deployed()
        try:
            self.checkpoint = self.deployment.root / "model"
            shutil.copytree(model, self.checkpoint)
            self.hook = Hook(self.deployment.hooks, lambda _: None)
            self._prepare()
        except BaseException:
            if self._hosts is not None:
                self._hosts.close()
            self._release()
            self.deployment.end()
            raise

    async def __aenter__(self) -> "Stage":
        try:
            await self.deployment.start(START_S)
            if self._gpus is not None:
                self._gpus.start(self.run_dir)
        except BaseException:
            self.close(keep=False)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close, keep=False)

    def close(self, *, keep: bool) -> None:
        """End everything. With `keep` the files stay."""
        if self._gpus is not None:
            self._gpus.close()
        self.hook.close()
        if self._hosts is not None:
            # it belongs to the deployment and would be killed, with its namespaces left behind
            self._hosts.close()
        for process in self.deployment.processes():
            # a stopped process is ended by SIGKILL too, but one in a control group must be let go
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
        self.deployment.end(keep=True)
        self._release()
        self.deployment.end(keep=keep)

    # --- what scenarios need ----------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        return self.deployment.run_dir

    @property
    def own_disk(self) -> Path | None:
        return self._disk

    @property
    def hosts(self) -> Hosts | None:
        return self._hosts

    @property
    def gpu_script(self) -> Path | None:
        return self._gpus.script if self._gpus else None

    @property
    def kernel_log(self) -> Path | None:
        return self._gpus.kernel_log if self._gpus else None

    @property
    def model(self) -> str:
        return self.checkpoint.name

    @property
    def base(self) -> tuple[int, ...]:
        return tuple(range(self.group.ranks))

    def facts(self, *, fresh: bool) -> GroupFacts:
        config, shape = read_config(config_path(self.run_dir)), read_model_shape(self.checkpoint)
        detection = self.group.policy.get("detection", {})
        return GroupFacts(
            name=config.name,
            run_dir=str(self.run_dir),
            target="embedded",
            ranks=self.group.ranks,
            max_ranks=self.group.max_ranks,
            slots_per_rank=self.group.slots_per_rank,
            redundant_experts=self.group.redundant_experts,
            experts=shape.experts,
            moe_layers=shape.moe_layers,
            ep_backend=self.group.ep_backend,
            stall_after_s=_seconds(detection.get("stallAfter", "1s")),
            fresh=fresh,
        )

    async def prompts(self, load: Load, seed: int) -> tuple[Prompt, ...]:
        """With the answers that the group gives without a fault; asked for once. Raises ElasticError where it does not answer."""
        key = (load.prompts, load.max_tokens, seed)
        if key not in self._prompts:
            drawn: Sequence[Tokens] = random_prompts(load.prompts, VOCAB, seed)
            answers = await traffic(self.deployment.gateway(), drawn, load.max_tokens)
            if failed := [a.error or "no end" for a in answers if a.error or len(a.tokens) != load.max_tokens]:
                raise ElasticError(f"without any fault: {failed[0]}")
            self._prompts[key] = tuple(
                Prompt(id=i, tokens=tuple(p), expected=tuple(a.tokens), expected_hash=tokens_hash(a.tokens))
                for i, (p, a) in enumerate(zip(drawn, answers, strict=True))
            )
        return self._prompts[key]

    async def baseline(self, load: Load, prompts: tuple[Prompt, ...]) -> Baseline:
        """The same load for a short while without a fault; measured once for each load."""
        key = load.model_dump_json()
        if key not in self._baselines:
            rate, gap_s = 0.0, 0.0
            if load.rate_per_s:
                generator = Generator(self.deployment.gateway(), self.model, load, prompts, 0)
                began, asking = time.monotonic(), asyncio.create_task(generator.run())
                await asyncio.sleep(BASELINE_S)
                generator.stop()
                await asking
                answers = generator.records()
                if wrong := [r for r in answers if r.outcome != "right"]:
                    raise ElasticError(f"without any fault a request was {wrong[0].outcome}: {wrong[0].error}")
                rate = sum(len(r.tokens) for r in answers) / (time.monotonic() - began)
                gap_s = max((r.longest_gap_s for r in answers), default=0.0)
            restarts = self.restarts_s
            self._baselines[key] = Baseline(
                prompts=prompts,
                tokens_per_s=rate,
                longest_gap_s=gap_s,
                restart_s=statistics.median(restarts) if restarts else 0.0,
                restart_samples_s=restarts,
            )
        return self._baselines[key]

    async def measure_restarts(self, count: int) -> None:
        """What a restart of the whole group takes, the alternative to healing: from SIGKILL of all ranks to the first token of
        the group that is formed anew. Raises ElasticError."""
        samples = []
        for _ in range(count):
            began = time.monotonic()
            inject.kill(self.run_dir, self.base)
            await self.restore()
            answers = await traffic(self.deployment.gateway(), random_prompts(1, VOCAB, 0), 1)
            if answers[0].error:
                raise ElasticError(f"after a restart: {answers[0].error}")
            samples.append(time.monotonic() - began)
        self.restarts_s = tuple(samples)

    async def restore(self) -> None:
        """Back to the slots of the beginning, nothing under way, for the next scenario. Raises ElasticError."""
        deadline_s = START_S
        if not self.pid():
            self.start()

        async def answers() -> dict[str, Any] | None:
            status: dict[str, Any] = await self.deployment.get("/status")
            return status if status["started"] else None

        status = await eventually(answers, "the daemon answers", DAEMON_S)
        if status["healing"]["paused"]:
            await self.deployment.post("/resume", {})
        if tuple(status["group"]["target"]) != self.base:
            answer = await self.deployment.post("/scale", {"slots": list(self.base)})
            if answer.is_error:
                raise ElasticError(f"the daemon refused slots {list(self.base)}: {answer.text}")

        async def whole() -> bool | None:
            found = await self.deployment.get("/status")
            group = found["group"]
            good = found["state"] == "ok" and tuple(group["live"]) == self.base and not group["sequence"]
            return True if good else None

        await eventually(whole, f"slots {list(self.base)} serve and nothing is wrong", deadline_s)

    # --- the daemons, for injectors -----------------------------------------------------------------------------------

    def pid(self) -> int:
        daemon = self.deployment.daemon
        return daemon.pid if daemon is not None and daemon.poll() is None else 0

    def kill(self) -> None:
        with self._lock:
            self.deployment.kill_daemon()

    def start(self) -> None:
        with self._lock:
            if not self.pid():
                self.deployment.spawn(write=False)

    def start_second(self) -> int:
        return self.deployment.spawn_second().pid

    def order(self, path: str, body: dict[str, Any]) -> None:
        try:
            with httpx.Client(trust_env=False, verify=False) as client:
                answer = client.post(self.deployment.api() + path, json=body, timeout=30)
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise ElasticError(f"POST {path}: {error!r}") from None
        if answer.is_error:
            raise ElasticError(f"POST {path} {json.dumps(body)}: {answer.status_code} {answer.text[:300]}")

    # --- making and undoing -------------------------------------------------------------------------------------------

    def _deployed(self) -> HookedDeployment:
        group = self.group
        target = {
            "ranks": group.ranks,
            "maxRanks": group.max_ranks,
            "slotsPerRank": group.slots_per_rank,
            "redundantExperts": group.redundant_experts,
            "epBackend": group.ep_backend,
            "spares": group.spares,
            "hostTier": group.host_tier,
            "faultInjection": True,
        }
        spec = {key: value for key, value in group.policy.items() if key != "target"}
        target |= group.policy.get("target", {})
        return HookedDeployment(Path("model"), target=target, spec=spec)

    def _prepare(self) -> None:
        run_dir = self.run_dir
        run_dir.mkdir()
        if self.group.ep_backend == "nixl-ep" and not gpus():
            raise Skip("epBackend nixl-ep needs an NVIDIA GPU, and nvidia-smi shows none")
        if self.group.disk_mb:
            command = [
                "mount",
                "-t",
                "tmpfs",
                "-o",
                f"size={self.group.disk_mb}m,mode=700",
                "healer-chaos",
                str(run_dir),
            ]
            try:
                done = subprocess.run(command, capture_output=True, text=True)
            except OSError as error:
                raise Skip(f"a file system of its own cannot be mounted: {error}") from None
            if done.returncode:
                raise Skip(f"a file system of its own cannot be mounted: {done.stderr.strip()}")
            self._disk = run_dir
            # what the ranks write for the checkers must not be lost with it
            (self.deployment.root / "steps").mkdir()
            (run_dir / "steps").symlink_to(self.deployment.root / "steps")
        if self.group.hosts:
            try:
                self._hosts = Hosts(self.deployment.hooks, self.group.hosts)
            except ElasticError as error:
                raise Skip(str(error)) from None
            self.deployment.environment |= BETWEEN_HOSTS
        if self.group.gpus:
            try:
                library = fake_nvml.build(self.deployment.root)
            except ElasticError as error:
                raise Skip(str(error)) from None
            self._gpus = _Followed(self.deployment.hooks, self.group.max_ranks)
            root = self.deployment.hooks / "root"
            root.mkdir()
            stand_in = Gpus(
                library=str(library),
                root=str(root),
                kernel_log=str(self._gpus.kernel_log),
                environment=fake_nvml.environment(self._gpus.script),
            )
            (self.deployment.hooks / GPUS).write_bytes(msgspec.json.encode(stand_in))

    def _release(self) -> None:
        if self._disk is not None:
            subprocess.run(["umount", "-l", str(self._disk)], capture_output=True)
            self._disk = None


class _Followed:
    """The stand-in's list of processes, kept as the ranks are: each on the GPU of its slot."""

    LOOK_S = 0.05

    def __init__(self, folder: Path, gpus: int) -> None:
        self.script, self.kernel_log = folder / "nvml-script", folder / "kernel-log"
        Script.healthy(self.script, gpus)
        self.kernel_log.touch()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, run_dir: Path) -> None:
        self._thread = threading.Thread(target=self._run, args=(run_dir,), name="gpu processes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, run_dir: Path) -> None:
        known: dict[int, int] = {}
        while not self._over.wait(self.LOOK_S):
            try:
                found = {slot: member.pid for slot, member in inject.living_ranks(run_dir).items()}
            except (ElasticError, OSError):
                continue
            if found != known:
                known = found
                follow_ranks(self.script, found.items())


def make_model(folder: Path, ep_backend: str) -> Path:
    """A small random model, the same each time. Raises ElasticError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    arguments = (*MODEL_ARGUMENTS, *(GPU_MODEL_ARGUMENTS if ep_backend == "nixl-ep" else ()))
    command = [sys.executable, "-m", "elastic.tools.make_checkpoint", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ElasticError(f"no model could be made: {done.stderr.strip()[-500:]}")
    return folder


def _seconds(text: str) -> float:
    from healer.policy.schema.base import parse_duration

    return parse_duration(text)


async def replays(deployment: Deployment) -> int:
    """Requests that the gateway has moved to another rank since it started; 0 where it does not answer."""
    from healer import drill

    try:
        return await drill.replays(deployment)
    except (httpx.HTTPError, OSError, ValueError):
        return 0
