"""What a daemon is doing when it is ended: one scenario each, on a group that serves before and after it."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

from elastic.controller.state import GroupState
from elastic.paths import read_json, state_path
from healer.deployment import eventually
from tests.durable.points import COUNTING
from tests.durable.simulated_group import SETTLE_S, SimulatedGroup, assert_answers

BASE = (0, 1, 2, 3)
REQUESTS, TOKENS = 2, 40


@dataclass(frozen=True)
class Scenario:
    """`begin` starts it; afterwards the group is to have `intended`. `touched`: slots whose process may change."""

    name: str
    begin: Callable[[SimulatedGroup], Awaitable[None]]
    touched: tuple[int, ...]
    before: tuple[int, ...] = BASE
    intended: tuple[int, ...] = BASE
    asked: bool = False
    """An operator asked for it, and asks again where nobody acknowledged it."""
    crash_first: str = ""
    """End a first daemon right after this point; it is the second one, while it takes over, that is looked at."""


async def _lose_one(group: SimulatedGroup) -> None:
    group.signal(1, signal.SIGKILL)


async def _lose_two(group: SimulatedGroup) -> None:
    group.signal(0, signal.SIGKILL)
    group.signal(2, signal.SIGKILL)


async def _grow(group: SimulatedGroup) -> None:
    await group.scale([0, 1, 2, 3, 4])


async def _shrink(group: SimulatedGroup) -> None:
    await group.scale([0, 1, 2])


async def _replace(group: SimulatedGroup) -> None:
    await group.post("/replace", {"slot": 1})


async def _drain(group: SimulatedGroup) -> None:
    await group.post("/drain", {"slot": 3})


async def _end_the_daemon(group: SimulatedGroup) -> None:
    group.signal_daemon(signal.SIGTERM)


async def _lose_one_and_its_first_replacement(group: SimulatedGroup) -> None:
    group.fail_boots(1)
    group.signal(3, signal.SIGKILL)


SCENARIOS = (
    Scenario("a loss and its refill", _lose_one, (1,)),
    Scenario("two losses at once", _lose_two, (0, 2)),
    Scenario("scale up", _grow, (4,), intended=(0, 1, 2, 3, 4), asked=True),
    Scenario("scale down", _shrink, (3,), intended=(0, 1, 2), asked=True),
    Scenario("an operator's replacement", _replace, (1,)),
    Scenario("an operator's drain", _drain, (3,), intended=(0, 1, 2), asked=True),
    Scenario("a replacement that does not boot", _lose_one_and_its_first_replacement, (3,)),
    Scenario("taking over a group that is well", _end_the_daemon, (), crash_first="before journal"),
    Scenario("taking over a half-released group", _lose_one, (1,), crash_first="after Abort to rank 2"),
    Scenario("taking over a half-committed group", _lose_one, (1,), crash_first="after Commit to rank 2"),
    Scenario("taking over a refill that boots", _lose_one, (1,), crash_first="after launch of rank-1"),
    Scenario("taking over a refill that loads", _lose_one, (1,), crash_first="answered Prepare to rank 2"),
)


async def crash(group: SimulatedGroup, scenario: Scenario, at: int, seed: int) -> str | None:
    """Run the scenario under traffic with a daemon that ends itself at its `at`-th point, start the next daemon, and
    check everything. Returns what the point was; None: the daemon did not come to it, and all the same all is well."""
    await _at_base(group, scenario.before)
    old = group.members()
    traffic, expected = group.traffic(REQUESTS, TOKENS, seed)
    label: str | None = None
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(traffic.run())
        await traffic.reached(8)
        if scenario.crash_first:
            group.points.arm_at(scenario.crash_first)
            await scenario.begin(group)
            await eventually(lambda: _dead(group), f"the first daemon dies {scenario.crash_first}", SETTLE_S)
            group.points.arm(at)
            group.spawn()
        else:
            group.points.arm(at)
            await scenario.begin(group)
        died = await _died(group, scenario)
        group.points.disarm()
        # a last write may have come meanwhile
        if died or not group.daemon_lives:
            label = group.points.label
            group.spawn()
            await _asked_again(group, scenario)
        await group.settled(scenario.intended)
        await running
    assert_answers(traffic.answers, expected)
    await group.check(scenario.intended)
    now = group.members()
    for slot, member in old.items():
        if slot not in scenario.touched:
            assert now.get(slot) == member, f"healthy slot {slot} was replaced"
    return label


async def count(group: SimulatedGroup, scenario: Scenario) -> list[str]:
    """The points of the scenario, in order, from a run that nobody ends."""
    group.points.log.unlink(missing_ok=True)
    assert await crash(group, scenario, COUNTING, seed=0) is None
    return [line.partition(" ")[2] for line in group.points.log.read_text().splitlines()]


def sample(points: int, wanted: int, seed: str) -> list[int]:
    """Of 1 to `points`, ascending; the first and the last among them."""
    if wanted >= points:
        return list(range(1, points + 1))
    inner = random.Random(seed).sample(range(2, points), wanted - 2)
    return sorted([1, points, *inner])


async def _at_base(group: SimulatedGroup, slots: tuple[int, ...]) -> None:
    group.points.arm(0)
    if tuple(sorted(group.members())) != slots:
        await group.scale(list(slots))
        await group.settled(slots)


async def _died(group: SimulatedGroup, scenario: Scenario) -> bool:
    """Wait until the daemon is dead (True), or has done all that there was to do."""

    async def probe() -> bool | None:
        if not group.daemon_lives:
            return True
        try:
            found = await group.status()
        except (httpx.HTTPError, OSError, ValueError):
            return None
        live = found["group"]["live"]
        # a fault shows in `why` as soon as the daemon has seen it: `touched` must have changed hands
        done = found["state"] == "ok" and tuple(live) == scenario.intended and not found["group"]["sequence"]
        return False if done and group.points.count > 2 and await _quiet(group) else None

    return await eventually(probe, f"{scenario.name}: the daemon dies or is done", SETTLE_S)


async def _quiet(group: SimulatedGroup) -> bool:
    """Whether no more points are passed: the last writes come with the daemon's next round."""
    before = group.points.count
    await asyncio.sleep(0.15)
    return group.points.count == before and group.daemon_lives


async def _asked_again(group: SimulatedGroup, scenario: Scenario) -> None:
    """What the dead daemon had taken over is finished by the next one, unasked; what it had not is asked for again."""
    if not scenario.asked:
        return
    target = read_json(state_path(group.run_dir), GroupState).target
    await group.settled(target)
    if tuple(target) != scenario.intended:
        await group.scale(list(scenario.intended))


async def _dead(group: SimulatedGroup) -> bool | None:
    return None if group.daemon_lives else True
