"""`spec.bounds` and `spec.schedules`: what no action may exceed, applied last and always."""

from typing import Annotated, Literal

from pydantic import Field

from healer.policy.schema.base import Count, CountOrZero, Duration, Listed, Model, Name, Positive

Cron = Annotated[str, Field(min_length=1, max_length=200)]
Zone = Annotated[str, Field(min_length=1, max_length=64)]


class SizeBounds(Model):
    """Within those of spec.bounds; at least one of the two."""

    min_ranks: Count | None = None
    """The least size while the schedule holds."""
    max_ranks: Count | None = None
    """The greatest size while the schedule holds."""


class Schedule(Model):
    """Bounds for certain times. Bounds, never targets: within them the load decides. Of several at once the highest
    minRanks and the lowest maxRanks count; where these contradict, the minimum wins: serving comes before saving."""

    name: Name
    """Named in decisions; unique."""
    cron: Cron
    """When it begins: minute, hour, day of month, month, day of week (mon-sun)."""
    timezone: Zone = "UTC"
    """An IANA name, such as Europe/Berlin. At a change of clocks the local time counts."""
    for_s: Duration | None = None
    """How long it holds. Either this or `until`."""
    until: Cron | None = None
    """When it ends, as cron in the same time zone."""
    bounds: SizeBounds
    """What holds meanwhile."""


class Maintenance(Model):
    """A time in which people work on the machines."""

    name: Name
    """Named in decisions; unique."""
    cron: Cron
    """When it begins."""
    timezone: Zone = "UTC"
    """An IANA name."""
    for_s: Duration
    """How long it lasts."""
    mode: Literal["observe", "heal-only"] = "observe"
    """`observe`: as spec.pause; `heal-only`: faults are healed, nothing is scaled."""


class FaultBudget(Model):
    """A slot that fails again and again is left alone."""

    failures: Annotated[int, Field(ge=1, le=10_000)] = 5
    """That many failures of a slot ..."""
    window_s: Duration = 3600.0
    """... within this ..."""
    quarantine_s: Duration = 86400.0
    """... keep it empty for this, across restarts of the daemon."""


class Breaker(Model):
    """Stops new destructive steps when there are too many; never a recovery that has begun. Reset by an operator only."""

    max_destructive: Annotated[int, Field(ge=1, le=100_000)] = 5
    """Healing actions that end a rank, reset a GPU or reboot a host ..."""
    window_s: Duration = 300.0
    """... within this open the breaker. Deaths are no actions: they are healed in any number."""


class Bounds(Model):
    """What no action and no request may exceed."""

    min_ranks: Count = 1
    """No action, and no request, goes below it. A death does, until its replacement is live."""
    max_ranks: Count | None = None
    """No action, and no request, goes above it. Absent: target.maxRanks."""
    max_gpus: Count | None = None
    """GPUs that may be in use, spares included. Absent: no limit."""
    budget_rank_hours_per_day: Positive | None = None
    """Ranks x hours since midnight UTC; once spent, nothing grows above minRanks by load. Absent: no limit."""
    divisibility: Count = 1
    """Sizes that are wanted by load or by request are multiples of this. A death may leave another."""
    redundancy_floor: CountOrZero = 0
    """Losses that the group must be able to survive, with room for every expert: no planned step goes below."""
    max_unavailable: Count | None = None
    """Ranks that may be away at once by healing's own choice. Absent: no limit. Deaths are healed in any number."""
    fault_budget: FaultBudget | None = None
    """Absent: no slot is ever left alone."""
    breaker: Breaker | None = None
    """Absent: no limit."""
    maintenance: Annotated[tuple[Maintenance, ...], Listed, Field(max_length=100)] = ()
    """Times in which less is done by itself. What operators ask for is still done."""
