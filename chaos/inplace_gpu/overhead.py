"""What the plugin costs while nothing is wrong: two groups side by side on the same GPUs, one stock and one with the plugin, loaded
in turn. A group without load does not step, so it takes nothing from the other one. The order of a pair alternates, so that a
drift of the machine falls on both."""

import asyncio
import math
import os
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from chaos.inplace_gpu.kills import ANSWER_S, slots_of
from chaos.inplace_gpu.records import Compared, Window
from chaos.inplace_gpu.watch import SlotLoad
from chaos.vllm_gpu.scene import Scene
from elastic.errors import ElasticError

WARM_S = 1.0
"""Of each window, not counted: its first requests are prompts without an answer under way."""
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t, two-sided 95 %, for 1, 2, … degrees of freedom; beyond them 2."""
MOST = 0.01
"""That tokens a second may be fewer, and the median wait longer, with the plugin."""
MEASURES = ("tokens_per_s", "median_wait_ms", "p99_wait_ms")


async def window(scene: Scene, seconds: float, *, plugin: bool) -> Window:
    """Load on all ranks' own servers, for so long. Raises ElasticError where a client saw an error or a wrong token."""
    slots = slots_of(scene)
    load = SlotLoad(
        lambda number: scene.url(slots[number % len(slots)]),
        scene.prompts,
        scene.want,
        streams=scene.profile.streams,
        deadline_s=ANSWER_S,
    )
    async with load.running():
        begin = time.monotonic() + WARM_S
        await asyncio.sleep(WARM_S + seconds)
        end = time.monotonic()
    if load.errors or load.wrong:
        raise ElasticError(f"without a fault: {load.errors} errors, {load.wrong} wrong answers; {load.report().shown}")
    waits = load.waits_in(begin, end)
    if len(waits) < 2:
        raise ElasticError(f"{len(waits)} chunks within {seconds:g} s are too few to compare")
    return Window(
        plugin=plugin,
        tokens_per_s=load.tokens_in(begin, end) / (end - begin),
        median_wait_ms=1e3 * statistics.median(waits),
        p99_wait_ms=1e3 * waits[min(len(waits) - 1, int(0.99 * len(waits)))],
    )


async def windows(stock: Scene, plugin: Scene, pairs: int, seconds: float) -> tuple[Window, ...]:
    """Pairs of windows, stock first in even ones. Raises ElasticError."""
    if stock.want != plugin.want:
        raise ElasticError("the fault-free answers of the two groups differ")
    found = []
    for number in range(pairs):
        order = ((stock, False), (plugin, True))
        for scene, has in order if number % 2 == 0 else reversed(order):
            found.append(await window(scene, seconds, plugin=has))
    return tuple(found)


def compare(found: Sequence[Window]) -> dict[str, Compared]:
    """With the plugin relative to stock, by measure. Pure. `found`: pairs, as `windows` gives them."""
    pairs = list(zip(found[::2], found[1::2], strict=True))
    result = {}
    for name in MEASURES:
        ratios = []
        for pair in pairs:
            values = {one.plugin: float(getattr(one, name)) for one in pair}
            ratios.append(values[True] / values[False])
        mean = statistics.fmean(ratios)
        if len(ratios) < 2:
            result[name] = Compared(mean, -math.inf, math.inf)
            continue
        freedom = len(ratios) - 1
        t = T95[freedom - 1] if freedom <= len(T95) else 2.0
        spread = t * statistics.stdev(ratios) / math.sqrt(len(ratios))
        result[name] = Compared(mean, mean - spread, mean + spread)
    return result


def missed(found: Mapping[str, Compared]) -> str:
    """What the plugin costs beyond MOST, by the mean of all pairs; empty: no more. Pure."""
    costs = {"tokens_per_s": 1.0 - found["tokens_per_s"].ratio, "median_wait_ms": found["median_wait_ms"].ratio - 1.0}
    return "; ".join(f"{name} is {100 * cost:.1f} % worse than stock's" for name, cost in costs.items() if cost > MOST)


async def restart(scene: Scene, slot: int, figures: dict[str, Any]) -> SlotLoad:
    """The same kill in the stock group, whose operator knows at once and starts it anew: healer with `inPlace: off`. Clients
    at the ranks' own servers. Raises ElasticError."""
    slots = slots_of(scene)
    before, pids = await scene.incarnations(), await scene.engines(slot)
    loads = SlotLoad(
        lambda number: scene.url(slots[number % len(slots)]),
        scene.prompts,
        scene.want,
        streams=scene.profile.streams,
        deadline_s=ANSWER_S,
    )
    async with loads.running(finish=False):
        await loads.answered(len(slots), ANSWER_S)
        event = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        done = await scene.until_anew(before, scene.profile.start_s + 30.0)
        figures["restarted_s"] = done - event
        await loads.answered(2 * len(slots), ANSWER_S)
    first = [at for at in loads.arrivals() if at > event + figures["restarted_s"] / 2]
    figures["first_token_s"] = first[0] - event if first else None
    return loads
