"""The router as a process: its file, its signals, what it loads, and its independence from whoever wrote the file."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.vllm.router_fakes import FakeRank, right_text
from tests.vllm.router_stand import until

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
PROMPT = "a prompt of more than eight tokens"
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
START_DEADLINE_S = 60.0
MAX_RSS_BYTES = 80e6
"""Of an idle router; it took 53 MB."""


class Process:
    def __init__(self, folder: Path) -> None:
        self.config, self.announced = folder / "routes.json", folder / "router.json"
        self.log = folder / "router.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.client = httpx.AsyncClient(trust_env=False, timeout=30)

    def write(self, epoch: int, ranks: list[FakeRank], **more: Any) -> None:
        named = [{"slot": n, "incarnation": 0, "url": rank.url, "admit": True} for n, rank in enumerate(ranks)]
        self.config.write_text(json.dumps({"epoch": epoch, "ranks": named, "poll_s": 0.05, **more}))

    def launch(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "healer.router", "--config", str(self.config)], stderr=log, env=ENVIRONMENT
            )

    def said(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.announced.read_text())
        except FileNotFoundError:
            return {"epoch": -1}
        return found

    async def ready(self) -> None:
        assert self.process is not None
        await until(lambda: self.said()["epoch"] >= 0, deadline_s=START_DEADLINE_S)
        assert self.said()["pid"] == self.process.pid
        self.client.base_url = self.said()["http"]
        await until(self._open)

    async def _open(self) -> bool:
        return (await self.client.get("/readyz")).status_code == 200

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ask(self) -> str:
        answer = await self.client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    async def run_to_its_end(self) -> subprocess.CompletedProcess[str]:
        return await python("-m", "healer.router", "--config", str(self.config))


async def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    run, command = subprocess.run, [sys.executable, *arguments]
    return await asyncio.to_thread(
        run, command, env=ENVIRONMENT, capture_output=True, text=True, timeout=START_DEADLINE_S
    )


@pytest.fixture
async def rank() -> AsyncIterator[FakeRank]:
    made = FakeRank()
    await made.start()
    yield made
    await made.kill()


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Process]:
    made = Process(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait()
    await made.client.aclose()


async def test_it_serves_takes_a_new_file_at_sighup_and_ends_in_order(router: Process, rank: FakeRank) -> None:
    router.write(1, [rank])
    router.launch()
    await until(router.announced.exists, deadline_s=START_DEADLINE_S)
    # from here on no signal is lost, though it may not listen yet
    router.write(2, [rank])
    router.signal(signal.SIGHUP)
    await until(lambda: router.said()["epoch"] == 2)
    await router.ready()
    assert await router.ask() == right_text(PROMPT.encode(), 20)

    router.write(3, [])
    router.signal(signal.SIGHUP)
    await until(lambda: router.said()["epoch"] == 3)
    assert (await router.client.get("/readyz")).status_code == 503

    router.write(1, [rank])
    router.signal(signal.SIGHUP)
    await until(lambda: "epoch 1 is older than epoch 3" in router.said()["refused"])

    router.config.write_text("{")
    router.signal(signal.SIGHUP)
    await until(lambda: "line 1" in router.said()["refused"])

    router.write(4, [rank])
    router.signal(signal.SIGHUP)
    await until(lambda: router.said()["epoch"] == 4 and not router.said()["refused"])
    await until(router._open)
    assert await router.ask() == right_text(PROMPT.encode(), 20)

    assert router.process is not None
    router.signal(signal.SIGTERM)
    assert await asyncio.to_thread(router.process.wait, 30) == 0
    assert not router.announced.exists()


async def test_it_is_small_and_loads_neither_torch_nor_vllm(router: Process, rank: FakeRank) -> None:
    router.write(1, [rank])
    router.launch()
    await router.ready()
    assert router.process is not None
    process = psutil.Process(router.process.pid)
    assert process.memory_info().rss < MAX_RSS_BYTES
    mapped = " ".join(one.path for one in process.memory_maps())
    assert "torch" not in mapped
    assert "numpy" not in mapped
    code = "import sys, healer.router.__main__; print([m for m in ('torch', 'numpy', 'vllm', 'tokenizers') if m in sys.modules])"
    loaded = await python("-c", code)
    assert loaded.stdout.strip() == "[]"


async def test_a_router_that_was_killed_starts_again_from_its_file_and_a_second_is_refused(
    router: Process, rank: FakeRank
) -> None:
    router.write(7, [rank])
    router.launch()
    await router.ready()
    second = await router.run_to_its_end()
    assert (second.returncode, "another router" in second.stderr) == (1, True)
    assert await router.ask() == right_text(PROMPT.encode(), 20)
    router.signal(signal.SIGKILL)
    assert router.process is not None
    await asyncio.to_thread(router.process.wait)
    router.announced.unlink()
    router.launch()
    await router.ready()
    assert router.said()["epoch"] == 7
    assert await router.ask() == right_text(PROMPT.encode(), 20)


async def test_a_router_that_serves_says_so_again_where_its_announcement_was_removed(
    router: Process, rank: FakeRank
) -> None:
    router.write(7, [rank])
    router.launch()
    await router.ready()
    router.announced.unlink()
    await until(router.announced.exists)
    assert (router.said()["epoch"], router.said()["refused"]) == (7, "")


async def test_a_router_that_ends_late_leaves_the_announcement_of_the_next_one(router: Process, rank: FakeRank) -> None:
    router.write(7, [rank])
    router.launch()
    await router.ready()
    assert router.process is not None
    router.process.send_signal(signal.SIGSTOP)
    other = router.said() | {"pid": router.process.pid + 1}
    router.announced.write_text(json.dumps(other))
    router.process.send_signal(signal.SIGTERM)
    router.process.send_signal(signal.SIGCONT)
    assert await asyncio.to_thread(router.process.wait, 30) == 0
    assert router.said() == other


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "line 1, column 2"),
        ('{"epoch": 1}', "ranks"),
        ('{"epoch": 1, "ranks": [], "host": "256.1.1.1"}', "cannot listen on 256.1.1.1"),
        ('{"epoch": 1, "ranks": [], "announce": "/nowhere/at/all.json"}', "/nowhere/at/all.json"),
    ],
)
async def test_what_keeps_it_from_starting_is_one_line_and_exit_code_1(
    router: Process, content: str | None, said: str
) -> None:
    if content is not None:
        router.config.write_text(content)
    ended = await router.run_to_its_end()
    assert ended.returncode == 1
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
