"""Bounds by the clock: begin, end, overlap, and both changes of daylight-saving time in Europe and America."""

from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from healer.policy.schedules import Calendar, fire_after, in_force, parse_cron, spell
from healer.policy.schema import Schedule, SizeBounds

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"


def plan(
    cron: str,
    zone: str = BERLIN,
    *,
    hours: float | None = None,
    until: str | None = None,
    low: int | None = None,
    high: int | None = None,
    name: str = "day",
) -> Schedule:
    values: dict[str, Any] = {
        "name": name,
        "cron": cron,
        "timezone": zone,
        "bounds": SizeBounds.model_validate({"minRanks": low, "maxRanks": high}),
    }
    return Schedule.model_construct(**values, for_s=None if hours is None else hours * 3600.0, until=until)


def at(text: str, zone: str = BERLIN, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


def local(wall: float, zone: str = BERLIN) -> str:
    return datetime.fromtimestamp(wall, ZoneInfo(zone)).isoformat()


OFFICE = plan("0 8 * * mon-fri", hours=12, low=4)


@pytest.mark.parametrize(
    ("moment", "inside"),
    [
        ("2026-06-01T07:59:59", False),
        ("2026-06-01T08:00:00", True),
        ("2026-06-01T19:59:59", True),
        ("2026-06-01T20:00:00", False),
        ("2026-06-06T12:00:00", False),  # a Saturday
        ("2026-06-05T19:00:00", True),
    ],
)
def test_a_schedule_holds_from_its_time_until_its_duration_has_passed(moment: str, inside: bool) -> None:
    assert (spell(OFFICE, at(moment)) is not None) is inside
    assert in_force([OFFICE], at(moment)).min_ranks == (4 if inside else 0)


@pytest.mark.parametrize(
    ("zone", "day", "hour_by_the_clock"),
    [
        (BERLIN, "2026-03-29", "09:30"),  # 8 elapsed hours after 00:30, one of them skipped
        (BERLIN, "2026-10-25", "07:30"),  # one of them twice
        (NEW_YORK, "2026-03-08", "09:30"),
        (NEW_YORK, "2026-11-01", "07:30"),
    ],
)
def test_a_duration_is_elapsed_time_on_the_days_when_clocks_change(zone: str, day: str, hour_by_the_clock: str) -> None:
    night = plan("30 0 * * *", zone, hours=8)
    found = spell(night, at(f"{day}T06:00:00", zone))
    assert found is not None
    assert found == (at(f"{day}T00:30:00", zone), at(f"{day}T{hour_by_the_clock}:00", zone))
    assert found[1] - found[0] == 8 * 3600.0


@pytest.mark.parametrize(
    ("zone", "day"),
    [(BERLIN, "2026-03-29"), (BERLIN, "2026-10-25"), (NEW_YORK, "2026-03-08"), (NEW_YORK, "2026-11-01")],
)
def test_an_end_by_the_clock_is_by_the_clock_on_the_days_when_clocks_change(zone: str, day: str) -> None:
    night = plan("30 0 * * *", zone, until="0 8 * * *")
    assert spell(night, at(f"{day}T06:00:00", zone)) == (at(f"{day}T00:30:00", zone), at(f"{day}T08:00:00", zone))
    assert spell(night, at(f"{day}T08:00:00", zone)) is None


@pytest.mark.parametrize(
    ("zone", "before", "comes"),
    [
        (BERLIN, "2026-03-29T01:00:00", "2026-03-29T03:30:00+02:00"),
        (NEW_YORK, "2026-03-08T01:00:00", "2026-03-08T03:30:00-04:00"),
    ],
)
def test_a_time_that_a_day_skips_is_not_lost(zone: str, before: str, comes: str) -> None:
    fire = fire_after("30 2 * * *", zone, at(before, zone))
    assert fire is not None
    assert local(fire, zone) == comes


@pytest.mark.parametrize(("zone", "day", "hour"), [(BERLIN, "2026-10-25", "02"), (NEW_YORK, "2026-11-01", "01")])
def test_a_floor_that_begins_in_the_doubled_hour_is_never_shorter_than_said(zone: str, day: str, hour: str) -> None:
    half_past = plan(f"30 {int(hour)} * * *", zone, hours=1)
    first, second = at(f"{day}T{hour}:30:00", zone), at(f"{day}T{hour}:30:00", zone, fold=1)
    assert second - first == 3600.0
    assert spell(half_past, first) is not None
    assert spell(half_past, second) == (second, second + 3600.0)
    assert spell(half_past, second + 3600.0) is None


def test_the_highest_floor_and_the_lowest_ceiling_hold_and_the_floor_wins_over_the_ceiling() -> None:
    all_day = plan("0 0 * * *", hours=24, low=2, high=6, name="all-day")
    noon = plan("0 12 * * *", hours=1, high=3, name="noon")
    launch = plan("30 12 * * *", hours=1 / 6, low=5, name="launch")
    plans = [all_day, noon, launch]
    morning, midday, start = (in_force(plans, at(f"2026-06-01T{t}:00")) for t in ("09:00", "12:10", "12:35"))
    assert (morning.min_ranks, morning.max_ranks) == (2, 6)
    assert (midday.min_ranks, midday.max_ranks, midday.ceiling_by) == (2, 3, "noon")
    assert (start.min_ranks, start.max_ranks, start.floor_by) == (5, 5, "launch")


def test_a_schedule_every_minute_and_one_of_once_a_year_are_found_alike() -> None:
    minutely = plan("* * * * *", hours=90 / 3600)
    yearly = plan("0 0 24 12 *", until="0 0 27 12 *")
    assert spell(minutely, at("2026-06-01T12:00:59")) == (at("2026-06-01T12:00:00"), at("2026-06-01T12:01:30"))
    assert spell(yearly, at("2026-12-25T12:00:00")) == (at("2026-12-24T00:00:00"), at("2026-12-27T00:00:00"))
    assert spell(yearly, at("2026-12-23T23:59:59")) is None


def test_the_calendar_of_a_loop_changes_exactly_when_the_schedule_does_and_follows_a_clock_set_back() -> None:
    calendar = Calendar([OFFICE])
    for moment, floor in (("07:59:59", 0), ("08:00:00", 4), ("19:59:59", 4), ("20:00:00", 0), ("12:00:00", 4)):
        assert calendar.at(at(f"2026-06-01T{moment}")).min_ranks == floor, moment


def test_without_schedules_nothing_is_bounded() -> None:
    assert Calendar([]).at(0.0).max_ranks is None


@pytest.mark.parametrize(
    ("cron", "zone", "part"),
    [
        ("0 8 * *", BERLIN, "has 4 fields"),
        ("0 25 * * *", BERLIN, "not a cron expression"),
        ("0 8 * * 1-5", BERLIN, "days of the week by number"),
        ("0 8 * * mon-fri", "Europe/Atlantis", "not a time zone"),
        ("0 8 * * mon-fri", "../../etc/passwd", "not a time zone"),
        ("nonsense", BERLIN, "has 1 fields"),
    ],
)
def test_a_wrong_expression_says_what_was_expected(cron: str, zone: str, part: str) -> None:
    with pytest.raises(ValueError, match=part) as error:
        parse_cron(cron, zone)
    assert "expected" in str(error.value)


ZONES = {
    "Europe/Berlin": ["2026-03-29", "2026-10-25"],
    "America/New_York": ["2026-03-08", "2026-11-01"],
    "Australia/Lord_Howe": ["2026-04-05", "2026-10-04"],  # by half an hour
    "America/Santiago": ["2026-04-05", "2026-09-06"],  # at midnight
    "America/Havana": ["2026-03-08", "2026-11-01"],  # at midnight
    "Antarctica/Troll": ["2026-03-29", "2026-10-25"],  # by two hours
    "Africa/Casablanca": ["2026-02-15", "2026-03-22"],
}


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("cron", ["0 0 * * *", "30 0 * * *", "30 2 * * *", "59 23 * * *", "*/15 * * * *"])
def test_no_day_is_lost_or_doubled_around_a_change_of_clocks(zone: str, cron: str) -> None:
    """Against every minute of the days around it, looked at one by one."""
    minute, hour = cron.split()[:2]
    for day in ZONES[zone]:
        begin = at(f"{day}T00:00", "UTC") - 2 * 86400.0
        wanted = set()
        for number in range(4 * 24 * 60):
            moment = begin + number * 60.0
            here = datetime.fromtimestamp(moment, ZoneInfo(zone))
            before = here.utcoffset() != datetime.fromtimestamp(moment - 7200.0, ZoneInfo(zone)).utcoffset()
            # a time that was skipped comes as if the clock had not been changed yet
            shown = [here, datetime.fromtimestamp(moment - 7200.0, ZoneInfo(zone)) + timedelta(hours=2)]
            for one in shown if before else shown[:1]:
                exists = one.replace(fold=0).timestamp() == moment or one.replace(fold=1).timestamp() == moment
                if exists and _names(one, minute, hour):
                    wanted.add(moment)
        found, wall = set(), begin
        while (wall_ := fire_after(cron, zone, wall)) is not None and wall_ < begin + 4 * 86400.0:
            found.add(wall_)
            wall = wall_ + 1.0
        assert sorted(found) == sorted(wanted)


def _names(moment: datetime, minute: str, hour: str) -> bool:
    on_minute = moment.minute % 15 == 0 if minute == "*/15" else moment.minute == int(minute)
    return on_minute and (hour == "*" or moment.hour == int(hour))


def test_a_night_that_ends_after_midnight_ends_on_the_day_after_the_clocks_were_put_forward() -> None:
    calendar = Calendar([plan("5 0 * * *", until="0 0 * * *", low=4, name="almost all day")])
    assert calendar.at(at("2026-03-29T00:10")).min_ranks == 4
    assert calendar.at(at("2026-03-30T00:02")).min_ranks == 0
    assert calendar.at(at("2026-03-30T00:10")).min_ranks == 4
