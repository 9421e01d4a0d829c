"""One group is taken through every move of every sequence: the tables hold nothing that does not happen."""

from collections.abc import AsyncIterator

import pytest

from elastic.controller.phases import MOVES
from healer.deployment import eventually
from tests.durable.fault_plan import Fault, write
from tests.durable.simulated_group import SimulatedGroup

CUT_OFF = ("superseded", "failed")
"""Possible in every state; seen in `test_faults_at_every_step.py`."""

RACES = {("join", "park", "rolled-back"), *(("form", step, "rolled-back") for step in ("load", "connect", "park"))}
"""The joiner must die between two messages (`test_a_joiner_that_dies_while_the_group_parks_for_it_fails_no_sequence` makes it),
or be among those that happen to be ready first."""

UNREACHED = {("join", "begin", "vacate"), ("join", "vacate", "load")}
"""In 3000 random histories of losses and scalings no plan of a join overwrote anything: joiners bring holes. The planner does
not rule it out, so the sequence can do it."""


@pytest.fixture
async def full(fork_server: str) -> AsyncIterator[SimulatedGroup]:
    """A group without a free expert slot."""
    group = SimulatedGroup(fork_server, redundant=8)
    try:
        group.spawn()
        await group.settled(range(4))
        yield group
    finally:
        await group.end()


async def test_every_move_of_the_tables_happens(full: SimulatedGroup) -> None:
    group, plan = full, full.root / "plan.json"

    async def lose(slots: list[int], *faults: Fault) -> None:
        write(plan, list(faults))
        for slot in slots:
            group.signal(slot)
        await eventually(lambda: _done(plan), "every fault has hit", 30)
        await eventually(lambda: _moved(group, slots, before), f"slots {slots} have new processes", 30)
        await group.settled(range(4))

    # from the first placement, so that two who stay must give up replicas for what only the leavers hold
    for slots in ([0, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3]):
        await group.scale(slots)
        await group.settled(slots)
    joiner = 1
    for at in ("load", "connect", "park"):
        before = group.members()
        await lose([1], Fault(f"step join {at}", joiner))
    before = group.members()
    # one rank cannot hold all experts: it stands until another comes
    await lose([0, 1, 2])
    for at in ("load", "connect", "park"):
        before = group.members()
        await lose([0, 1, 2, 3], Fault(f"step form {at}", joiner))
    table = {(kind, state, to) for kind, t in MOVES.items() for state, moves in t.items() for to in moves}
    seen = group.points.moves()
    assert seen <= table
    unseen = {move for move in table if move[2] not in CUT_OFF} - seen - RACES - UNREACHED
    assert not unseen, sorted(unseen)


async def _done(plan) -> bool | None:  # type: ignore[no-untyped-def]
    return True if plan.read_bytes() == b"[]" else None


async def _moved(group: SimulatedGroup, slots: list[int], before) -> bool | None:  # type: ignore[no-untyped-def]
    now = group.members()
    return True if all(s in now and now[s] != before[s] for s in slots) else None
