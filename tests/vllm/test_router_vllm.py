"""The router before vLLM's own API servers. Tokens come from a stub worker and are a function of the prompt's first tokens
and the position, so the undisturbed answer is known."""

import asyncio
import os
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.vllm import router_group
from tests.vllm.router_group import Server, call
from tests.vllm.router_stand import Stand, stream, until

HOME = os.environ.get("VLLM_CPU", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HOME, reason="VLLM_CPU names no folder with vLLM for CPUs"),
]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
COUNT = 120
STEP_DEADLINE_S = 60.0


def prompt_of(n: int) -> str:
    return f"a prompt with a number, {n}, and enough tokens"


def messages_of(n: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt_of(n)}]


def right_tokens(prompt: list[int], count: int) -> list[int]:
    start = zlib.crc32(bytes(str(prompt[:16]), "ascii")) + len(prompt)
    return [2 + (start + n) % 90 for n in range(count)]


class Served(Stand):
    """A router before real servers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.servers: list[Server] = []
        self.folder = folder

    def content(self) -> dict[str, Any]:
        ranks = [
            {"slot": s.slot, "incarnation": self.incarnations.get(s.slot, 1), "url": s.url, "admit": True}
            for s in self.servers
        ]
        return {"epoch": self.epoch, "ranks": ranks, **self.settings}

    async def launch(self, *, together: bool) -> None:
        self.servers = await router_group.start(Path(HOME), self.folder, together=together)

    async def right_text(self, kind: str, n: int, count: int = COUNT) -> str:
        """From the tokens of the prompt as the server sees it, decoded by the server."""
        body = {"model": "tiny"} | ({"messages": messages_of(n)} if kind == CHAT else {"prompt": prompt_of(n)})
        prompt = (await call("POST", self.servers[0].url + "/tokenize", body))["tokens"]
        tokens = {"model": "tiny", "tokens": right_tokens(prompt, count)}
        text: str = (await call("POST", self.servers[0].url + "/detokenize", tokens))["prompt"]
        return text

    async def ask(self, n: int) -> str:
        """One of four kinds of request; the text of its answer, which must be whole."""
        kind = COMPLETIONS if n % 2 else CHAT
        body: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
        body |= {"messages": messages_of(n)} if kind == CHAT else {"prompt": prompt_of(n)}
        if n % 4 < 2:
            got = await stream(self.client, kind, body)
            assert (got.status, got.error, got.done, got.finishes) == (200, None, True, ["length"])
            assert len({chunk["id"] for chunk in got.chunks}) == 1
            return got.text
        answer = await self.client.post(kind, json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["usage"]["completion_tokens"] == COUNT
        (choice,) = found["choices"]
        said: str = choice["message"]["content"] if kind == CHAT else choice["text"]
        return said

    async def until_half_way(self, before: float = 0) -> None:
        async def check() -> bool:
            return await self.metric("healer_router_tokens_total") - before > 12 * COUNT / 3

        await until(check, deadline_s=STEP_DEADLINE_S)

    async def fault_states(self) -> list[str]:
        found = [await call("GET", server.url + "/fault_tolerance/status") for server in self.servers]
        return [one["engines"][0]["status"] for one in found]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(tmp_path)
    made.client.timeout = httpx.Timeout(600)
    yield made
    for server in made.servers:
        server.kill()
    await made.aclose()


async def begin(served: Served, *, together: bool) -> None:
    await served.launch(together=together)
    await served.start(0, poll_s=0.2, limits={"hold_s": 400.0})
    await served.until_open(2)


async def compare(served: Served, wanted: list[str], tasks: list["asyncio.Task[str]"]) -> None:
    for n, (text, right) in enumerate(zip(await asyncio.gather(*tasks), wanted, strict=True)):
        assert text == right, f"request {n}"


async def test_a_server_killed_in_mid_stream_changes_no_clients_text(served: Served) -> None:
    await begin(served, together=False)
    kinds = [COMPLETIONS if n % 2 else CHAT for n in range(12)]
    wanted = [await served.right_text(kind, n) for n, kind in enumerate(kinds)]
    for kind in (COMPLETIONS, CHAT):
        # a whole answer through the router has the fields, and the values, of the server's own
        body = {"model": "tiny", "prompt": prompt_of(1), "messages": messages_of(1), "max_tokens": 8, "temperature": 0}
        del body["messages" if kind == COMPLETIONS else "prompt"]
        through = (await served.client.post(kind, json=body)).json()
        direct = await call("POST", served.servers[0].url + kind, body)
        assert {**through, "id": 0, "created": 0} == {**direct, "id": 0, "created": 0}
    tasks = [asyncio.create_task(served.ask(n)) for n in range(12)]
    await served.until_half_way()
    served.servers[1].kill()
    await compare(served, wanted, tasks)
    assert await served.metric('healer_router_replays_total{how="continued"}') >= 3


async def test_a_fault_a_lost_rank_and_a_new_group_change_no_clients_text(served: Served) -> None:
    """Two ranks of one deployment. A fault in both aborts all requests with status 200; the instruction to retry brings the
    ranks back. Then one rank is killed: the other aborts too and serves nobody, until the whole group is started anew."""
    await begin(served, together=True)
    kinds = [COMPLETIONS if n % 2 else CHAT for n in range(12)]
    wanted = [await served.right_text(kind, n) for n, kind in enumerate(kinds)]

    tasks = [asyncio.create_task(served.ask(n)) for n in range(12)]
    await served.until_half_way()
    for slot in (0, 1):
        (served.folder / f"raise_step_rank{slot}").touch()
    await until(lambda: _all(served, "unhealthy"), deadline_s=STEP_DEADLINE_S)
    for server in served.servers:
        await call("POST", server.url + "/fault_tolerance/apply", {"instruction": "retry", "params": {}})
    await compare(served, wanted, tasks)
    assert await served.metric('healer_router_attempts_lost_total{cause="aborted"}') >= 3

    tokens = await served.metric("healer_router_tokens_total")
    tasks = [asyncio.create_task(served.ask(n)) for n in range(12)]
    await served.until_half_way(tokens)
    served.servers[1].kill()
    await until(lambda: _lost_all(served), deadline_s=STEP_DEADLINE_S)
    old, served.servers = served.servers, []
    served.write()
    old[0].kill()
    await served.launch(together=True)
    served.incarnations = {0: 2, 1: 2}
    served.write()
    await compare(served, wanted, tasks)


async def _all(served: Served, state: str) -> bool:
    return await served.fault_states() == [state] * 2


async def _lost_all(served: Served) -> bool:
    """The survivor has aborted what it had, and the router has given it everything again."""
    return any(rank["slot"] == 0 and rank["in_flight"] == 12 for rank in (await served.status())["ranks"])
