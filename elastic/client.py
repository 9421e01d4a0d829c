"""A streaming client of the gateway that keeps every token and when it came: for the demo, benchmarks and tests."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
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
    client: httpx.AsyncClient,
    base: str,
    prompt: Tokens,
    max_tokens: int,
    *,
    deadline_s: float = 120.0,
    answer: Answer | None = None,
    **more: Any,
) -> Answer:
    """One streaming greedy completion to its end or its error; never raises for what the server does. `answer` is filled
    as tokens come, so that the caller can watch; `more` goes into the request."""
    answer = answer or Answer()
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


class Traffic:
    """Concurrent requests, one connection each; `answers` fill while `run` goes on. `options(i)` goes into request i."""

    def __init__(
        self,
        base: str,
        prompts: Sequence[Tokens],
        max_tokens: int,
        deadline_s: float = 120.0,
        options: Callable[[int], dict[str, Any]] = lambda _: {},
    ) -> None:
        self.answers = [Answer() for _ in prompts]
        self._base, self._prompts, self._max_tokens, self._deadline_s = base, prompts, max_tokens, deadline_s
        self._options = options

    @property
    def tokens(self) -> int:
        """Received so far, by all requests."""
        return sum(len(a.tokens) for a in self.answers)

    async def run(self) -> list[Answer]:
        limits = httpx.Limits(max_connections=len(self._prompts) + 4)
        async with httpx.AsyncClient(limits=limits, trust_env=False) as client:
            calls = (
                stream(
                    client, self._base, p, self._max_tokens, deadline_s=self._deadline_s, answer=a, **self._options(i)
                )
                for i, (p, a) in enumerate(zip(self._prompts, self.answers, strict=True))
            )
            await asyncio.gather(*calls)
        return self.answers

    async def reached(self, tokens: int) -> None:
        """Wait until so many tokens have come, or all requests have ended."""
        # polled: nobody could set an event at an exact count
        while self.tokens < tokens and not all(a.finish or a.error for a in self.answers):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def traffic(base: str, prompts: Sequence[Tokens], max_tokens: int) -> list[Answer]:
    """All prompts at once, to their ends."""
    return await Traffic(base, prompts, max_tokens).run()


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
