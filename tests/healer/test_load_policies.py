"""The ready policies under load: they grow when they should, come back, and rest in between."""

from pathlib import Path
from typing import Any

import pytest

from tests.healer.load_timeline import Timeline, read

POLICIES = Path(__file__).parents[2] / "policies"
SUNDAY = "2026-06-07T00:00:00+00:00"


def play(name: str, events: dict[int, dict[str, Any]], ends: int) -> Timeline:
    spec = read(POLICIES / name)["spec"]
    scenario = {"spec": spec, "ranks": spec["target"]["ranks"], "begins": SUNDAY, "events": events, "ends": ends}
    return Timeline(scenario).play()


def sizes(played: Timeline) -> list[int]:
    return [after for _, _, after in played.changes]


def test_autoscale_grows_quickly_with_waiting_requests_and_shrinks_one_by_one_afterwards() -> None:
    events = {
        0: {"signals": {"waiting": 16, "kvUse": 0.5}},
        300: {"signals": {"waiting": 60}},
        900: {"signals": {"waiting": 4, "kvUse": 0.2}},
    }
    played = play("autoscale.yaml", events, 4000)
    assert sizes(played) == [8, 7, 6, 5, 4, 3, 2]
    assert played.changes[0][0] < 310
    assert played.changes[1][0] >= 1190


def test_autoscale_keeps_the_mornings_floor_without_any_load() -> None:
    spec = read(POLICIES / "autoscale.yaml")["spec"]
    idle = {0: {"signals": {"waiting": 0, "kvUse": 0.0}}}
    # 07:20 in Berlin on a Monday; the floor of 4 comes ten minutes later
    scenario = {"spec": spec, "ranks": 2, "begins": "2026-06-08T07:20:00+02:00", "events": idle, "ends": 2400}
    assert Timeline(scenario).play().changes == [[600, 2, 4]]


@pytest.mark.parametrize("rest", ["early", "idle"])
def test_latency_slo_grows_when_tokens_are_late_and_shrinks_when_they_are_early_or_nobody_asks(rest: str) -> None:
    calm = {"ttft": 0.3, "itl": 0.04, "running": 10}
    late = {"ttft": 1.5, "itl": 0.04, "running": 10}
    after = (
        {"ttft": 0.1, "itl": 0.02, "running": 3} if rest == "early" else {"ttft": "idle", "itl": "idle", "running": 0}
    )
    events: dict[int, dict[str, Any]] = {
        0: {"signals": calm},
        200: {"signals": late},
        230: {"signals": calm},
        600: {"signals": after},
    }
    played = play("latency-slo.yaml", events, 8000)
    assert sizes(played)[0] > played.changes[0][1]
    assert 200 <= played.changes[0][0] <= 240
    assert min(played.changes[1:])[0] >= 1200
    assert played.target == 4
    grown, shrunk = sizes(played)[0], sizes(played)[1:]
    assert shrunk == sorted(shrunk, reverse=True)
    assert grown > shrunk[0]


def test_an_outage_of_all_metrics_changes_no_ready_policy() -> None:
    for name in ("autoscale.yaml", "latency-slo.yaml"):
        signals = read(POLICIES / name)["spec"]["load"]["signals"]
        spec = read(POLICIES / name)["spec"]
        events = {0: {"signals": dict.fromkeys(signals, "missing")}}
        scenario = {"spec": spec, "ranks": spec["target"]["ranks"], "begins": SUNDAY, "events": events, "ends": 3000}
        assert Timeline(scenario).play().changes == [], name
