"""healer beside one vLLM 0.33 server with internal load balancing on Ray, all of it vLLM's and Ray's own but for the GPUs' work.

VLLM_CPU names an environment that has Ray too: `WITH_RAY=1 chaos/vllm_cpu/make.sh DEST`."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from elastic.controller.records import Event, RankBeat, RankGone, SequenceEnded
from healer.authority import Authority
from healer.policy.load import parse_policy
from healer.targets.vllm import make_target
from healer.targets.vllm.processes import free_port
from healer.targets.vllm.ray import RayTarget
from tests.vllm.real import ENVIRONMENT, STUB, Clients

BIN = ENVIRONMENT / "venv/bin"
START_S, SCALE_S = 900.0, 900.0
ADDRESS = "127.0.0.1"
TRIES = 5
"""Of `ray start`, which gives its own parts 30 s: not enough on two busy cores."""
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not (BIN / "ray").exists(), reason="VLLM_CPU names no environment with Ray"),
]
POLICY = """\
apiVersion: healer/v1
kind: Policy
metadata: {{name: ray}}
spec:
  target:
    kind: vllm
    runDir: {folder}/run
    mode: attach
    loadBalancing: internal
    urls: ["{url}"]
    ranks: 2
    maxRanks: 4
    args: [--served-model-name, tiny]
    canary: {{deadline: 60s}}
    deadlines: {{scale: 15m}}
  detection: {{heartbeatInterval: 1s, stallAfter: 10s, silentAfter: 60s}}
  bounds: {{minRanks: 2}}
"""
ARGS = [
    "--load-format",
    "dummy",
    "--enforce-eager",
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    "8",
    "--dtype",
    "bfloat16",
    "--served-model-name",
    "tiny",
    "--kv-cache-memory-bytes",
    "64M",
    "--data-parallel-size",
    "2",
    "--data-parallel-size-local",
    "2",
    "--data-parallel-backend",
    "ray",
    "--distributed-executor-backend",
    "mp",
    "--enable-expert-parallel",
    "--enable-elastic-ep",
    "--enable-eplb",
    "--elastic-ep-max-dp-size",
    "4",
    "--worker-cls",
    "vllm_stub_worker.StubWorker",
]
EPLB = '{"num_redundant_experts": 8, "use_async": false}'


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": f"{STUB}:{ENVIRONMENT}/overlay033",
        "VLLM_PLUGINS": "vllm_stub_worker",
        "VLLM_STUB_ALLOW_EPLB": "1",
        "VLLM_STUB_RAY": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING": "0",
        "RAY_TMPDIR": str(folder / "r"),
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL, when it serves."""
    folder = tmp_path_factory.mktemp("ray")
    there, port = environment(folder), free_port()
    # Ray's sockets have paths that a long folder would make too long
    short = Path(f"/tmp/ray-{os.getpid()}")
    there["RAY_TMPDIR"] = str(short)
    short.mkdir()
    start = [str(BIN / "ray"), "start", "--head", f"--node-ip-address={ADDRESS}", "--num-gpus=4", "--num-cpus=8"]
    start += ["--include-dashboard=false", f"--port={free_port()}", "--object-store-memory=80000000"]
    with contextlib.ExitStack() as left:
        left.callback(subprocess.run, ["rm", "-rf", str(short)], check=False)
        left.callback(subprocess.run, [str(BIN / "ray"), "stop", "--force"], env=there, check=False, timeout=600)
        address = _ray(start, there)
        log = left.enter_context((folder / "log").open("wb"))
        command = [str(BIN / "vllm"), "serve", str(ENVIRONMENT / "tiny-moe"), *ARGS, "--eplb-config", EPLB]
        command += ["--host", ADDRESS, "--port", str(port), "--data-parallel-address", address]
        process = subprocess.Popen(command, env=there, stdout=log, stderr=log, start_new_session=True)
        left.callback(_end, process.pid)
        url = f"http://{ADDRESS}:{port}"
        end = time.monotonic() + START_S
        while not _answers(url):
            words = (folder / "log").read_text(errors="replace")[-3000:]
            assert process.poll() is None, f"the server has ended: {words}"
            assert time.monotonic() < end, f"not in time: {words}"
            time.sleep(1.0)
        yield url


def _ray(start: list[str], environment: dict[str, str]) -> str:
    """Ray runs; the address that it knows this node by, which is not the one that it was given where that is loopback."""
    for _ in range(TRIES):
        done = subprocess.run(start, env=environment, check=False, timeout=600, capture_output=True, text=True)
        if done.returncode == 0:
            break
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    found = re.search(r"Local node IP:\D*([\d.]+)", said)
    assert found, said[-3000:]
    return found[1]


def _end(leader: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200
    return False


async def until(condition: Callable[[], object], deadline_s: float = 60.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def test_a_server_on_ray_is_watched_scaled_and_its_loss_is_told(server: str, tmp_path: Path) -> None:
    events: list[Event] = []
    policy = parse_policy(POLICY.format(folder=tmp_path, url=server), name="p", base=tmp_path)
    target = make_target(policy, events.append, Authority())
    assert isinstance(target, RayTarget)
    print(await target.start())
    try:
        assert target.address() == server
        await until(lambda: {e.member.slot for e in events if isinstance(e, RankBeat)} == {0, 1})
        async with Clients(server, streams=2).running() as clients:
            for size in (3, 2):
                began = time.monotonic()
                target.scale(size, reason="test")
                await until(lambda size=size: target.observe().live == tuple(range(size)), SCALE_S)  # type: ignore[misc]
                print(f"scaled to {size} in {time.monotonic() - began:.1f} s: {target.observe().gateway or 'well'}")
        # without the router a client meets the 503 of the commit, and where its engine leaves an answer that is cut off, with status
        # 200; nothing else
        cut = [found for found, expected in clients.wrong if found == expected[: len(found)]]
        assert len(cut) == len(clients.wrong) <= 2, clients.wrong
        assert [error for error in clients.errors if not error.startswith("503")] == []
        print(f"right {clients.right}, cut off {len(cut)}, 503 in the commits {len(clients.errors)}")
        outcomes = [e.report.outcome for e in events if isinstance(e, SequenceEnded)]
        assert outcomes == ["committed", "committed"]
        os.kill(_engine(), signal.SIGKILL)
        await until(lambda: {e.member.slot for e in events if isinstance(e, RankGone)} == {0, 1}, 120.0)
        assert "does not serve" in target.observe().gateway
        print(json.dumps(target.observe().gateway))
    finally:
        await target.close()


def _engine() -> int:
    """The pid of an engine, an actor of Ray's."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes()
            ours = str(BIN).encode() in (entry / "environ").read_bytes()
            if ours and (b"EngineCore" in words or b"ray::DPMoEEngineCoreActor" in words):
                return int(entry.name)
    raise AssertionError("no engine of Ray's is found")
