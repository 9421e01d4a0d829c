"""Relations within `spec.schedules` and `spec.bounds.maintenance`: cron expressions, time zones, bounds within bounds."""

from collections.abc import Iterator

from healer.policy.conflict import Contradiction, repeated
from healer.policy.schema import KeyPath, Maintenance, Policy, Schedule

SCHEDULES: KeyPath = ("spec", "schedules")
MAINTENANCE: KeyPath = ("spec", "bounds", "maintenance")


def time_relations(policy: Policy) -> Iterator[Contradiction]:
    schedules, windows = policy.spec.schedules, policy.spec.bounds.maintenance
    yield from repeated([one.name for one in schedules], SCHEDULES)
    yield from repeated([one.name for one in windows], MAINTENANCE)
    for index, schedule in enumerate(schedules):
        place = (*SCHEDULES, index)
        yield from _cron(schedule, place)
        yield from _sizes(policy, schedule, place)
    for index, window in enumerate(windows):
        yield from _cron(window, (*MAINTENANCE, index))


def _cron(entry: Schedule | Maintenance, place: KeyPath) -> Iterator[Contradiction]:
    # imported here: only a policy with times needs what this brings in
    from healer.policy.schedules import parse_cron

    try:
        parse_cron("0 0 * * *", entry.timezone)
    except ValueError as error:
        yield Contradiction((*place, "timezone"), (), str(error))
        return
    until = entry.until if isinstance(entry, Schedule) else None
    for key, text in (("cron", entry.cron), ("until", until)):
        if text is None:
            continue
        try:
            parse_cron(text, entry.timezone)
        except ValueError as error:
            yield Contradiction((*place, key), (), str(error))
    if isinstance(entry, Schedule) and (entry.for_s is None) == (until is None):
        text = "has both `for` and `until`" if until else "has no end"
        yield Contradiction(
            place, (), f"{text}, expected either `for` with a duration or `until` with a cron expression"
        )


def _sizes(policy: Policy, schedule: Schedule, place: KeyPath) -> Iterator[Contradiction]:
    least, most = schedule.bounds.min_ranks, schedule.bounds.max_ranks
    floor, ceiling = policy.spec.bounds.min_ranks, policy.max_ranks
    here = (*place, "bounds")
    if least is None and most is None:
        yield Contradiction(here, (), "says nothing, expected minRanks, maxRanks or both")
    if least is not None and most is not None and least > most:
        yield Contradiction(
            (*here, "minRanks"), (*here, "maxRanks"), f"{least} is above maxRanks, expected at most {most}"
        )
    for key, value in (("minRanks", least), ("maxRanks", most)):
        if value is not None and value < floor:
            text = f"{value} is below spec.bounds.minRanks, expected at least {floor}"
            yield Contradiction((*here, key), ("spec", "bounds", "minRanks"), text)
        if value is not None and value > ceiling:
            text = f"{value} is above the greatest size allowed, expected at most {ceiling}"
            yield Contradiction((*here, key), ("spec", "bounds", "maxRanks"), text)
