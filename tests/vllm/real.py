"""`healer run` over vLLM 0.33's own servers on this CPU (VLLM_CPU names the environment that chaos/vllm_cpu/make.sh makes), and
clients that check every token that they get."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from healer.targets.vllm.processes import sessions
from healer.targets.vllm.records import Part

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("VLLM_CPU", ""))
STUB = ROOT / "chaos/vllm_cpu/plugins/stub_worker"
START_S, HEAL_S = 900.0, 900.0
"""On a machine with much other work; 50 to 90 s on two cores that have little else."""
FORK = os.environ.get("VLLM_CPU_FORK", "1")
"""Empty: processes of a rank are spawned and import vLLM anew, as by default. Else only the API server does: 8 s of a core for a rank
instead of 24 to 32."""
POLICY = """\
apiVersion: healer/v1
kind: Policy
metadata: {{name: real}}
spec:
  target:
    kind: vllm
    runDir: {folder}/run
    ranks: {ranks}
    maxRanks: 4
    executable: {environment}/venv/bin/vllm
    model: {environment}/tiny-moe
    experts: 8
    basePort: {port}
    args: [--load-format, dummy, --enforce-eager, --max-model-len, "2048", --max-num-seqs, "8", --dtype, bfloat16,
      --served-model-name, tiny, --kv-cache-memory-bytes, 64M, --enable-expert-parallel, --enable-elastic-ep, --enable-eplb,
      --elastic-ep-max-dp-size, "4", --eplb-config, '{{"num_redundant_experts": 8, "use_async": false}}',
      --worker-cls, {worker}, --enable-fault-tolerance, --no-enable-prefix-caching]
    env:
      PYTHONPATH: {path}:{environment}/overlay033
      VLLM_PLUGINS: vllm_stub_worker
{threads}      VLLM_STUB_ALLOW_EPLB: "1"
      VLLM_STUB_FORK: "{fork}"
      VLLM_STUB_FAULT_DIR: {folder}/faults
      HF_HUB_OFFLINE: "1"
      TRANSFORMERS_OFFLINE: "1"
      VLLM_NO_USAGE_STATS: "1"
    spares: {spares}
    gateway: {{port: 0}}
    canary: {{interval: 10s, deadline: 10s}}
    deadlines: {{start: 15m, scale: 15m, commit: 60s, gate: 20s, retry: 40s, settle: 5s, stall: 60s, drain: 5s, end: 5s}}
  api: {{port: 0}}
  sensors: {{nvml: {{enabled: false}}, kernelLog: {{enabled: false}}}}
  detection: {{heartbeatInterval: 1s, stallAfter: 5s, silentAfter: 45s}}
  healing:
    rules: [{{name: any-fault, actions: [replace, human]}}]
  bounds: {{minRanks: 2, breaker: {{maxDestructive: 100, window: 1m}}, faultBudget: {{failures: 100, window: 1h, quarantine: 1h}}}}
"""


def token(prompt: list[int], position: int) -> int:
    return 2 + (zlib.crc32(bytes(str(prompt[:4]), "ascii")) + position) % 90


def policy(
    folder: Path,
    *,
    ranks: int = 2,
    worker: str = "vllm_stub_worker.StubWorker",
    path: Sequence[Path] = (STUB,),
    threads: int | None = None,
    spares: int = 0,
) -> str:
    """`worker`: stands for a GPU's, and is found in `path`. `threads`: of each process's arithmetic; None: as many as it likes."""
    return POLICY.format(
        folder=folder,
        environment=ENVIRONMENT,
        ranks=ranks,
        worker=worker,
        path=":".join(map(str, path)),
        threads="" if threads is None else f'      OMP_NUM_THREADS: "{threads}"\n',
        port=24000 + os.getpid() % 500 * 10,
        fork=FORK,
        spares=spares,
    )


class Deployment:
    def __init__(self, folder: Path, text: str) -> None:
        """`text`: of `policy`."""
        self.folder = folder
        (folder / "faults").mkdir()
        self.policy = folder / "policy.yaml"
        self.policy.write_text(text)
        self.scaled = False
        """Since its launch, as far as the tests know: vLLM's retry works with the size of the launch only."""
        self.daemon = self.run()

    def run(self) -> subprocess.Popen[bytes]:
        with (self.folder / "healer.log").open("ab") as log:
            command = [sys.executable, "-m", "healer.cli", "run", "--policy", str(self.policy)]
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)

    def ask(self, path: str) -> Any:
        address = json.loads((self.folder / "run/healer.json").read_text())["http"]
        return httpx.get(f"{address}{path}", timeout=10.0, trust_env=False).json()

    def status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, httpx.HTTPError, ValueError):
            found: dict[str, Any] = self.ask("/status")
            return found
        return {"state": "unreachable", "group": {"live": [], "slots": []}}

    def until(self, condition: Callable[[dict[str, Any]], bool], deadline_s: float = HEAL_S) -> dict[str, Any]:
        end = time.monotonic() + deadline_s
        while not condition(found := self.status()):
            log = (self.folder / "healer.log").read_text()[-3000:]
            assert self.daemon.poll() is None, f"the daemon has ended: {log}"
            assert time.monotonic() < end, f"not in time: {found.get('why')}; {log}"
            time.sleep(0.5)
        return found

    @staticmethod
    def sound(found: dict[str, Any], ranks: int) -> bool:
        group = found["group"]
        return found["state"] == "ok" and len(group["live"]) == ranks and not group["sequence"]

    def healthy(self, ranks: int, deadline_s: float = HEAL_S) -> dict[str, Any]:
        return self.until(lambda found: self.sound(found, ranks), deadline_s)

    def incarnations(self) -> dict[int, int]:
        members = [slot["member"] for slot in self.status()["group"]["slots"] if slot["member"]]
        return {member["slot"]: member["incarnation"] for member in members}

    def pid(self, slot: int, part: Part) -> int:
        leader = next(s["member"]["pid"] for s in self.status()["group"]["slots"] if s["slot"] == slot)
        return next(p.pid for p in sessions({leader})[leader] if p.part == part)

    def phase(self) -> str:
        """What vLLM says of a scaling, by the rank in slot 0; empty where it does not answer."""
        with contextlib.suppress(httpx.HTTPError, ValueError, StopIteration):
            member = next(s["member"] for s in self.status()["group"]["slots"] if s["slot"] == 0 and s["member"])
            address = f"{member['address']}/is_scaling_elastic_ep"
            found: str = httpx.post(address, timeout=5.0, trust_env=False).json()["phase"]
            return found
        return ""

    def fault(self, name: str) -> Path:
        path = self.folder / "faults" / name
        path.touch()
        return path

    def scale(self, ranks: int) -> None:
        self.scaled = True
        command = [sys.executable, "-m", "healer.cli", "scale", str(ranks), "--policy", str(self.policy)]
        subprocess.run(command, check=True, cwd=ROOT, timeout=60)

    def kill(self, slot: int, part: Part, signum: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid(slot, part)
        os.kill(pid, signum)
        return pid

    def end(self) -> None:
        for command in (["stop"],):
            subprocess.run(
                [sys.executable, "-m", "healer.cli", *command, "--policy", str(self.policy)],
                cwd=ROOT,
                timeout=120,
                check=False,
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.daemon.wait(60)
        if self.daemon.poll() is None:
            self.daemon.kill()
        state = self.folder / "run/group.json"
        for rank in json.loads(state.read_text())["ranks"] if state.exists() else ():
            with contextlib.suppress(OSError):
                os.killpg(rank["pid"], signal.SIGKILL)
        with contextlib.suppress(OSError, ValueError):
            os.kill(json.loads((self.folder / "run/router.json").read_text())["pid"], signal.SIGKILL)


@contextlib.contextmanager
def deployed(folder: Path, *, ranks: int = 2, **how: Any) -> Iterator[Deployment]:
    """`how`: see `policy`."""
    shared = set(Path("/dev/shm").glob("psm_*"))
    found = Deployment(folder, policy(folder, ranks=ranks, **how))
    try:
        found.healthy(ranks, START_S)
        yield found
    finally:
        found.end()
        for path in set(Path("/dev/shm").glob("psm_*")) - shared - mapped():
            path.unlink(missing_ok=True)


def mapped() -> set[Path]:
    """Shared memory that some process has. What killed processes leave behind is not among it; what another group on this machine
    works with is."""
    found = set[Path]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found |= {Path(word) for word in maps.read_text().split() if word.startswith("/dev/shm/psm_")}
    return found


class Clients:
    """Streams through the router until told to stop; every answer is checked token by token."""

    def __init__(self, url: str, streams: int = 4, tokens: int = 24) -> None:
        self._url, self._streams, self._tokens = url, streams, tokens
        self._stop = asyncio.Event()
        self.right, self.wrong, self.errors = 0, list[Any](), list[str]()
        self.longest_s = 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Clients"]:
        tasks = [asyncio.create_task(self._one(number)) for number in range(self._streams)]
        try:
            yield self
        finally:
            self._stop.set()
            await asyncio.gather(*tasks)

    async def _one(self, number: int) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=HEAL_S, trust_env=False) as client:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                prompt = [2 + number, 3 + turn % 80, 5, 7, 11]
                began = time.monotonic()
                body = {"model": "tiny", "prompt": prompt, "max_tokens": self._tokens, "temperature": 0}
                body |= {"ignore_eos": True, "return_token_ids": True}
                try:
                    answer = await client.post("/v1/completions", json=body)
                    self._check(answer, [token(prompt, len(prompt) + at) for at in range(self._tokens)])
                except httpx.HTTPError as error:
                    self.errors.append(repr(error))
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                await asyncio.sleep(0.05)

    def _check(self, answer: httpx.Response, expected: list[int]) -> None:
        if answer.status_code != 200:
            self.errors.append(f"{answer.status_code}: {answer.text[:200]}")
            return
        found = answer.json()["choices"][0]["token_ids"]
        if found == expected:
            self.right += 1
        else:
            self.wrong.append((found, expected))
