"""Schedules and maintenance windows that never begin, never end, change nothing or contradict each other."""

from collections.abc import Iterator, Sequence
from itertools import islice

from healer.policy.conflict import Doubt
from healer.policy.schedules import Lasting, Recurring, Spell, fire_after, spell
from healer.policy.schema import KeyPath, Policy, Schedule, show_duration
from healer.policy.time_relations import MAINTENANCE, SCHEDULES

AHEAD_S = 400 * 86400.0
"""Times are looked at so far ahead: more than a year, so that yearly ones count."""
MOST_TIMES = 100


def time_doubts(policy: Policy, wall: float) -> Iterator[Doubt]:
    """`wall`: now, seconds since the epoch."""
    schedules = policy.spec.schedules
    for index, one in enumerate(schedules):
        place = (*SCHEDULES, index)
        yield from _recurring(one, place, wall)
        yield from _idle(policy, one, place)
        yield from _against(schedules, index, place, wall)
    for index, window in enumerate(policy.spec.bounds.maintenance):
        lasting = Lasting(window.cron, window.timezone, window.for_s)
        yield from _recurring(lasting, (*MAINTENANCE, index), wall)


def _recurring(one: Recurring, place: KeyPath, wall: float) -> Iterator[Doubt]:
    begins = list(islice(_begins(one, wall), 3))
    if not begins:
        yield Doubt((*place, "cron"), f"{one.cron!r} names no time within {AHEAD_S / 86400:g} days: it never begins")
        return
    if one.until is not None and fire_after(one.until, one.timezone, wall) is None:
        yield Doubt((*place, "until"), f"{one.until!r} names no time: once begun it never ends")
        return
    spells = [found for begin in begins if (found := spell(one, begin + 1e-3))]
    if len(spells) > 1 and all(a[1] >= b for a, b in zip(spells, begins[1:], strict=False)):
        lasts = f"lasts {show_duration(one.for_s)}" if one.for_s is not None else "lasts until then"
        yield Doubt((*place, "cron"), f"begins again before it has ended ({lasts}): it is always in force")


def _begins(one: Recurring, wall: float) -> Iterator[float]:
    after = wall
    for _ in range(MOST_TIMES):
        at = fire_after(one.cron, one.timezone, after)
        if at is None or at > wall + AHEAD_S:
            return
        yield at
        after = at + 1.0


def _idle(policy: Policy, one: Schedule, place: KeyPath) -> Iterator[Doubt]:
    bounds = policy.spec.bounds
    least, most = one.bounds.min_ranks, one.bounds.max_ranks
    if (least is None or least == bounds.min_ranks) and (most is None or most == policy.max_ranks):
        yield Doubt((*place, "bounds"), "changes nothing: spec.bounds say the same at all times")


def _against(schedules: Sequence[Schedule], index: int, place: KeyPath, wall: float) -> Iterator[Doubt]:
    """A ceiling below the floor of another that is in force at the same time."""
    one = schedules[index]
    most = one.bounds.max_ranks
    for other in schedules:
        least = other.bounds.min_ranks
        if other is one or most is None or least is None or least <= most:
            continue
        if _meet(one, other, wall) is not None:
            text = f"{most} is below the minRanks {least} of {other.name!r}, which is in force at the same time: "
            yield Doubt((*place, "bounds", "maxRanks"), f"{text}the minimum wins")


def _meet(one: Schedule, other: Schedule, wall: float) -> Spell | None:
    """A spell of one that begins within one of the other."""
    for first, second in ((one, other), (other, one)):
        for begin in _begins(first, wall):
            if found := spell(second, begin + 1e-3):
                return found
    return None
