"""Two of vLLM's own API servers with stub workers, for the tests marked `vllm`. VLLM_CPU names a folder with `venv`,
`overlay033` and `tiny-moe`."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
READY_DEADLINE_S = 300.0
OPTIONS = [
    "--load-format",
    "dummy",
    "--enforce-eager",
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    "16",
    "--dtype",
    "bfloat16",
    "--host",
    "127.0.0.1",
    "--served-model-name",
    "tiny",
    "--kv-cache-memory-bytes",
    "64M",
    "--worker-cls",
    "router_worker.PositionWorker",
]
TOGETHER = ["--enable-expert-parallel", "--enable-fault-tolerance", "--all2all-backend", "nixl_ep"]
STEP_MS = 20


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Server:
    """One API server with its engine and worker, in a session of its own."""

    def __init__(self, home: Path, slot: int, size: int, rpc_port: int, folder: Path) -> None:
        self.slot, self.port = slot, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"vllm-{slot}-{self.port}.log"
        command = [str(home / "venv/bin/vllm"), "serve", str(home / "tiny-moe"), *OPTIONS, "--port", str(self.port)]
        if size > 1:
            command += ["--data-parallel-size", str(size), "--data-parallel-rank", str(slot)]
            command += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(rpc_port), *TOGETHER]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON"))} | {
            "PATH": f"{home / 'venv/bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{home / 'overlay033'}:{HERE}",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": "vllm_stub_worker",
            "VLLM_STUB_ALLOW_EPLB": "1",
            "VLLM_STUB_STEP_MS": str(STEP_MS),
            "VLLM_STUB_FAULT_DIR": str(folder),
        }
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def kill(self) -> None:
        """SIGKILL to every process of it."""
        segments = self._segments()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for segment in segments:
            # nobody else will: the processes that made them were killed
            Path(segment).unlink(missing_ok=True)

    def _segments(self) -> set[str]:
        found: set[str] = set()
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                if os.getsid(int(maps.parent.name)) == self.process.pid:
                    found |= set(re.findall(r"/dev/shm/psm_\w+", maps.read_text()))
        return found


async def start(home: Path, folder: Path, *, together: bool) -> list[Server]:
    """Two servers that answer: ranks of one deployment, or on their own. Fails with the end of a log."""
    rpc_port = free_port()
    servers = [Server(home, slot, 2 if together else 1, rpc_port, folder) for slot in (0, 1)]
    try:
        async with asyncio.timeout(READY_DEADLINE_S), httpx.AsyncClient(trust_env=False, timeout=5) as client:
            for server in servers:
                while not await _healthy(client, server):
                    if server.process.poll() is not None:
                        raise AssertionError(f"{server.log}: {server.log.read_text()[-3000:]}")
                    await asyncio.sleep(0.5)
    except BaseException:
        for server in servers:
            server.kill()
        raise
    return servers


async def _healthy(client: httpx.AsyncClient, server: Server) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await client.get(server.url + "/health")).status_code == 200
    return False


async def call(method: str, url: str, body: Any = None) -> Any:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        answer = await client.request(method, url, json=body)
        return answer.json()
