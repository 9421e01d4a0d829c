"""An open loop of greedy requests with fixed seeds, and the ledger of what became of each.

Arrivals are drawn ahead and do not wait for answers: a group that is slow gets more requests at once, as from real clients.
Each answer is compared with what the same prompt gave without a fault.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import httpx

from chaos.records import Ledger, Prompt, Request, RequestOutcome, tokens_hash
from chaos.scenario import Load
from elastic.errors import ElasticError

CONNECTIONS = 512
DEADLINE_S = 90.0
"""Of a client; a request that has no end by then is `unended`."""


class Client:
    """One request, as its client saw it."""

    def __init__(self, n: int, prompt: Prompt, due_at: float) -> None:
        self.n, self.prompt, self.due_at = n, prompt, due_at
        self.id, self.finish, self.error = "", "", ""
        self.status = 0
        self.sent_at = self.ended_at = 0.0
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.ended = False

    async def ask(self, client: httpx.AsyncClient, url: str, model: str) -> None:
        """Never raises for what the server does."""
        body = {
            "model": model,
            "prompt": list(self.prompt.tokens),
            "max_tokens": len(self.prompt.expected),
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        self.sent_at = time.monotonic()
        try:
            async with (
                asyncio.timeout(DEADLINE_S),
                client.stream("POST", url, json=body, timeout=DEADLINE_S) as response,
            ):
                self.status = response.status_code
                if response.status_code != 200:
                    self.error = (await response.aread()).decode(errors="replace")[:500]
                else:
                    await self._read(response)
                self.ended = True
        except TimeoutError:
            self.error = f"no end within {DEADLINE_S:g} s"
        except httpx.HTTPError as error:
            self.error, self.ended = f"the connection broke: {error!r}"[:500], True
        self.ended_at = time.monotonic()

    async def _read(self, response: httpx.Response) -> None:
        rest = b""
        async for part in response.aiter_bytes():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    self._take(json.loads(line[6:]))

    def _take(self, data: dict[str, object]) -> None:
        now = time.monotonic()
        self.id = self.id or str(data.get("id", ""))
        if "error" in data:
            self.error = json.dumps(data["error"])[:500]
        choices = data.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            ids = choice.get("token_ids") or []
            self.tokens += ids
            self.times += [now] * len(ids)
            self.finish = choice.get("finish_reason") or self.finish

    def record(self, late_after_s: float) -> Request:
        want = self.prompt.expected
        differs = next((i for i, (a, b) in enumerate(zip(self.tokens, want, strict=False)) if a != b), -1)
        moments = [self.sent_at, *self.times]
        gap_s = max((b - a for a, b in pairwise(moments)), default=0.0)
        if not self.finish:
            gap_s = max(gap_s, self.ended_at - moments[-1]) if self.ended_at else gap_s
        return Request(
            n=self.n,
            id=self.id,
            prompt=self.prompt.id,
            due_at=self.due_at,
            sent_at=self.sent_at,
            tokens=tuple(self.tokens),
            times=tuple(self.times),
            ended_at=self.ended_at,
            finish=self.finish,
            status=self.status,
            error=self.error,
            outcome=self._outcome(differs),
            expected_hash=self.prompt.expected_hash,
            tokens_hash=tokens_hash(self.tokens),
            differs_at=differs,
            late=bool(late_after_s) and gap_s > late_after_s,
            longest_gap_s=gap_s,
        )

    def _outcome(self, differs: int) -> RequestOutcome:
        wanted = len(self.prompt.expected)
        if differs >= 0:
            return "differs"
        if len(self.tokens) > wanted:
            return "duplicated"
        if self.status in (429, 503) and not self.tokens:
            return "refused"
        if not self.ended:
            return "unended"
        if self.finish and not self.error:
            return "right" if len(self.tokens) == wanted else "lost"
        if self.error.startswith("the connection broke") or (not self.error and not self.finish):
            return "cut"
        return "failed"


class Generator:
    """`run` sends until `stop` is called, and returns when the last answer has ended. One use."""

    def __init__(self, base: str, model: str, load: Load, prompts: Sequence[Prompt], seed: int) -> None:
        self._url, self._model, self._load, self._prompts = base + "/v1/completions", model, load, prompts
        self._draw = random.Random(f"arrivals {seed}")
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._client: httpx.AsyncClient | None = None
        self.clients: list[Client] = []
        self.on_sent: Callable[[int], None] = lambda _: None
        """Called in the loop with the number of each request that has been sent."""

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, trust_env=False) as self._client:
            due = time.monotonic()
            while self._load.rate_per_s and not self._stopped.is_set():
                due += self._draw.expovariate(self._load.rate_per_s)
                try:
                    async with asyncio.timeout(max(0.0, due - time.monotonic())):
                        await self._stopped.wait()
                except TimeoutError:
                    self._send(due)
            await self._stopped.wait()
            while self._tasks:
                await asyncio.wait(self._tasks)

    def stop(self) -> None:
        """No more arrivals; those under way go on to their ends."""
        self._stopped.set()

    def burst(self, count: int) -> None:
        """So many more at once, from the loop's thread."""
        for _ in range(count):
            self._send(time.monotonic())

    def records(self) -> list[Request]:
        sent = [client for client in self.clients if client.sent_at]
        return [client.record(self._load.late_after_s) for client in sent]

    def _send(self, due: float) -> None:
        if self._client is None:
            raise ElasticError("the load is over")
        client = Client(len(self.clients), self._draw.choice(self._prompts), due)
        self.clients.append(client)
        task = asyncio.get_running_loop().create_task(client.ask(self._client, self._url, self._model))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.on_sent(client.n)


def ledger(requests: Sequence[Request], prompts: Sequence[Prompt], replayed: int) -> Ledger:
    wanted = {prompt.id: len(prompt.expected) for prompt in prompts}
    return Ledger(
        sent=len(requests),
        outcomes=dict(Counter(one.outcome for one in requests)),
        late=sum(one.late for one in requests),
        tokens=sum(len(one.tokens) for one in requests),
        tokens_expected=sum(wanted[r.prompt] for r in requests if r.outcome not in ("refused", "failed", "cut")),
        longest_gap_s=max((one.longest_gap_s for one in requests), default=0.0),
        replayed=replayed,
    )
