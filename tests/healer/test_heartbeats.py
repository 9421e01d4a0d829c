import pytest

from healer.diagnosis import Cause, Health, diagnose
from healer.dossier import Dossier
from healer.evidence import Evidence, What
from healer.sensors.heartbeats import HeartbeatSensor
from tests.healer.support import LIMITS, FakeClock, beat, member, rank


class Bench:
    """A heartbeat sensor on a clock, its evidence folded and judged; process states are given by hand."""

    def __init__(self, slots: int = 4) -> None:
        self.clock = FakeClock()
        self.sensor = HeartbeatSensor(self.clock, stall_after_s=1.0, silent_after_s=10.0)
        self.dossier, self.live = Dossier(), tuple(rank(s) for s in range(slots))
        self.sensor.watch([member(s) for s in range(slots)])
        self.seen: list[Evidence] = []

    def run(self, seconds: float, *, beating: dict[int, tuple[int, ...]], round_: int = -1, idle: bool = False) -> None:
        """`beating`: the slots that beat every 0.1 s, each with whom it waits for. `round_` -1: rounds advance."""
        for step in range(round(seconds * 10)):
            self.clock.now += 0.1
            found: list[Evidence] = []
            for slot, waits in beating.items():
                number = round_ if round_ >= 0 else 1000 + step + round(self.clock.now * 10)
                found += self.sensor.heard(beat(slot, self.clock.now, round_=number, waiting_on=waits, idle=idle))
            found += self.sensor.tick()
            self.take(found)

    def take(self, found: list[Evidence]) -> None:
        self.seen += found
        self.dossier.extend(found)

    def verdicts(self) -> dict[int, tuple[Health, Cause]]:
        found = diagnose(self.dossier.standing(self.clock.now), self.live, LIMITS, self.clock.now).ranks
        return {v.rank.slot: (v.health, v.cause) for v in found}


HEALTHY = (Health.HEALTHY, Cause.NONE)
ALL: dict[int, tuple[int, ...]] = {0: (), 1: (), 2: (), 3: ()}


def test_beats_of_a_healthy_group_say_nothing_after_the_first() -> None:
    bench = Bench()
    bench.run(5.0, beating=ALL)
    assert [e.what for e in bench.seen] == [What.BEAT_HEARD] * 4
    assert bench.verdicts() == dict.fromkeys(range(4), HEALTHY)


def test_an_idle_group_in_which_no_round_moves_is_healthy() -> None:
    bench = Bench()
    bench.run(30.0, beating=ALL, round_=7, idle=True)
    assert bench.verdicts() == dict.fromkeys(range(4), HEALTHY)


def test_a_hang_under_traffic_is_found_within_the_stall_time_and_one_beat() -> None:
    bench = Bench()
    bench.run(1.0, beating=ALL)
    bench.run(1.3, beating={0: (1,), 2: (1,), 3: (1,)}, round_=50)
    assert bench.verdicts()[1] == (Health.UNHEALTHY, Cause.HANG)


def test_a_short_honest_pause_of_one_rank_leaves_no_trace_of_suspicion() -> None:
    bench = Bench()
    bench.run(1.0, beating=ALL)
    bench.run(0.8, beating={0: (1,), 2: (1,), 3: (1,)}, round_=50)
    bench.run(0.2, beating=ALL)
    assert [e.what for e in bench.seen] == [What.BEAT_HEARD] * 4


def test_a_rank_that_comes_back_from_silence_is_healthy_again() -> None:
    bench = Bench()
    bench.run(1.0, beating=ALL)
    bench.run(3.0, beating={0: (), 2: (), 3: ()})
    assert bench.verdicts()[1] == (Health.UNKNOWN, Cause.SUSPECTED)
    bench.run(0.2, beating=ALL)
    assert bench.verdicts()[1] == HEALTHY


def test_waiting_for_each_other_in_ever_new_rounds_accuses_nobody() -> None:
    bench = Bench()
    bench.run(10.0, beating={0: (1,), 1: (0,), 2: (1,), 3: (1,)})
    assert bench.verdicts() == dict.fromkeys(range(4), HEALTHY)


def test_accusations_end_when_the_round_moves_on() -> None:
    bench = Bench()
    bench.run(2.0, beating={0: (1,), 1: (), 2: (1,), 3: (1,)}, round_=50)
    assert bench.verdicts()[1] == (Health.UNKNOWN, Cause.SUSPECTED)
    bench.run(0.2, beating=ALL)
    assert bench.verdicts() == dict.fromkeys(range(4), HEALTHY)


def test_a_beating_rank_that_holds_all_others_up_is_stuck_after_the_long_deadline() -> None:
    bench = Bench()
    bench.run(9.5, beating={0: (1,), 1: (), 2: (1,), 3: (1,)}, round_=50)
    assert bench.verdicts()[1][0] == Health.UNKNOWN
    bench.run(1.0, beating={0: (1,), 1: (), 2: (1,), 3: (1,)}, round_=50)
    assert bench.verdicts()[1] == (Health.UNHEALTHY, Cause.STUCK)


@pytest.mark.parametrize("stopped_s", [2.0, 60.0])
def test_silence_while_the_daemon_itself_was_stopped_condemns_nobody(stopped_s: float) -> None:
    bench = Bench()
    bench.run(1.0, beating={0: (1,), 1: (), 2: (1,), 3: (1,)}, round_=50)
    bench.clock.now += stopped_s
    bench.take(bench.sensor.forgive(stopped_s))
    bench.take(bench.sensor.tick())
    assert set(bench.verdicts().values()) == {(Health.UNKNOWN, Cause.TELEMETRY_LOST)}
    bench.run(0.1, beating=ALL)
    assert bench.verdicts() == dict.fromkeys(range(4), HEALTHY)


def test_a_rank_that_died_while_the_daemon_was_stopped_is_still_suspected_afterwards() -> None:
    bench = Bench()
    bench.run(1.0, beating=ALL)
    bench.clock.now += 5.0
    bench.take(bench.sensor.forgive(5.0))
    bench.run(1.2, beating={0: (), 2: (), 3: ()})
    assert bench.verdicts()[1] == (Health.UNKNOWN, Cause.SUSPECTED)


def test_a_replacement_is_not_accused_of_its_predecessors_delay() -> None:
    bench = Bench()
    bench.run(0.9, beating={0: (1,), 2: (), 3: ()}, round_=50)
    bench.sensor.watch([member(0), member(1, incarnation=1), member(2), member(3)])
    bench.take([e for _ in range(2) for e in _half_second(bench)])
    assert not [e for e in bench.seen if e.what == What.WAITED_ON]


def _half_second(bench: Bench) -> list[Evidence]:
    bench.clock.now += 0.25
    return bench.sensor.heard(beat(0, bench.clock.now, round_=50, waiting_on=(1,))) + bench.sensor.tick()
