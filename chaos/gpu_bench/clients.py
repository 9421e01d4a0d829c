"""Clients in a process of their own, so that their work does not slow the controller that is measured.

Reads one line of JSON (base, prompts, tokens) and answers each prompt once: what comes is what is expected from then on.
Prints a line, asks again and again until its input says "stop", then prints every answer as one line of JSON.
"""

import asyncio
import sys
import time
from typing import Any

import httpx
import msgspec

from elastic.client import Answer, Tokens, Traffic, stream
from elastic.errors import ElasticError

DEADLINE_S = 120.0
LINE_BYTES = 1 << 26


class Order(msgspec.Struct, frozen=True):
    base: str
    prompts: list[Tokens]
    tokens: int


class Told(msgspec.Struct, frozen=True):
    """What became of one request. Moments of the host's monotonic clock."""

    began: float
    ended: float
    wrong: str
    """Empty: complete, and equal to the fault-free answer."""
    longest_gap_s: float


class Report(msgspec.Struct, frozen=True):
    answers: list[Told]


class Clients:
    """The benchmark's side: the process, from its first answers to its report."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, order: Order) -> "Clients":
        """Returns when every prompt was answered once, and all are asked again. Raises ElasticError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "chaos.gpu_bench.clients"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        clients = cls(process)
        clients._send(msgspec.json.encode(order))
        said = await clients._line()
        if said != b"asking":
            await clients.kill()
            raise ElasticError(f"the clients got no fault-free answers: {said.decode()[:500]}")
        return clients

    async def stop(self) -> list[Told]:
        """Let each finish the answer that it reads; all answers since the start."""
        self._send(b"stop")
        line = await self._line()
        await self._process.wait()
        return msgspec.json.decode(line, type=Report).answers

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).strip()


def judged(answer: Answer, began: float, want: Tokens) -> Told:
    wrong = ""
    if answer.error is not None or answer.finish is None:
        wrong = f"did not complete: {answer.error or 'it has no end'}"
    elif answer.tokens != want:
        same = next((n for n, (a, b) in enumerate(zip(answer.tokens, want, strict=False)) if a != b), len(want))
        wrong = f"differs from the fault-free answer from token {same} on"
    return Told(began=began, ended=time.monotonic(), wrong=wrong, longest_gap_s=answer.longest_gap_s)


async def _run() -> int:
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    order = msgspec.json.decode(await reader.readline(), type=Order)
    first = await Traffic(order.base, order.prompts, order.tokens, DEADLINE_S).run()
    if broken := [a.error or "no end" for a in first if a.error is not None or a.finish is None]:
        print(broken[0].replace("\n", " "), flush=True)
        return 1
    told: list[Told] = []
    stop = asyncio.Event()

    async def ask(client: httpx.AsyncClient, prompt: Tokens, want: Tokens) -> None:
        while not stop.is_set():
            began = time.monotonic()
            answer = await stream(client, order.base, prompt, order.tokens, deadline_s=DEADLINE_S)
            told.append(judged(answer, began, want))
            if answer.error is not None:
                await asyncio.sleep(0.05)  # a gateway that refuses must not be stormed

    async def until_told() -> None:
        await reader.readline()
        stop.set()

    limits: Any = httpx.Limits(max_connections=len(order.prompts) + 4)
    async with httpx.AsyncClient(limits=limits, trust_env=False) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(until_told())
        for prompt, answer in zip(order.prompts, first, strict=True):
            tasks.create_task(ask(client, prompt, answer.tokens))
        print("asking", flush=True)
    print(msgspec.json.encode(Report(told)).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_run()))
