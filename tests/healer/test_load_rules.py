"""What must hold under any load: bounds, no action on what is not known, forecasts that only raise, no swinging."""

import math
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from healer.load.engine import Group, ScalerState, Seen, evaluate
from healer.load.forecast import Forecast
from healer.load.plan import compile_rules
from healer.load.readings import MISSING, Known, Level
from healer.policy.reasons import Reason
from healer.policy.schedules import InForce
from tests.healer.load_timeline import policy_of

SPEC: dict[str, Any] = {
    "load": {
        "cooldown": "5s",
        "signals": {
            "waiting": {"metric": "waiting"},
            "kv": {"metric": "kvUse", "scope": "rank", "aggregate": "mean"},
            "ttft": {"metric": "ttft"},
        },
        "rules": [
            {"kind": "targetTracking", "name": "queue", "signal": "waiting", "target": 4},
            {"kind": "targetTracking", "name": "memory", "signal": "kv", "target": 0.7},
            {"kind": "threshold", "name": "slow", "when": "ttft > 2.0", "for": "3s", "scale": "up", "percent": 50},
            {"kind": "threshold", "name": "calm", "when": "ttft < 0.1 && waiting < 2.0", "for": "3s", "scale": "down"},
            {"kind": "predictive", "name": "day", "signal": "waiting", "target": 4, "season": "1h", "horizon": "10s"},
        ],
        "behavior": {
            "scaleUp": {"policies": [{"type": "percent", "value": 100, "period": "5s"}]},
            "scaleDown": {"stabilizationWindow": "5s", "policies": [{"type": "ranks", "value": 3, "period": "5s"}]},
        },
    },
    "bounds": {"minRanks": 2, "maxRanks": 12, "divisibility": 2},
    "target": {"ranks": 2},
}
RULES = compile_rules(policy_of(SPEC))
LEVELS = st.one_of(
    st.just(MISSING),
    st.just(Level(Known.IDLE)),
    st.floats(0, 1e6, allow_nan=False).map(lambda value: Level(Known.VALUE, value)),
)
MOMENTS = st.lists(
    st.fixed_dictionaries(
        {
            "waiting": LEVELS,
            "kv": LEVELS,
            "ttft": LEVELS,
            "floor": st.integers(0, 14),
            "ceiling": st.one_of(st.none(), st.integers(1, 14)),
            "expected": st.floats(0, 1e4, allow_nan=False),
            "gone": st.integers(0, 3),
        }
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(MOMENTS, st.sampled_from([2, 4, 8, 12]))
def test_whatever_the_load_does_no_size_outside_the_bounds_is_ever_asked_for(moments: Any, size: int) -> None:
    state = ScalerState()
    for second, moment in enumerate(moments):
        calendar = InForce(moment["floor"], moment["ceiling"], "floor", "ceiling", ("floor", "ceiling"))
        levels = {name: moment[name] for name in ("waiting", "kv", "ttft")}
        forecasts = {"day": Forecast(float(second), 5.0, (moment["expected"],) * 4)}
        live = max(0, size - moment["gone"])
        seen = Seen(Group(size, live), levels, forecasts, calendar)
        decision, state = evaluate(RULES, state, seen, float(second))
        if decision.acts:
            assert 2 <= decision.size <= 12
            assert decision.size % 2 == 0
            assert moment["ceiling"] is None or decision.size <= max(2, moment["ceiling"])
            size = decision.size
        assert decision.sentence


@settings(max_examples=100, deadline=None)
@given(MOMENTS, st.lists(st.booleans(), min_size=60, max_size=60), st.sampled_from(["held", "dry run"]))
def test_whatever_the_load_does_nothing_is_begun_while_the_group_is_held_and_never_in_a_dry_run(
    moments: Any, held: list[bool], mode: str
) -> None:
    rules = RULES if mode == "held" else compile_rules(policy_of(SPEC | {"dryRun": True}))
    state, size, begun = ScalerState(), 4, 0
    for second, moment in enumerate(moments):
        waits = mode == "held" and held[second]
        calendar = InForce(moment["floor"], moment["ceiling"], "floor", "ceiling", ("floor", "ceiling"))
        levels = {name: moment[name] for name in ("waiting", "kv", "ttft")}
        group = Group(size, size, "a join is under way" if waits else "")
        decision, state = evaluate(rules, state, Seen(group, levels, {}, calendar), float(second))
        if decision.acts:
            assert mode == "held"
            assert not waits
            size = decision.size
            begun += 1
        elif waits and decision.wanted != size and "held: " in decision.sentence:
            assert decision.reason is Reason.HELD
    assert mode == "held" or begun == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["waiting", "kv"]), min_size=1, unique=True), st.integers(1, 6), st.data())
def test_while_a_signal_is_missing_nothing_shrinks_and_its_rule_lets_nothing_grow(
    missing: list[str], half: int, data: st.DataObject
) -> None:
    size, state = 2 * half, ScalerState()
    values = {"waiting": 0.0, "kv": 0.0, "ttft": data.draw(st.floats(0.2, 1.9))}
    levels = {n: MISSING if n in missing else Level(Known.VALUE, v) for n, v in values.items()}
    for second in range(60):
        decision, state = evaluate(RULES, state, Seen(Group(size, size), levels), float(second))
        assert not decision.acts, decision


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 200, allow_nan=False), st.integers(1, 6), st.integers(0, 5))
def test_constant_load_changes_the_size_in_one_direction_at_most_and_then_never_again(
    load: float, half: int, boot_s: int
) -> None:
    size, live, ready, sizes, state = 2 * half, 2 * half, -1, [2 * half], ScalerState()
    for second in range(400):
        if second == ready:
            live, ready = size, -1
        levels = {
            "waiting": Level(Known.VALUE, load),
            "kv": Level(Known.VALUE, min(1.0, load / live / 8)),
            "ttft": Level(Known.VALUE, 0.5),
        }
        group = Group(size, live, "a join is under way" if ready >= 0 else "")
        decision, state = evaluate(RULES, state, Seen(group, levels), float(second))
        if decision.acts:
            assert second < 200, "still not settled"
            live, ready = (live, second + boot_s) if decision.size > size and boot_s else (decision.size, -1)
            size = decision.size
            sizes.append(size)
    assert sizes == sorted(sizes) or sizes == sorted(sizes, reverse=True)


FREE = {
    **SPEC,
    "load": {
        **SPEC["load"],
        "rules": [SPEC["load"]["rules"][0], SPEC["load"]["rules"][4]],
        "behavior": {
            "scaleUp": {"policies": [{"type": "ranks", "value": 100, "period": "5s"}]},
            "scaleDown": {"policies": [{"type": "percent", "value": 100, "period": "5s"}]},
        },
    },
    "bounds": {"maxRanks": 60},
}
FREE_RULES = compile_rules(policy_of(FREE))


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 300, allow_nan=False), st.integers(1, 40))
def test_without_rate_limits_a_constant_load_takes_one_action_at_most(load: float, size: int) -> None:
    state, actions = ScalerState(), 0
    for second in range(0, 120):
        seen = Seen(Group(size, size), {"waiting": Level(Known.VALUE, load)})
        decision, state = evaluate(FREE_RULES, state, seen, float(second))
        if decision.acts:
            actions, size = actions + 1, decision.size
    assert actions <= 1
    assert load / size <= 4 * 1.1 or size == 60


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 100), st.floats(0, 300, allow_nan=False), st.integers(1, 40))
def test_a_forecast_only_ever_raises_the_size(load: float, expected: float, size: int) -> None:
    levels = {"waiting": Level(Known.VALUE, load)}
    with_forecast = {"day": Forecast(0.0, 5.0, (expected,) * 40)}
    sizes = []
    for forecasts in ({}, with_forecast):
        state, now_size = ScalerState(), size
        for second in range(60):
            seen = Seen(Group(now_size, now_size), levels, forecasts)
            decision, state = evaluate(FREE_RULES, state, seen, float(second))
            now_size = decision.size if decision.acts else now_size
        sizes.append(now_size)
    plain, raised = sizes
    assert raised >= plain
    assert raised == max(plain, min(60, math.ceil(expected / 4 - 1e-9))) or raised == size


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 30), st.floats(10, 200))
def test_one_spike_turns_the_size_around_once_at_most(begin: int, length: int, height: float) -> None:
    size, state, sizes = 2, ScalerState(), [2]
    for second in range(300):
        load = height if begin <= second < begin + length else 6.0
        levels = {"waiting": Level(Known.VALUE, load), "kv": Level(Known.VALUE, 0.5), "ttft": Level(Known.VALUE, 0.5)}
        decision, state = evaluate(RULES, state, Seen(Group(size, size), levels), float(second))
        if decision.acts:
            size = decision.size
            sizes.append(size)
    steps = [b - a for a, b in pairwise(sizes)]
    assert sum((a > 0) != (b > 0) for a, b in pairwise(steps)) <= 1


def test_a_starting_daemon_does_not_scale_at_its_first_look() -> None:
    levels = {"waiting": Level(Known.VALUE, 0.0), "kv": Level(Known.VALUE, 0.0), "ttft": Level(Known.IDLE)}
    decision, _ = evaluate(RULES, ScalerState(), Seen(Group(12, 12), levels), 1000.0)
    assert not decision.acts
