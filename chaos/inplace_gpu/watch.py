"""Clients at every rank's own server and at the router, and what of theirs belongs to one event."""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

from chaos.inplace_gpu.records import Silence
from chaos.vllm_gpu.load import Load
from chaos.vllm_gpu.scene import Scene

CLIENT_S = 300.0
ROUTER = -1
"""The key of the router's clients among those of the slots."""


class SlotLoad(Load):
    def arrivals(self) -> list[float]:
        """When tokens came, on the monotonic clock. Whole after the load's end."""
        return sorted(at for at, _ in self._arrivals)

    def tokens_in(self, begin: float, end: float) -> int:
        return sum(tokens for at, tokens in self._arrivals if begin <= at < end)

    def waits_in(self, begin: float, end: float) -> list[float]:
        """Seconds that a client waited for its next chunk, of waits that began and ended in this stretch."""
        return sorted(took for took, at in self._waits if begin <= at and at + took < end)


def silence(arrivals: Sequence[float], event: float, until: float) -> Silence | None:
    """The longest time without a token that touches the stretch from `event` to `until`; None where there are no two tokens around it.
    Its `at_s` is relative to the event: negative where it began before."""
    gaps = [(b - a, a) for a, b in pairwise(arrivals) if b > event and a < until]
    if not gaps:
        return None
    took, at = max(gaps)
    return Silence(at - event, took)


class Clients:
    """Of every slot and of the router, at once."""

    def __init__(self, scene: Scene, slots: Sequence[int], *, streams: int, router: str) -> None:
        def load(base: str) -> SlotLoad:
            return SlotLoad(lambda _: base, scene.prompts, scene.want, streams=streams, deadline_s=CLIENT_S)

        self.loads = {slot: load(scene.url(slot)) for slot in slots} | {ROUTER: load(router)}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Clients"]:
        async with contextlib.AsyncExitStack() as stack:
            for load in self.loads.values():
                await stack.enter_async_context(load.running())
            yield self

    async def answered(self, slots: Sequence[int], more: int, deadline_s: float) -> float:
        """Until each of these has given so many more right answers; returns when. Raises ElasticError at the deadline."""
        until, goals = time.monotonic() + deadline_s, {slot: self.loads[slot].right + more for slot in slots}
        for slot in slots:
            load = self.loads[slot]
            await load.answered(max(0, goals[slot] - load.right), max(0.1, until - time.monotonic()))
        return time.monotonic()
