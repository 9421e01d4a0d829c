"""Clients that ask the same prompts again and again, one request after another each, and compare every token."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count, pairwise
from typing import Any

import httpx
import msgspec

from elastic.client import Answer, Tokens, Traffic, stream
from elastic.errors import ElasticError

PAUSE_S = 0.2
"""After an error: whoever refuses must not be stormed."""
SHOWN = 5


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients saw. Moments in seconds since the load began."""

    seconds: float
    right: int
    """Complete answers with every token as without a fault."""
    wrong: int
    """Complete answers with another token in them."""
    errors: int
    cut_off: int
    """Still at work when the load was ended: neither."""
    tokens: int
    shown: tuple[str, ...]
    """The first few errors and wrong answers."""
    error_at: tuple[float, ...]
    """The first few."""
    longest_wait_s: float
    """Of one client: from its request, or its last chunk, to its next chunk."""
    longest_wait_at: float
    """When that began."""
    longest_silence_s: float
    """In which no client got anything."""
    longest_silence_at: float
    tokens_per_s: tuple[int, ...]
    """Second by second."""


class Load:
    """`base(n)` is where client n asks; `want` by prompt. Every client has a connection of its own."""

    def __init__(
        self,
        base: Callable[[int], str],
        prompts: Sequence[Tokens],
        want: Sequence[Tokens],
        *,
        streams: int,
        deadline_s: float,
    ) -> None:
        self._base, self._prompts, self._want = base, prompts, want
        self._streams, self._deadline_s = streams, deadline_s
        self._stop = asyncio.Event()
        self._turns = count()
        self._began = self._ended = 0.0
        self._arrivals: list[tuple[float, int]] = []
        self._waits: list[tuple[float, float]] = []
        self._problems: list[tuple[float, str]] = []
        self._open: dict[int, tuple[float, Answer]] = {}
        self.right = self.wrong = self.errors = self.cut_off = 0

    @contextlib.asynccontextmanager
    async def running(self, *, finish: bool = True) -> AsyncIterator["Load"]:
        """`finish`: requests under way at the end are waited for, unless it ends by an exception."""
        self._began = time.monotonic()
        limits: Any = httpx.Limits(max_connections=self._streams + 4)
        async with httpx.AsyncClient(limits=limits, trust_env=False, verify=False) as client:
            tasks = [asyncio.create_task(self._client(client, number)) for number in range(self._streams)]
            try:
                yield self
            except BaseException:
                finish = False
                raise
            finally:
                self._stop.set()
                self._ended = time.monotonic()
                if not finish:
                    for task in tasks:
                        task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def answered(self, more: int, deadline_s: float) -> None:
        """Wait for so many right answers from now on. Raises ElasticError at the deadline."""
        goal, end = self.right + more, time.monotonic() + deadline_s
        while self.right < goal:
            if time.monotonic() > end:
                raise ElasticError(
                    f"{self.right} right answers within {deadline_s:g} s, {goal} were expected; {self._problems[-1:]}"
                )
            await asyncio.sleep(0.05)

    async def _client(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._stop.is_set():
            turn = next(self._turns) % len(self._prompts)
            began, answer = time.monotonic(), Answer()
            self._open[number] = began, answer
            try:
                await stream(
                    client,
                    self._base(number),
                    self._prompts[turn],
                    len(self._want[turn]),
                    deadline_s=self._deadline_s,
                    answer=answer,
                )
            except httpx.HTTPError as error:  # of the question for the model's name
                answer.error = repr(error)
            except asyncio.CancelledError:
                self.cut_off += 1
                self._note(began, answer, time.monotonic())
                raise
            del self._open[number]
            self._judge(began, answer, self._want[turn])
            if answer.error is not None:
                await asyncio.sleep(PAUSE_S)

    def _judge(self, began: float, answer: Answer, want: Tokens) -> None:
        now = time.monotonic()
        self._note(began, answer, now)
        if answer.error is not None or answer.finish != "length":
            self.errors += 1
            self._problems.append(
                (now - self._began, f"error: {answer.error or f'it ended with {answer.finish}'}"[:300])
            )
        elif answer.tokens != want:
            self.wrong += 1
            same = next((n for n, (a, b) in enumerate(zip(answer.tokens, want, strict=False)) if a != b), len(want))
            self._problems.append(
                (now - self._began, f"wrong from token {same} on, {len(answer.tokens)} of {len(want)} came")
            )
        else:
            self.right += 1

    def _note(self, began: float, answer: Answer, ended: float) -> None:
        moments = [began, *answer.times, *([ended] if answer.error is not None or not answer.finish else [])]
        self._waits += [(b - a, a) for a, b in pairwise(moments)]
        if answer.times:
            share = len(answer.tokens) // len(answer.times)
            self._arrivals += [(at, share) for at in answer.times]
            self._arrivals.append((answer.times[-1], len(answer.tokens) - share * len(answer.times)))

    def report(self) -> LoadReport:
        """After its end."""
        began, ended = self._began, self._ended
        arrivals = sorted(self._arrivals)
        marks = [began, *(at for at, _ in arrivals if at <= ended), ended]
        silence, silent_at = max(((b - a, a) for a, b in pairwise(marks)), default=(0.0, began))
        wait, wait_at = max(self._waits, default=(0.0, began))
        per_second = [0] * (int(ended - began) + 1)
        for at, tokens in arrivals:
            if at <= ended:
                per_second[int(at - began)] += tokens
        return LoadReport(
            seconds=ended - began,
            right=self.right,
            wrong=self.wrong,
            errors=self.errors,
            cut_off=self.cut_off,
            tokens=sum(tokens for _, tokens in arrivals),
            shown=tuple(text for _, text in self._problems[:SHOWN]),
            error_at=tuple(at for at, _ in self._problems[:SHOWN]),
            longest_wait_s=wait,
            longest_wait_at=wait_at - began,
            longest_silence_s=silence,
            longest_silence_at=silent_at - began,
            tokens_per_s=tuple(per_second),
        )


async def reference(base: str, prompts: Sequence[Tokens], tokens: int, *, deadline_s: float) -> list[Tokens]:
    """The fault-free answers. Raises ElasticError."""
    answers = await Traffic(base, prompts, tokens, deadline_s).run()
    for answer in answers:
        if answer.error is not None or len(answer.tokens) != tokens:
            raise ElasticError(f"no fault-free answer: {answer.error or f'{len(answer.tokens)} tokens'}")
    return [answer.tokens for answer in answers]
