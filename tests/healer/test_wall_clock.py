"""Case 34: a wall clock that is set."""

from healer.evidence import Severity, What
from healer.sensors.wall_clock import WallClockSensor
from tests.healer.support import FakeClock


class SetClock(FakeClock):
    def __init__(self) -> None:
        super().__init__()
        self.offset_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.offset_s


def test_case_34_a_clock_set_by_ten_hours_is_told_once_and_small_corrections_are_not() -> None:
    clock = SetClock()
    sensor = WallClockSensor(clock)
    sensor.start(lambda: None)
    for _ in range(100):
        clock.now += 0.1
        clock.offset_s += 0.0005  # an NTP daemon at work
        assert sensor.tick() == []
    for hours in (10, -10):
        clock.offset_s += hours * 3600
        (seen,) = sensor.tick()
        assert (seen.what, seen.severity) == (What.CLOCK_JUMP, Severity.INFO)
        assert abs(float(seen.value) - hours * 3600) < 1
        assert sensor.tick() == []
    assert sensor.status().readings > 100
