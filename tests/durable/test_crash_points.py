"""The daemon is ended at every write and every command of every sequence; each time the next daemon makes the group whole."""

from typing import get_args

import pytest

from elastic.controller.phases import MOVES, Step
from elastic.protocol import Command
from healer.deployment import eventually
from healer.journal import Kind
from tests.durable.points import COUNTING
from tests.durable.scenarios import SCENARIOS, Scenario, count, crash, sample
from tests.durable.simulated_group import SETTLE_S, SimulatedGroup, assert_answers

SAMPLED = 5
"""Points of each scenario that every run of the tests looks at."""


def by_name(scenario: Scenario) -> str:
    return scenario.name.replace(" ", "-")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=by_name)
async def test_a_daemon_that_dies_at_a_point_of_a_sequence_leaves_work_that_the_next_one_finishes(
    simulated: SimulatedGroup, scenario: Scenario
) -> None:
    points = await count(simulated, scenario)
    for at in sample(len(points), SAMPLED, scenario.name):
        await crash_and_tell(simulated, scenario, at)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=by_name)
async def test_a_daemon_may_die_at_every_single_point_of_a_sequence(
    simulated: SimulatedGroup, scenario: Scenario
) -> None:
    points = await count(simulated, scenario)
    labels = [await crash_and_tell(simulated, scenario, at) for at in range(1, len(points) + 1)]
    reached = [label for label in labels if label is not None]
    print(f"{scenario.name}: {len(points)} points, {len(reached)} reached")
    # one run writes its journal in a write more or less than another
    assert len(reached) >= 0.9 * len(points)


async def form(group: SimulatedGroup, at: int) -> str | None:
    """A first start of the group with a daemon that ends itself at its `at`-th point, and what the next daemon makes of it."""
    group.points.arm(at)
    group.spawn()

    async def dead_or_done() -> bool | None:
        if not group.daemon_lives:
            return True
        found = await group.status()
        return False if found["state"] == "ok" and len(found["group"]["live"]) == 4 else None

    died = await eventually(dead_or_done, f"the daemon dies at point {at} or has formed the group", SETTLE_S)
    group.points.disarm()
    label = group.points.label if died else None
    if died:
        group.spawn()
    await group.settled(range(4))
    await group.check(range(4))
    traffic, expected = group.traffic(2, 40, seed=at)
    assert_answers(await traffic.run(), expected)
    return label


async def formed(fork_server: str, at: int) -> tuple[str | None, list[str]]:
    group = SimulatedGroup(fork_server)
    try:
        label = await form(group, at)
        return label, group.points.log.read_text().splitlines() if at >= COUNTING else []
    except BaseException as error:
        error.add_note(f"forming, point {at}: {group.points.label}")
        raise
    finally:
        await group.end()


async def test_a_daemon_that_dies_while_it_forms_a_group_leaves_one_that_the_next_can_form(fork_server: str) -> None:
    _, points = await formed(fork_server, COUNTING)
    for at in sample(len(points), 3, "forming"):
        await formed(fork_server, at)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_daemon_may_die_at_every_single_point_of_forming_a_group(fork_server: str) -> None:
    _, points = await formed(fork_server, COUNTING)
    reached = [(await formed(fork_server, at))[0] for at in range(1, len(points) + 1)]
    print(f"forming: {len(points)} points, {sum(label is not None for label in reached)} reached")


@pytest.mark.slow
async def test_every_order_to_a_rank_and_every_kind_of_entry_is_a_point_of_some_scenario(fork_server: str) -> None:
    """What is not looked at would be missed in silence: the commands of the protocol, and what the journal holds."""
    labels, counts = set[str](), dict[str, int]()
    _, points = await formed(fork_server, COUNTING)
    counts["forming"] = len(points)
    labels |= {line.partition(" ")[2] for line in points}
    for scenario in SCENARIOS:
        group = SimulatedGroup(fork_server)
        try:
            group.spawn()
            await group.settled(range(4))
            found = await count(group, scenario)
        finally:
            await group.end()
        counts[scenario.name] = len(found)
        labels |= set(found)
    print(f"{sum(counts.values())} points: {counts}")
    sent = {label.split()[1] for label in labels if label.startswith("after ") and " to " in label}
    orders = {kind.__name__ for kind in get_args(Command)} - {"Query", "GatewayQuery", "Steps", "Adopt"}
    assert sent == orders, "a command that no scenario gives, or that nobody knows of"
    kinds = {kind for label in labels if label.startswith("after journal: ") for kind in label[15:].split(", ")}
    assert kinds == {str(kind) for kind in Kind} | {"answer"}
    steps = {tuple(label.split()[1:]) for label in labels if label.startswith("step ")}
    table = {
        (kind, str(step)) for kind, moves in MOVES.items() for step in moves if step not in (Step.BEGIN, Step.VACATE)
    }
    assert steps == table


async def crash_and_tell(group: SimulatedGroup, scenario: Scenario, at: int) -> str | None:
    try:
        return await crash(group, scenario, at, seed=at)
    except BaseException as error:
        error.add_note(f"{scenario.name}, point {at}: {group.points.label}")
        raise
