"""Schedules: at which hours the group may have which sizes. Bounds, never targets: load decides in between.

A schedule is in force from each time that its cron expression names until its duration has passed, or until the next
time that its `until` expression names. Durations are elapsed time: where a clock is put forward within one, it ends an hour
later by that clock. A time that a day skips (02:30 when clocks go from 02:00 to 03:00) comes when it would have been,
30 minutes after the change; one that a day has twice comes twice, so a floor then holds longer and never shorter.
"""

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from healer.policy.schema import Schedule

if TYPE_CHECKING:
    from apscheduler.triggers.cron import CronTrigger

Spell = tuple[float, float]
"""Begin and end, seconds since the epoch."""

LOOK_BACK = timedelta(days=400)
"""A schedule that ends by `until` began within this; more than a year, so that yearly ones are found."""


class Recurring(Protocol):
    """A time that comes again and again. It lasts for `for_s`, or until the next time that `until` names."""

    @property
    def cron(self) -> str: ...
    @property
    def timezone(self) -> str: ...
    @property
    def for_s(self) -> float | None: ...
    @property
    def until(self) -> str | None: ...


class Lasting(msgspec.Struct, frozen=True):
    """A recurring time that lasts for a duration, such as a maintenance window."""

    cron: str
    timezone: str
    for_s: float | None
    until: None = None


class InForce(msgspec.Struct, frozen=True):
    """The bounds by schedules at one moment."""

    min_ranks: int = 0
    """0: no floor."""
    max_ranks: int | None = None
    floor_by: str = ""
    """The schedule that sets the floor; empty where none does."""
    ceiling_by: str = ""
    names: tuple[str, ...] = ()
    until: float = math.inf
    """Wall clock: nothing changes before this."""


def parse_cron(text: str, timezone: str) -> "CronTrigger":
    """Five fields: minute, hour, day of month, month, day of week. Raises ValueError that says what was expected.

    Days of the week are names: as numbers, 0 is Monday to the library and Sunday to cron, so they are refused.
    """
    from apscheduler.triggers.cron import CronTrigger  # 50 ms that a policy without schedules saves

    try:
        zone = ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{timezone!r} is not a time zone, expected a name such as Europe/Berlin or UTC") from None
    fields = text.split()
    example = 'expected minute, hour, day, month and weekday, such as "0 8 * * mon-fri"'
    if len(fields) != 5:
        raise ValueError(f"{text!r} has {len(fields)} fields, {example}")
    if any(c.isdigit() for c in fields[4].split("/")[0]):
        raise ValueError(f"{text!r} names days of the week by number, expected names, such as mon-fri or sat,sun")
    try:
        return CronTrigger.from_crontab(text, timezone=zone)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{text!r} is not a cron expression: {error}; {example}") from None


def fire_after(cron: str, timezone: str, wall: float) -> float | None:
    """The first time at or after `wall` (seconds since the epoch) that the expression names; None: never again.

    The library only counts through a calendar without changes of clocks: across one it loses a day. A local time that is
    skipped comes when it would have been, one that is there twice comes twice.
    """
    trigger, zone = _trigger(cron, timezone), ZoneInfo(timezone)
    local = datetime.fromtimestamp(wall, zone).replace(tzinfo=UTC, fold=0) - _shift(wall, zone)
    best: float | None = None
    while (found := trigger.get_next_fire_time(None, local)) is not None:
        moments = _moments(found.replace(tzinfo=zone))
        if best is not None and moments[0] >= best + _shift(best, zone).total_seconds():
            break
        best = min((at for at in (best, *moments) if at is not None and at >= wall), default=None)
        local = found + timedelta(seconds=1)
    return best


def _moments(local: datetime) -> tuple[float, ...]:
    """When it is that time: twice where clocks are put back."""
    first, second = local.replace(fold=0).timestamp(), local.replace(fold=1).timestamp()
    return (first, second) if second > first else (first,)


def _shift(wall: float, zone: ZoneInfo) -> timedelta:
    """By how much clocks change around that time; zero on nearly all days."""
    offsets = [
        datetime.fromtimestamp(max(0.0, wall + hours * 3600.0), zone).utcoffset() or timedelta()
        for hours in (-25, 0, 25)
    ]
    return max(offsets) - min(offsets)


def spell(window: Recurring, wall: float) -> Spell | None:
    """Begin and end of the spell that `wall` is in; None outside of one."""
    cron, timezone, for_s, until = window.cron, window.timezone, window.for_s, window.until
    begin = _last_fire(cron, timezone, wall - (LOOK_BACK.total_seconds() if for_s is None else for_s), wall)
    if begin is None:
        return None
    if for_s is not None:
        end: float | None = begin + for_s
    else:
        assert until is not None, "a schedule has `for` or `until`"
        end = fire_after(until, timezone, math.nextafter(begin, math.inf) + 1e-3)
    if end is None:
        return begin, math.inf
    return (begin, end) if wall < end else None


def in_force(schedules: Sequence[Schedule], wall: float) -> InForce:
    """What all schedules together allow at `wall`: the highest floor and the lowest ceiling of those in force. Where a
    floor is above a ceiling the floor stands: serving comes before saving."""
    floor, floor_by, names = 0, "", []
    ceiling: int | None = None
    ceiling_by = ""
    until = math.inf
    for schedule in schedules:
        found = spell(schedule, wall)
        nxt = fire_after(schedule.cron, schedule.timezone, math.nextafter(wall, math.inf) + 1e-3)
        until = min(until, *(end for end in (nxt, found[1] if found else None) if end is not None), math.inf)
        if found is None:
            continue
        names.append(schedule.name)
        least, most = schedule.bounds.min_ranks, schedule.bounds.max_ranks
        if least is not None and least > floor:
            floor, floor_by = least, schedule.name
        if most is not None and (ceiling is None or most < ceiling):
            ceiling, ceiling_by = most, schedule.name
    if ceiling is not None and ceiling < floor:
        ceiling, ceiling_by = floor, floor_by
    return InForce(floor, ceiling, floor_by, ceiling_by, tuple(names), until)


class Calendar:
    """`in_force` for a loop: computed again only when it may have changed, or when the wall clock was set back."""

    def __init__(self, schedules: Iterable[Schedule]) -> None:
        self._schedules = tuple(schedules)
        self._known: tuple[float, InForce] | None = None

    def at(self, wall: float) -> InForce:
        if not self._schedules:
            return InForce()
        if self._known is None or not self._known[0] <= wall < self._known[1].until:
            self._known = wall, in_force(self._schedules, wall)
        return self._known[1]


@lru_cache(maxsize=256)
def _trigger(cron: str, timezone: str) -> "CronTrigger":
    """In a zone without changes of clocks."""
    parse_cron(cron, timezone)
    return parse_cron(cron, "UTC")


def _last_fire(cron: str, timezone: str, since: float, wall: float) -> float | None:
    """The last time in (since, wall] that the expression names. Found by halving the span: the library looks forward only,
    and a minute's schedule names half a million times a year."""
    low, high = math.nextafter(since, math.inf), wall
    found = fire_after(cron, timezone, low + 1e-6)
    if found is None or found > wall:
        return None
    low = found
    while high - low > 30.0:
        middle = (low + high) / 2
        later = fire_after(cron, timezone, middle)
        if later is None or later > wall:
            high = middle
        else:
            low = max(later, low)
    while (later := fire_after(cron, timezone, low + 1.0)) is not None and later <= wall:
        low = later
    return low
