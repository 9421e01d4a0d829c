"""The parts that hurt and change a group under traffic, and the groups that they share."""

import asyncio
import functools
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from chaos.gpu_bench import ranks
from chaos.gpu_bench.clients import Told
from chaos.gpu_bench.group import BenchGroup, with_answers
from chaos.gpu_bench.lab import FULL_TOKENS, VOCAB, Lab, Running, describe
from chaos.gpu_bench.records import Part
from elastic.client import random_prompts

Work = Callable[[BenchGroup, Running], Awaitable[None]]

HELD_S = 0.02
"""Some rounds: without it a rank may die between two rounds, where no kernel waits for it."""


class Shared:
    """One group that several parts use, one after the other. Where it cannot be formed, each of them has the reason.

    The answers of the clients are known when the group ends; the parts are written before that without them, and again
    with them."""

    def __init__(self, lab: Lab, model: str, **config: Any) -> None:
        self._lab, self._model, self._changes = lab, model, config
        self._plans: list[tuple[Running, Work]] = []

    def plan(self, name: str, title: str, budget_s: float, samples: int, work: Work) -> "Shared":
        if self._lab.wants(name):
            self._plans.append((Running(name, title, budget_s, self._lab.options.count(samples)), work))
        return self

    async def run(self) -> None:
        if not self._plans:
            return
        lab, group = self._lab, None
        described: dict[str, Any] = {"model": self._model}
        parts: list[Part] = []
        told: list[Told] = []
        started = ""
        try:
            try:
                config = lab.group(await lab.checkpoint(self._model), **self._changes)
                described = describe(config, lab.model(self._model))
                group = BenchGroup(config, lab.options.seed)
                async with asyncio.timeout(max(1.0, lab.left_s)):
                    await group.start()
            except Exception as error:
                started = f"the group could not be formed: {type(error).__name__}: {error}"
            for running, work in self._plans:
                running.config = described
                if started or group is None:
                    lab.add(running.record(started))
                    continue
                await lab.part(running, functools.partial(work, group))
                parts.append(lab.results.parts[-1])
        finally:
            if group is not None:
                if started or any(part.error for part in parts):
                    lab.keep_logs(group.config.root)
                told = await group.stop()
        for part in parts:
            lab.judge(part.name, with_answers(part.samples, told), group.notes if group else ())


async def kills(group: BenchGroup, running: Running, held_s: float = 0.0) -> None:
    """Slots in turn, at a random moment of the traffic."""
    draw = random.Random(running.name)
    for number in range(running.wanted):
        if running.spent:
            return
        slot = number % group.config.ranks
        await group.spare_for(slot)
        await asyncio.sleep(draw.uniform(0.1, 0.4))
        if running.samples:
            running.samples[-1] = await group.idle_gap(running.samples[-1])
        running.samples.append(await group.kill([slot], held_s))


async def held_kills(group: BenchGroup, running: Running) -> None:
    await kills(group, running, HELD_S)


async def kill_for_good(group: BenchGroup, running: Running) -> None:
    """One rank, and nobody comes in its place."""
    group.replace = False
    await asyncio.sleep(0.2)
    running.samples.append(await group.kill([group.config.ranks - 1], HELD_S))


async def scales(group: BenchGroup, running: Running) -> None:
    """Down by one rank, each slot in turn, and up again."""
    everyone = set(range(group.config.ranks))
    for number in range(running.wanted):
        if running.spent:
            return
        slot = number % group.config.ranks
        await group.spare_for(slot)
        for target in (everyone - {slot}, everyone):
            await asyncio.sleep(0.2)
            running.samples.append(await group.scale(target))


def removals(group_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Which slots die: first, a middle one, last, then two at once."""
    middle = group_ranks // 2
    return (0,), (middle,), (group_ranks - 1,), (middle - 1, middle)


async def arbitrary(group: BenchGroup, running: Running) -> None:
    for slots in removals(group.config.ranks):
        if running.spent:
            return
        await asyncio.sleep(0.2)
        running.samples.append(await group.kill(slots))


async def logits(group: BenchGroup, running: Running) -> None:
    """The same prompts on slot 0, twice with all ranks and once when it is alone: other sums, and what that changes."""
    prompts = random_prompts(running.wanted, VOCAB, seed=1)
    # too short for many tokens: a difference in one would change those that follow
    tokens = 8

    async def ask() -> list[tuple[list[int], list[Sequence[float]]]]:
        member = group.member(0)
        return [await ranks.logits(group.config.name, member, p, tokens) for p in prompts]

    first, again = await ask(), await ask()
    group.replace = False
    try:
        others = [s for s in group.executor.status().live if s != 0]
        running.samples.append(await group.kill(others))
        alone = await ask()
    finally:
        group.replace = True
        group.executor.scale(group.config.ranks, reason="benchmark")
    await group.executor.settled(deadline_s=60.0)
    back = await ask()
    running.figures |= {
        "prompts": len(prompts),
        "tokens_a_prompt": tokens,
        "logits_std": statistics.pstdev(x for _, rows in first for row in rows for x in row),
        "same_ranks_again": differences(first, again),
        "alone_after_the_loss": differences(first, alone),
        "after_the_refill": differences(first, back),
    }


Rows = list[tuple[list[int], list[Sequence[float]]]]


def differences(left: Rows, right: Rows) -> dict[str, Any]:
    """Of the logits of equal prompts, up to the first token that differs: the largest difference, absolute and relative
    to the larger of the two; and whether all tokens are equal."""
    largest = relative = 0.0
    equal = True
    for (a_tokens, a_rows), (b_tokens, b_rows) in zip(left, right, strict=True):
        equal &= a_tokens == b_tokens
        same = next((i for i, (a, b) in enumerate(zip(a_tokens, b_tokens, strict=False)) if a != b), len(a_tokens))
        for a_row, b_row in zip(a_rows[: same + 1], b_rows[: same + 1], strict=False):
            for a, b in zip(a_row, b_row, strict=True):
                if a != b:
                    largest = max(largest, abs(a - b))
                    relative = max(relative, abs(a - b) / max(abs(a), abs(b)))
    return {"tokens_equal": equal, "max_abs": largest, "max_rel": relative}


async def run_main(lab: Lab) -> None:
    """What the targets are about."""
    # faults come faster than spares are replaced, so one stands by for each
    spares = Shared(lab, "narrow", spares=2 if lab.options.cpu else 32)
    spares.plan("kill", "SIGKILL with replicas and warm spares", 130, 30, kills)
    spares.plan("logits", "Logits of the same prompts before and after a loss", 15, 8, logits)
    await spares.run()
    # as many graphs as vLLM captures by default, and as the baseline captures again
    full = Shared(lab, "narrow", spares=2 if lab.options.cpu else 12, max_tokens=FULL_TOKENS)
    full.plan("scale", "Planned scale down and up, warm spares", 70, 10, scales)
    await full.run()
    orphans = Shared(lab, "narrow", redundant_experts=0, host_tier=True)
    orphans.plan("orphans", "SIGKILL without replicas: orphans from the host tier, no spares", 50, 5, kills)
    await orphans.run()
    wide = Shared(lab, "wide", redundant_experts=0, host_tier=True, spares=2 if lab.options.cpu else 4)
    wide.plan("orphans-wide", "The same at DeepSeek's width, warm spares", 30, 3, kills)
    await wide.run()


async def run_shared(lab: Lab) -> None:
    shared = Shared(lab, "short", ranks=4, max_ranks=4, slots_per_rank=4, redundant_experts=8)
    shared.plan(
        "shared-gpus",
        "Four ranks on two GPUs (times of shared GPUs): first, middle, last, two at once",
        60,
        4,
        arbitrary,
    )
    await shared.run()


async def run_late(lab: Lab) -> None:
    """What it costs that a kernel which waits for the dead is not released."""
    for name, timeout_s, samples, budget_s, work in (
        ("timeout-1s", 1.0, 3, 40, held_kills),
        ("timeout-30s", 30.0, 1, 60, kill_for_good),
    ):
        spares = samples + 1 if samples > 1 else 0
        late = Shared(lab, "short", spares=spares, early_release=False, ep_timeout_s=timeout_s, commit_deadline_s=60.0)
        late.plan(
            name, f"Early release off: a kernel waits for NIXL's timeout of {timeout_s:g} s", budget_s, samples, work
        )
        await late.run()
