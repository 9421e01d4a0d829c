"""The daemon is ended at every write and every command of every sequence; each time the next daemon makes the group whole."""

import pytest

from tests.durable.scenarios import SCENARIOS, Scenario, count, crash, sample
from tests.durable.simulated_group import SimulatedGroup

SAMPLED = 7
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


async def crash_and_tell(group: SimulatedGroup, scenario: Scenario, at: int) -> str | None:
    try:
        return await crash(group, scenario, at, seed=at)
    except BaseException as error:
        error.add_note(f"{scenario.name}, point {at}: {group.points.label}")
        raise
