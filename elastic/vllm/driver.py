"""Sequences over several ranks: shrink until the rest serves, and fill a slot again. For the daemon.

The decisions are pure (`next_round`); processes are the caller's: it says who lives, ends whom it is told to, and launches joiners.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from elastic.errors import ElasticError
from elastic.vllm.client import Coordination, NoAnswer, NotInForce, RankClient
from elastic.vllm.records import (
    Bootstrap,
    CoordinationInfo,
    EngineInfo,
    Phase,
    RefillAbort,
    RefillAnswer,
    RefillCommit,
    RefillPrepare,
    Refusal,
    Requests,
    ShrinkOrder,
    ShrinkResult,
)
from elastic.vllm.worker.interface import RefillOrder

POLL_S = 0.02
COORDINATION_S = 5.0
ABANDON_S = 0.2
"""To tell ranks of which one is dead that a refill is off: the others may stand in a step with it until the shrink that comes next."""
INFO_S = 3.0
LOOK_S = 1.0
"""Between two looks at the survivors of a refill."""
SLACK_S = 1.5
"""An engine answers for an order that is late half a second after its deadline."""
SAME_AGAIN = 2
"""Rounds over the same slots before it is given up: one may fail by chance, such as by an order that reached only some."""


class HealFailed(ElasticError):
    """No set of survivors serves: what is left is a restart of the group."""


class RefillFailed(ElasticError):
    """The slot is empty as before, and the others serve."""


class CommitFailed(ElasticError):
    """Live ranks may stand between two groups: they must be healed before anything else."""


class Ranks(Protocol):
    """The caller's processes. Called in the daemon's loop."""

    def alive(self, slot: int) -> bool:
        """Every process of the rank is there. False is a fact, not a guess."""
        ...

    async def fence(self, slots: Collection[int]) -> None:
        """End all processes of these ranks; returns when they are gone. Raises ElasticError."""
        ...


# --- shrink -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """What is done next."""

    serves: bool
    survivors: tuple[int, ...]
    fence: tuple[int, ...] = ()
    """Not dead, and not to be relied on: they must be before the others go on without them."""
    why: str = ""


def next_round(order: ShrinkOrder, answers: Mapping[int, ShrinkResult | str], dead: Collection[int]) -> Round:
    """From one round's answers (a str: none came, and why), and who is known to be dead now.

    A survivor is left out when it is dead, when its own worker failed, or when it said nothing. One that only failed with the
    others is asked again.
    """
    out: dict[int, str] = {slot: "it is dead" for slot in order.survivors if slot in dead}
    for slot, answer in answers.items():
        if slot in out:
            continue
        if isinstance(answer, str):
            out[slot] = answer
        elif answer.refused in (Refusal.DEAD, Refusal.STUCK) or (
            not answer.serves and answer.refused is None and answer.phase in (Phase.PARK, Phase.DRAIN)
        ):
            out[slot] = answer.detail  # its loop does not come out of a step
    if not out:
        # a worker that failed first may have met a peer that was dying: it counts as a cause where there is no other
        out = {slot: a.detail for slot, a in answers.items() if isinstance(a, ShrinkResult) and _own_worker_failed(a)}
    left = tuple(slot for slot in order.survivors if slot not in out)
    if not out and all(isinstance(answer, ShrinkResult) and answer.serves for answer in answers.values()):
        return Round(True, order.survivors)
    blamed = "; ".join(f"slot {slot}: {why}" for slot, why in sorted(out.items()))
    failed = [answer.detail for answer in answers.values() if isinstance(answer, ShrinkResult) and not answer.serves]
    fence = tuple(slot for slot in sorted(out) if slot not in dead)
    return Round(False, left, fence, blamed or (failed[0] if failed else "not all serve"))


def _own_worker_failed(answer: ShrinkResult) -> bool:
    return not answer.serves and answer.refused is None and answer.phase == Phase.WORKERS


@dataclass(frozen=True)
class Healed:
    survivors: tuple[int, ...]
    epoch: int
    took_s: float
    rounds: int
    results: Mapping[int, ShrinkResult]
    left_out: Mapping[int, str]
    """Slots of the first round that are not in the last."""


async def heal(
    clients: Mapping[int, RankClient],
    ranks: Ranks,
    survivors: Collection[int],
    store: tuple[str, int],
    *,
    epoch: int,
    timeout_s: float = 5.0,
    rounds: int = 6,
    requests: Requests = Requests.KEEP,
) -> Healed:
    """Order shrinks with rising epochs until all of a set serve. Raises HealFailed; NotInForce where one runs stock."""
    began, left, same, tried = time.monotonic(), tuple(sorted(survivors)), 0, dict[int, str]()
    for number in range(1, rounds + 1):
        if not left:
            raise HealFailed(f"nobody is left: {tried}")
        order = ShrinkOrder(epoch, left, store[0], store[1], timeout_s, requests)
        answers = await _order_all(clients, order)
        dead = [slot for slot in left if not ranks.alive(slot)]
        found = next_round(order, answers, dead)
        if found.serves:
            results = {slot: answer for slot, answer in answers.items() if isinstance(answer, ShrinkResult)}
            return Healed(left, epoch, time.monotonic() - began, number, results, tried)
        if found.fence:
            await ranks.fence(found.fence)
        for slot in set(left) - set(found.survivors):
            tried[slot] = found.why
        same = same + 1 if found.survivors == left else 0
        if same >= SAME_AGAIN:
            raise HealFailed(f"slots {list(left)} do not come together: {found.why}")
        left, epoch = found.survivors, await _epoch_above(clients, left, epoch, answers)
    raise HealFailed(f"not within {rounds} rounds: {found.why}")


async def _order_all(clients: Mapping[int, RankClient], order: ShrinkOrder) -> dict[int, ShrinkResult | str]:
    async def one(slot: int) -> ShrinkResult | str:
        try:
            return await clients[slot].shrink(order, deadline_s=order.timeout_s + SLACK_S)
        except NoAnswer as error:
            return str(error)

    found = await asyncio.gather(*(one(slot) for slot in order.survivors))
    return dict(zip(order.survivors, found, strict=True))


async def _epoch_above(
    clients: Mapping[int, RankClient], slots: Collection[int], epoch: int, answers: Mapping[int, ShrinkResult | str]
) -> int:
    """An engine may have seen more than this controller."""
    stale = [s for s, a in answers.items() if isinstance(a, ShrinkResult) and a.refused == Refusal.STALE and s in slots]
    seen = [epoch]
    for slot in stale:
        seen.append((await engine_info(clients[slot])).epoch)
    return max(seen) + 1


async def engine_info(client: RankClient, deadline_s: float = INFO_S) -> EngineInfo:
    """Raises NoAnswer where the engine says nothing, NotInForce where it runs stock."""
    info = await client.info(deadline_s=deadline_s)
    if info.engine is None:
        raise (NoAnswer if info.state == "ready" else NotInForce)(f"{client.url}: {info.reason}")
    return info.engine


# --- refill -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RefillLimits:
    hello_s: float = 240.0
    """From the launch to the first word of a joiner: imports."""
    prepare_s: float = 280.0
    """Loading, warming up and capture. vLLM's own limit in a scale-up is 300 s."""
    commit_s: float = 60.0
    serve_s: float = 60.0
    """From the commit to /health of the joiner."""


@dataclass(frozen=True)
class Refilled:
    epoch: int
    phases_s: Mapping[str, float]
    """hello, prepare, commit, serve: each from the end of the one before."""
    pauses_s: Mapping[int, float]
    """By survivor, as it was measured in its API server."""


@dataclass
class _Clock:
    at: float = field(default_factory=time.monotonic)
    phases_s: dict[str, float] = field(default_factory=dict)

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.phases_s[name], self.at = round(now - self.at, 3), now


async def refill(
    clients: Mapping[int, RankClient],
    ranks: Ranks,
    coordination: Coordination,
    live: Collection[int],
    joiner: int,
    launch: Callable[[CoordinationInfo], Awaitable[RankClient]],
    *,
    epoch: int,
    limits: RefillLimits | None = None,
) -> Refilled:
    """Fill one empty slot while the others serve.

    `launch` starts the joiner; the handshake is open by then. The survivors are touched when the joiner has said its first
    word, not before. Raises RefillFailed with nothing changed (the joiner's processes are the caller's to end), CommitFailed,
    NoAnswer and NotInForce from before anything was opened.
    """
    limits, live = limits or RefillLimits(), tuple(sorted(live))
    known = await asyncio.gather(*(engine_info(clients[slot]) for slot in live))
    source = known[0]
    if any(info.refill for info in known):
        # of a controller that died meanwhile
        await _abandon(clients, coordination, live, epoch, COORDINATION_S)
    order = RefillOrder(epoch, live, (joiner,), live[0], "", 0, limits.prepare_s)
    clock = _Clock()
    try:
        opened = await coordination.refill(
            order,
            size=source.size,
            redundant_experts=source.redundant_experts,
            max_size=source.max_size,
            deadline_s=COORDINATION_S,
        )
        assert opened.refill is not None
        client = await launch(opened)
        await _hello(coordination, ranks, joiner, limits.hello_s)
        clock.lap("hello")
        await _prepare(clients, order, opened.refill)
        await coordination.answer(deadline_s=COORDINATION_S)
        await _ready(clients, ranks, coordination, order, limits.prepare_s)
        clock.lap("prepare")
    except (ElasticError, asyncio.CancelledError) as error:
        # whoever cancels has something more urgent to do
        hurry = isinstance(error, asyncio.CancelledError) or not all(ranks.alive(slot) for slot in live)
        deadline_s = ABANDON_S if hurry else COORDINATION_S
        await asyncio.shield(_abandon(clients, coordination, live, epoch, deadline_s))
        if isinstance(error, asyncio.CancelledError):
            raise
        raise RefillFailed(f"slot {joiner}: {error}") from error
    pauses = await _commit(clients, order, opened.refill, limits)
    clock.lap("commit")
    await coordination.end(keep=True, deadline_s=COORDINATION_S)
    await coordination.live(len(order.members), deadline_s=COORDINATION_S)
    until = time.monotonic() + limits.serve_s
    while not await client.healthy(deadline_s=INFO_S):
        if not ranks.alive(joiner) or time.monotonic() > until:
            raise CommitFailed(f"slot {joiner} does not serve after its commit")
        await asyncio.sleep(POLL_S)
    clock.lap("serve")
    return Refilled(epoch, clock.phases_s, pauses)


async def _hello(coordination: Coordination, ranks: Ranks, joiner: int, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while joiner not in (info := await coordination.info(deadline_s=COORDINATION_S)).hello:
        _check_joiner(info, ranks, joiner, until, "said nothing")
        await asyncio.sleep(POLL_S)


def _check_joiner(info: CoordinationInfo, ranks: Ranks, joiner: int, until: float, what: str) -> None:
    if info.trouble:
        raise RefillFailed(info.trouble)
    if not ranks.alive(joiner):
        raise RefillFailed("the joiner has ended")
    if time.monotonic() > until:
        raise RefillFailed(f"the joiner {what} in time")


async def _prepare(clients: Mapping[int, RankClient], order: RefillOrder, boot: Bootstrap) -> None:
    prepare = RefillPrepare(order.epoch, order.live, order.joiners, order.source, order.timeout_s, boot)
    told = await asyncio.gather(*(clients[s].refill_prepare(prepare, deadline_s=COORDINATION_S) for s in order.live))
    if refused := [answer for answer in told if not answer.ok]:
        raise RefillFailed(f"slot {refused[0].slot} refuses: {refused[0].detail}")


async def _ready(
    clients: Mapping[int, RankClient], ranks: Ranks, coordination: Coordination, order: RefillOrder, limit_s: float
) -> None:
    """All members have prepared; a survivor that says that it has dropped the preparation ends the wait. One that is too busy to
    answer does not: the joiner has loaded for a minute, and whoever dies is seen by its process."""
    keys, joiner = {f"eep_ready/{slot}" for slot in order.members}, order.joiners[0]
    looked = time.monotonic()
    until = looked + limit_s
    while not keys <= set((info := await coordination.info(deadline_s=COORDINATION_S)).refill_keys):
        _check_joiner(info, ranks, joiner, until, "did not prepare")
        if dead := [slot for slot in order.live if not ranks.alive(slot)]:
            raise RefillFailed(f"slot {dead[0]} has died meanwhile")
        if time.monotonic() - looked > LOOK_S:
            looked = time.monotonic()
            for slot in order.live:
                with contextlib.suppress(NoAnswer):
                    found = await engine_info(clients[slot])
                    if found.refill_error:
                        raise RefillFailed(f"slot {slot}: {found.refill_error}")
        await asyncio.sleep(POLL_S)


async def _commit(
    clients: Mapping[int, RankClient], order: RefillOrder, boot: Bootstrap, limits: RefillLimits
) -> dict[int, float]:
    commit = RefillCommit(order.epoch, boot.host, boot.store_port)
    calls = (clients[slot].refill_commit(commit, deadline_s=limits.commit_s) for slot in order.live)
    told = await asyncio.gather(*calls, return_exceptions=True)
    failed = [str(answer) for answer in told if isinstance(answer, BaseException)]
    failed += [f"slot {a.slot}: {a.detail}" for a in told if isinstance(a, RefillAnswer) and not a.ok]
    if failed:
        raise CommitFailed("; ".join(failed))
    return {answer.slot: answer.pause_s for answer in told if isinstance(answer, RefillAnswer)}


async def _abandon(
    clients: Mapping[int, RankClient], coordination: Coordination, live: Collection[int], epoch: int, deadline_s: float
) -> None:
    """What cannot be told is found out by the next order, which every engine compares with what it knows."""
    abort = RefillAbort(epoch)
    calls = [clients[slot].refill_abort(abort, deadline_s=deadline_s) for slot in live]
    await asyncio.gather(*calls, coordination.end(keep=False, deadline_s=deadline_s), return_exceptions=True)
