"""A router in the test's own loop, with its file and its ranks; and a client that reads streams."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from healer.router.files import Announcement
from healer.router.server import Router
from tests.vllm.router_fakes import MODEL, FakeRank, right_text

DEADLINE_S = 10.0
COMPLETIONS = "/v1/completions"
PROMPT = "a prompt of more than eight tokens"
RIGHT = right_text(PROMPT.encode(), 20)
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
"""RIGHT is its answer."""


class Stand:
    """A router with its file, and the ranks in it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "routes.json"
        self.ranks: dict[int, FakeRank] = {}
        self.epoch = 0
        self.incarnations: dict[int, int] = {}
        self.admit: dict[int, bool] = {}
        self.settings: dict[str, Any] = {"poll_s": 0.05}
        self.stop = asyncio.Event()
        self.router: Router | None = None
        self._task: asyncio.Task[None] | None = None
        self.client = httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False)

    def content(self) -> dict[str, Any]:
        ranks = [
            {
                "slot": slot,
                "incarnation": self.incarnations.get(slot, 1),
                "url": rank.url,
                "admit": self.admit.get(slot, True),
            }
            for slot, rank in self.ranks.items()
        ]
        return {"epoch": self.epoch, "ranks": ranks, **self.settings}

    def write(self, **more: Any) -> None:
        self.epoch += 1
        self.path.write_text(json.dumps(self.content() | more))
        if self.router is not None:
            self.router.reload()

    async def start(self, ranks: int = 2, **settings: Any) -> None:
        for slot in range(ranks):
            await self.add(slot)
        self.settings |= settings
        self.write()
        self.router = Router(self.path)
        ready = asyncio.Event()
        self._task = asyncio.create_task(self.router.serve(self.stop, ready))
        await asyncio.wait([self._task, asyncio.ensure_future(ready.wait())], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        announced = json.loads(self.path.with_name("router.json").read_text())
        self.client.base_url = Announcement(**announced).http
        await self.until_open(ranks)

    async def add(self, slot: int) -> FakeRank:
        rank = self.ranks[slot] = FakeRank()
        await rank.start()
        return rank

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get("/status")).json()
        return found

    async def until_open(self, count: int) -> None:
        async def check() -> bool:
            return [rank["open"] for rank in (await self.status())["ranks"]].count(True) == count

        await until(check)

    async def metric(self, line: str) -> float:
        text = (await self.client.get("/metrics")).text
        return next((float(one.rpartition(" ")[2]) for one in text.splitlines() if one.startswith(line + " ")), 0.0)

    async def aclose(self) -> None:
        self.stop.set()
        if self._task is not None:
            await self._task
        for rank in self.ranks.values():
            await rank.kill()
        await self.client.aclose()


async def until(condition: Callable[[], Any], *, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition, plain or a coroutine, with a deadline."""
    async with asyncio.timeout(deadline_s):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.005)


async def text_of(stand: Stand) -> str:
    """Of BODY, asked through the router."""
    answer = await stand.client.post(COMPLETIONS, json=BODY)
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["choices"][0]["text"]
    return said


class Streamed:
    """What a client made of a stream."""

    def __init__(self) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.done = False
        self.error: dict[str, Any] | None = None
        self.status = 0

    def take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                self.error = chunk["error"]
            else:
                self.chunks.append(chunk)

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    @property
    def text(self) -> str:
        return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in self.choices)

    @property
    def ids(self) -> list[int]:
        return [token for choice in self.choices for token in choice.get("token_ids") or []]

    @property
    def finishes(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices if choice["finish_reason"]]


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any], **more: Any) -> Streamed:
    got = Streamed()
    async for _ in streaming(client, path, body, got, **more):
        pass
    return got


async def streaming(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], got: Streamed, **more: Any
) -> AsyncIterator[Streamed]:
    async with client.stream("POST", path, json={"model": MODEL, "stream": True, **body}, **more) as response:
        got.status = response.status_code
        with contextlib.suppress(httpx.RemoteProtocolError):
            async for line in response.aiter_lines():
                if got.status != 200:
                    got.error = json.loads(line)["error"]
                    continue
                got.take(line)
                yield got


Start = Callable[..., Awaitable[Stand]]
"""The fixture `start`: a router with so many ranks and such settings, ended behind the test."""
