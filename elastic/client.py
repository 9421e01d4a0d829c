"""A streaming client of the gateway that keeps every token and when it came: for the demo, benchmarks and tests."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

Tokens = list[int]


@dataclass
class Answer:
    """What one client saw of one request."""

    tokens: Tokens = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Arrival of each chunk, seconds of the monotonic clock."""
    finish: str | None = None
    error: str | None = None

    @property
    def longest_gap_s(self) -> float:
        """Longest silence between two chunks."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


def random_prompts(count: int, vocab: int, seed: int) -> list[Tokens]:
    """Prompts of 4 to 24 random tokens; the same for the same seed."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(draw.randint(4, 24))] for _ in range(count)]


async def stream(
    client: httpx.AsyncClient, base: str, prompt: Tokens, max_tokens: int, deadline_s: float = 120.0, **more: Any
) -> Answer:
    """One streaming greedy completion to its end or its error; never raises for what the server does."""
    answer = Answer()
    body = {
        "model": (await _model(client, base)),
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    } | more
    try:
        async with (
            asyncio.timeout(deadline_s),
            client.stream("POST", base + "/v1/completions", json=body, timeout=deadline_s) as response,
        ):
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread()).decode()}"
                return answer
            async for data in _events(response):
                _take(answer, data)
    except TimeoutError:
        answer.error = f"no end within {deadline_s:g} s, {len(answer.tokens)} tokens came"
    except httpx.HTTPError as error:
        answer.error = repr(error)
    return answer


async def traffic(base: str, prompts: Sequence[Tokens], max_tokens: int, deadline_s: float = 120.0) -> list[Answer]:
    """All prompts at once, one connection each."""
    limits = httpx.Limits(max_connections=len(prompts) + 4)
    async with httpx.AsyncClient(limits=limits) as client:
        return list(await asyncio.gather(*(stream(client, base, p, max_tokens, deadline_s) for p in prompts)))


def _take(answer: Answer, data: dict[str, Any]) -> None:
    if "error" in data:
        answer.error = json.dumps(data["error"])
    for choice in data.get("choices", []):
        if ids := choice.get("token_ids"):
            answer.tokens += ids
            answer.times.append(time.monotonic())
        answer.finish = choice.get("finish_reason") or answer.finish


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    # not aiter_lines: it also splits at the Unicode line ends that an answer's text may hold
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])


async def _model(client: httpx.AsyncClient, base: str) -> str:
    models = (await client.get(base + "/v1/models", timeout=30)).raise_for_status().json()
    return str(models["data"][0]["id"])
