"""Deaths in a running group: the others go on, the slot is filled, and whatever the group could do before it can do again."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from chaos.inplace_gpu import rank_log
from chaos.inplace_gpu.profile import MOST_RANKS, InPlaceProfile
from chaos.inplace_gpu.records import Case, Silence, Survivor
from chaos.inplace_gpu.watch import ROUTER, Clients, silence
from chaos.vllm_gpu.load import reference
from chaos.vllm_gpu.scene import Scene
from elastic.errors import ElasticError
from elastic.paths import log_path
from elastic.vllm.client import NoAnswer, RankClient
from elastic.vllm.driver import engine_info
from healer.targets.vllm.processes import log_name

HEAL_S = 120.0
"""A group that cannot go on in place is restarted, which is no failure of this benchmark but a finding: it is waited for longer."""
ANSWER_S = 60.0
SETTLE_S = 3.0
"""Of load before the signal, and after the slot serves again."""
POLL_S = 0.02
ROUND = b"Rearranging experts"
"""vLLM's line when a round of its balancer begins (v0.33, distributed/eplb/eplb_state.py)."""
ROUND_S = 60.0
ROUND_POLL_S = 0.002
"""A layer is moved in one step of the group, some 10 ms."""
SPARE = "elastic.vllm.spare"
"""On the command line of a rank that was one."""
SPARES_S = 150.0
SPARE_POLL_S = 0.5
ROOMY = 2
"""Cores for each rank and spare, from which on a spare that warms up takes nothing from the others."""
AFTER_S = 1.0
"""What still counts as around an event, after the daemon says that it is over."""


@dataclass
class _Before:
    """Of the group, when the signal is sent."""

    incarnations: dict[int, int]
    pids: dict[int, list[int]]
    lines: dict[int, int]
    """Of each rank's log."""
    spares: frozenset[int]
    """Pids of those that stood by."""


@dataclass(frozen=True)
class Second:
    """Another death, while the first one's slot is being filled."""

    slot: int
    after_s: float
    """Since the others have begun to prepare for the joiner."""


@dataclass
class _Moments:
    """On the monotonic clock; 0: not reached."""

    event: float = 0.0
    healed: float = 0.0
    answered: float = 0.0
    filled: float = 0.0
    problems: list[str] = field(default_factory=list)

    def since(self, moment: float) -> float:
        return moment - self.event if moment else 0.0


def profile_of(scene: Scene) -> InPlaceProfile:
    assert isinstance(scene.profile, InPlaceProfile)
    return scene.profile


def slots_of(scene: Scene) -> list[int]:
    return list(range(profile_of(scene).ranks))


async def start(scene: Scene) -> dict[str, Any]:
    """From nothing to a group that serves, and the fault-free answers. Raises ElasticError."""
    began = time.monotonic()
    await scene.deployment.start(scene.profile.start_s + 60.0)
    ready = time.monotonic()
    scene.want = await reference(await scene.router(), scene.prompts, scene.profile.tokens, deadline_s=ANSWER_S)
    return {"ready_s": ready - began, "distinct_answers": len({tuple(answer) for answer in scene.want})}


async def case(
    scene: Scene,
    slot: int,
    *,
    under_load: bool,
    streams: int,
    in_round: bool = False,
    quiet: bool = True,
    second: Second | None = None,
) -> Case:
    """One death and its refill; `in_round`: when a round of vLLM's balancer has begun, which takes load; `quiet`: no spare warms
    up beside it, if cores are few; `second`: all is told since that death. Raises ElasticError where the group does not come back
    at all."""
    profile = profile_of(scene)
    roomy = len(os.sched_getaffinity(0)) >= ROOMY * (profile.ranks + profile.spares)
    await spares_stand_by(scene, all_=quiet and not roomy)
    slots, before = slots_of(scene), await _look(scene)
    rest = [each for each in slots if each != slot]
    moments, began = _Moments(), time.monotonic()
    clients = Clients(scene, slots, streams=streams, router=await scene.router()) if under_load else None
    async with clients.running() if clients else contextlib.nullcontext():
        if clients is not None:
            await clients.answered([*slots, ROUTER], 1, ANSWER_S)
            await asyncio.sleep(SETTLE_S)
        if in_round:
            await _round_begins([_log_file(scene, each, before.incarnations[each]) for each in slots])
        moments.event = _kill(before.pids[slot])
        moments.healed = await _until_live(scene, rest, before)
        if second is not None:
            await _prepares(scene, rest[0])
            await asyncio.sleep(second.after_s)
            rest.remove(second.slot)
            moments.event = _kill(before.pids[second.slot])
            moments.healed = await _until_live(scene, rest, before, dead=second.slot)
        if clients is not None:
            moments.answered = await clients.answered(rest, 1, ANSWER_S)
        else:
            await _ask(scene, rest)
            moments.answered = time.monotonic()
        moments.filled = await scene.until(
            lambda s: len(s["group"]["live"]) == len(slots), f"slot {slot} serves again", scene.profile.start_s
        )
        if clients is not None:
            await clients.answered([*slots, ROUTER], 1, ANSWER_S)
            await asyncio.sleep(SETTLE_S)
        else:
            await _ask(scene, slots)
    found = await _judge(scene, slot, rest, before, moments, clients, began)
    if second is None:
        return msgspec.structs.replace(found, in_round=in_round)
    return msgspec.structs.replace(found, second=second.slot, second_after_s=second.after_s)


def _kill(pids: Collection[int]) -> float:
    """Returns when."""
    now = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return now


async def _prepares(scene: Scene, slot: int) -> None:
    """Until this survivor has begun to prepare for a joiner. Raises ElasticError."""
    until, client = time.monotonic() + scene.profile.start_s, RankClient(scene.url(slot))
    async with client:
        while time.monotonic() < until:
            with contextlib.suppress(NoAnswer):
                if (await engine_info(client)).refill:
                    return
            await asyncio.sleep(POLL_S)
    raise ElasticError(f"slot {slot} did not begin to prepare for a joiner")


async def _look(scene: Scene) -> _Before:
    slots = slots_of(scene)
    incarnations = await scene.incarnations()
    return _Before(
        incarnations,
        {slot: await scene.engines(slot) for slot in slots},
        {slot: len(_log(scene, slot, incarnations[slot])) for slot in slots},
        frozenset(one["pid"] for one in await _spares(scene) if one["state"] == "ready"),
    )


async def _spares(scene: Scene) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await scene.deployment.get("/status"))["group"]["spares"]
    return found


async def spares_stand_by(scene: Scene, *, all_: bool) -> None:
    """One at least, and with `all_` each that was not given up. Raises ElasticError where none does in time."""
    if not profile_of(scene).spares:
        return
    until, found = time.monotonic() + SPARES_S, list[dict[str, Any]]()
    while time.monotonic() < until:
        found = await _spares(scene)
        states = {one["state"] for one in found}
        if "ready" in states and (not all_ or states <= {"ready", "given-up"}):
            return
        if states == {"given-up"}:
            raise ElasticError(f"no spare stands by: {found[0]['why']}")
        await asyncio.sleep(SPARE_POLL_S)
    raise ElasticError(f"no spare stands by after {SPARES_S:g} s: {[one['state'] for one in found]}")


async def _until_live(scene: Scene, rest: Collection[int], before: _Before, dead: int | None = None) -> float:
    """Until these are the group, or with `dead` until that one is not in it and these are; returns when. Raises ElasticError after
    a restart of the group, or at the deadline."""
    until, found = time.monotonic() + HEAL_S, dict[str, Any]()
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError):
            found = (await scene.deployment.get("/status"))["group"]
            live = found["live"]
            if live == sorted(rest) or (dead is not None and dead not in live and set(rest) <= set(live)):
                return time.monotonic()
            now = {s["slot"]: s["member"]["incarnation"] for s in found["slots"] if s["member"]}
            if any(now.get(slot, before.incarnations[slot]) != before.incarnations[slot] for slot in rest):
                raise ElasticError("the group was restarted, not healed in place")
        await asyncio.sleep(POLL_S)
    raise ElasticError(f"slots {sorted(rest)} did not go on within {HEAL_S:g} s; live are {found.get('live')}")


async def _ask(scene: Scene, slots: Collection[int]) -> None:
    """One right answer of each. Raises ElasticError."""
    count = 2
    answers = await asyncio.gather(
        *(
            reference(scene.url(slot), scene.prompts[:count], scene.profile.tokens, deadline_s=ANSWER_S)
            for slot in slots
        )
    )
    if wrong := [slot for slot, found in zip(slots, answers, strict=True) if found != scene.want[:count]]:
        raise ElasticError(f"slots {wrong} gave other answers than without a fault")


async def _judge(
    scene: Scene,
    slot: int,
    rest: Sequence[int],
    before: _Before,
    moments: _Moments,
    clients: Clients | None,
    began: float,
) -> Case:
    now = await scene.incarnations()
    survivors = tuple([await _survivor(scene, each, before, moments, clients) for each in rest])
    problems = moments.problems
    from_spare = SPARE in psutil.Process((await scene.members())[slot]["pid"]).cmdline()
    if before.spares and not from_spare:
        problems.append(f"slot {slot} was filled without a spare, though {len(before.spares)} stood by")
    for one in survivors:
        if not one.same_process or now[one.slot] != before.incarnations[one.slot]:
            problems.append(f"slot {one.slot} was started anew")
        if one.wrong or one.errors:
            problems.append(f"slot {one.slot}: {one.wrong} wrong answers, {one.errors} errors")
        if one.captures:
            problems.append(f"slot {one.slot} captured its graphs again")
        if one.modes and not set(one.modes) - {"NONE"}:
            problems.append(f"slot {one.slot} ran no graph after the signal")
    router = clients.loads[ROUTER].report() if clients is not None else None
    if router is not None and (router.wrong or router.errors):
        problems.append(f"at the router: {router.wrong} wrong answers, {router.errors} errors")
    return Case(
        slot=slot,
        under_load=clients is not None,
        killed=len(before.pids[slot]),
        healed_s=moments.since(moments.healed),
        answered_s=moments.since(moments.answered),
        filled_s=moments.since(moments.filled),
        from_spare=from_spare,
        survivors=survivors,
        victim_errors=clients.loads[slot].errors if clients is not None else 0,
        router=router,
        sequences=scene.sequences(began, moments.event),
        gpu_memory_mb=await asyncio.to_thread(gpu_memory_mb),
        problems=tuple(problems),
    )


async def _survivor(scene: Scene, slot: int, before: _Before, moments: _Moments, clients: Clients | None) -> Survivor:
    lines = _log(scene, slot, before.incarnations[slot])[before.lines[slot] :]
    experts, loaded_mb = rank_log.reloaded(lines)
    pids = await scene.engines(slot)
    heal: Silence | None = None
    refill: Silence | None = None
    load = clients.loads[slot] if clients is not None else None
    if load is not None:
        arrivals = load.arrivals()
        heal = silence(arrivals, moments.event, moments.healed + AFTER_S)
        refill = silence(arrivals, moments.healed + AFTER_S, moments.filled + AFTER_S)
        if refill is not None:  # both are told since the signal
            refill = Silence(refill.at_s + moments.since(moments.healed + AFTER_S), refill.took_s)
    return Survivor(
        slot=slot,
        right=load.right if load is not None else 0,
        wrong=load.wrong if load is not None else 0,
        errors=load.errors if load is not None else 0,
        heal=heal,
        refill=refill,
        same_process=pids == before.pids[slot],
        captures=rank_log.captures(lines),
        modes=rank_log.modes(lines),
        reloaded=experts,
        reloaded_mb=loaded_mb,
        **_held(pids),
    )


async def _round_begins(logs: Collection[Path]) -> None:
    """The first rank of the group says so. Raises ElasticError, OSError."""
    until = time.monotonic() + ROUND_S
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in logs]
        for file in files:
            file.seek(0, os.SEEK_END)
        rest = dict.fromkeys(files, b"")
        while time.monotonic() < until:
            for file in files:
                lines = rest[file] + file.read()
                if ROUND in lines:
                    return
                rest[file] = lines[-len(ROUND) :]
            await asyncio.sleep(ROUND_POLL_S)
    raise ElasticError(f"no round of the balancer began within {ROUND_S:g} s")


def _log_file(scene: Scene, slot: int, incarnation: int) -> Path:
    return log_path(scene.deployment.run_dir, log_name(slot, incarnation))


def _log(scene: Scene, slot: int, incarnation: int) -> list[str]:
    with contextlib.suppress(OSError):
        return _log_file(scene, slot, incarnation).read_text(errors="replace").splitlines()
    return []


def _held(pids: Collection[int]) -> dict[str, Any]:
    """Of processes: fields of a Survivor. Pages of files and of shared memory that a process has touched count as shared."""
    memory, shared, threads, files = 0.0, 0.0, 0, 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found = process.memory_info()
            memory, shared = memory + (found.rss - found.shared) / 1e6, shared + found.shared / 1e6
            threads, files = threads + process.num_threads(), files + process.num_fds()
    return {"memory_mb": round(memory, 1), "shared_mb": round(shared, 1), "threads": threads, "files": files}


def gpu_memory_mb() -> tuple[int, ...]:
    """Used on each GPU; empty where there is none."""
    import subprocess

    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return tuple(int(line) for line in done.stdout.split())
    return ()


async def scale(scene: Scene, figures: dict[str, Any], clients: Clients) -> None:
    """One rank less by vLLM's own scaling and one more again, under load at the router: what works only in a whole group. Raises
    ElasticError."""
    ranks = profile_of(scene).ranks
    # a group of two cannot be scaled down: vLLM's balancer needs two
    goals = (ranks - 1, ranks) if ranks > 2 else (min(ranks + 1, MOST_RANKS), ranks)
    async with clients.running():
        await clients.answered([ROUTER], 1, ANSWER_S)
        for goal in goals:
            began = time.monotonic()
            await scene.scale(goal)
            await scene.until(
                lambda s, goal=goal: len(s["group"]["live"]) == goal,  # type: ignore[misc]
                f"{goal} ranks",
                scene.profile.start_s,
            )
            figures[f"to_{goal}_ranks_s"] = time.monotonic() - began
            await clients.answered([ROUTER], len(scene.prompts) // 4, ANSWER_S)
