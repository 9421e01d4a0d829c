"""The figures of the closed loop and of the rules' cost, from known inputs."""

from pathlib import Path

import msgspec
import pytest

from chaos.closed_loop import FEWEST, MOST, RULES, followed, main, summarise
from chaos.closed_loop_report import Asked, Moment, Run
from chaos.load_shape import HIGH, LOW, STRETCHES, Shape
from chaos.policy_scale import Scale, measure
from chaos.policy_scale import main as scale_main
from elastic.errors import ElasticError
from tests.healer.load_timeline import Timeline


def test_the_shape_has_its_peaks_and_ends_without_a_client() -> None:
    shape = Shape(2.0)
    assert shape.seconds == 2 * sum(stretch.seconds for stretch in STRETCHES)
    seen = [shape.clients(second / 10) for second in range(int(shape.seconds * 10) + 20)]
    assert max(seen) == HIGH
    assert seen[0] == LOW
    assert seen[-1] == 0
    day = next((begin, end) for s, begin, end in shape.spans if s.day)
    assert shape.clients(sum(day) / 2) == HIGH


def test_rank_seconds_and_reversals_are_counted_from_the_sizes() -> None:
    moments = [Moment(0.0, 3, 2, 2), Moment(10.0, 20, 6, 2), Moment(15.0, 20, 6, 6), Moment(20.0, 3, 2, 2)]
    asked = [Asked(1.0, "calm", 0.1), Asked(11.0, "ramp", 0.3), Asked(12.0, "ramp", 0.5)]
    found = summarise(asked, moments, Shape(1.0))
    assert found.rank_seconds == 2 * 10 + 2 * 5 + 6 * 5
    assert (found.changes, found.reversals, found.largest, found.last) == (2, 1, 6, 2)
    assert found.ttft_p95_by_part_s == {"calm": 0.1, "ramp": 0.5}
    with pytest.raises(ElasticError, match="nothing was answered"):
        summarise([], moments, Shape(1.0))


def test_a_size_that_does_not_follow_is_a_problem() -> None:
    still = [Moment(float(s), 20, FEWEST, FEWEST) for s in range(3)]
    run = Run(
        name="x", summary=summarise([Asked(0.0, "calm", 0.1)], still, Shape(1.0)), asked=(), moments=(), problems=()
    )
    assert followed(run) == (f"at {HIGH} clients no more than {FEWEST} ranks were asked for",)


def test_a_size_that_turns_around_twice_in_one_peak_is_a_problem_and_once_in_each_is_none() -> None:
    shape = Shape(1.0)
    assert [peak[0] for peak in shape.peaks] == ["ramp", "spike", "day"]

    def run(sizes: dict[float, int]) -> Run:
        moments, size = [], FEWEST
        for second in range(int(shape.seconds)):
            size = sizes.get(second, size)
            moments.append(Moment(float(second), 3, size, size))
        summary = summarise([Asked(0.0, "calm", 0.1)], moments, shape)
        return Run(name="x", summary=summary, asked=(), moments=tuple(moments), problems=())

    calm = {30: MOST, 55: FEWEST, 70: MOST, 85: FEWEST, 120: MOST, 140: FEWEST}
    good = run(calm)
    assert (good.summary.reversals, good.summary.reversals_by_peak) == (5, {"ramp": 1, "spike": 1, "day": 1})
    assert followed(good) == ()
    flapping = run(calm | {125: 4, 130: MOST})
    assert flapping.summary.reversals_by_peak["day"] == 2
    assert followed(flapping) == ("day: the size had turned around 4 times by its end, after 3 peaks of the load",)
    late = run({30: MOST, 100: 4, 103: FEWEST, 120: MOST, 140: FEWEST})
    assert late.summary.reversals_by_peak == {"ramp": 0, "spike": 0, "day": 2}
    assert followed(late) == ()


def test_the_rules_of_the_closed_loop_grow_for_all_clients_and_come_back() -> None:
    spec = {
        "load": RULES | {"interval": "1s"},
        "bounds": {"minRanks": FEWEST, "maxRanks": MOST},
        "target": {"ranks": 2},
    }
    events = {
        0: {"signals": {"waiting": 0, "kvUse": 0.4}},
        20: {"signals": {"waiting": 12, "kvUse": 1.0}},
        40: {"signals": {"waiting": 0, "kvUse": 0.1}},
    }
    played = Timeline({"spec": spec, "ranks": 2, "boot_s": 3, "events": events, "ends": 120}).play()
    assert played.target == FEWEST
    assert max(after for _, _, after in played.changes) >= MOST - 1


@pytest.mark.slow
def test_a_thousand_ranks_cost_a_fraction_of_a_core(tmp_path: Path) -> None:
    point = measure(1024, 5)
    assert point.cpu_percent < 30.0, "4.5 on an idle machine"
    assert scale_main(["--ranks", "50", "--seconds", "2", "--out", str(tmp_path / "s.json")]) == 0
    assert msgspec.json.decode((tmp_path / "s.json").read_bytes(), type=Scale).points[0].ranks == 50
    assert "<svg" in (tmp_path / "s.svg").read_text()


def test_a_wrong_pace_is_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--pace", "0"])
    assert ended.value.code == 2
