"""Starts the coordinator (`waves`), of a process that stands by where there is one. It has imported vLLM already, which is what
engines that come from spares would wait for when a group is started anew."""

import asyncio
import contextlib
import json
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence

from elastic import process
from elastic.vllm.coordination.waves import STAND_BY

MODULE = "elastic.vllm.coordination.waves"
PAUSE_S, PAUSE_MAX_S = 5.0, 300.0


class Coordinators:
    """Owned by the host, used in its loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._spare: Process | None = None
        self._one = asyncio.Lock()
        self._clock = clock
        self._pause_s, self._not_before = PAUSE_S, 0.0

    async def start(self, arguments: Sequence[str]) -> Process:
        """The caller ends it, and sees to it if it ends."""
        async with self._one:
            spare, self._spare = self._spare, None
            if spare is not None and await _ordered(spare, arguments):
                self._pause_s = PAUSE_S
                return spare
            await _end(spare)
            return await _begin(*arguments)

    async def stand_by(self) -> None:
        """Have one that stands by, or comes up for it. One that has ended by itself is tried again after a while: it imports
        vLLM, which costs a busy host seconds."""
        async with self._one:
            if self._spare is not None and self._spare.returncode is not None:
                self._spare, self._not_before = None, self._clock() + self._pause_s
                self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s)
            if self._spare is None and self._clock() >= self._not_before:
                self._spare = await _begin(STAND_BY)

    async def aclose(self) -> None:
        spare, self._spare = self._spare, None
        await _end(spare)


async def _begin(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", MODULE, *arguments, stdin=asyncio.subprocess.PIPE)


async def _ordered(spare: Process, arguments: Sequence[str]) -> bool:
    """One that is stopped would never become anything. One that dies of the order is seen by whoever watches it."""
    found = process.stat(spare.pid)
    if spare.returncode is not None or spare.stdin is None or found is None or found[0] in "tTZX":
        return False
    with contextlib.suppress(ConnectionError):
        spare.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
        await spare.stdin.drain()
        return True
    return False


async def _end(one: Process | None) -> None:
    if one is not None and one.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            one.kill()
        await one.wait()
