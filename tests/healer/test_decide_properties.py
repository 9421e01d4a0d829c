"""What must hold of healing under any stream of events: random timelines over the real roster, actions and journal."""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from healer.diagnosis import Cause, Health
from healer.policy.decide import Reason, Step, decide
from healer.policy.guards import UNRESPONSIVE
from tests.healer.healing_timeline import World, play, remembered

ENDS = 40

_SLOTS = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)
_SICK = st.dictionaries(st.integers(0, 3), st.sampled_from(["ecc", "thermal", "remap", "xid"]), min_size=1, max_size=4)
_EVENT = st.one_of(
    st.fixed_dictionaries({"dead": _SLOTS}),
    st.fixed_dictionaries({"hung": _SLOTS}),
    st.fixed_dictionaries({"suspected": _SLOTS}),
    st.fixed_dictionaries({"well": _SLOTS}),
    st.fixed_dictionaries({"sick": _SICK}),
    st.fixed_dictionaries({"late": st.booleans()}),
    st.fixed_dictionaries({"busy": st.sampled_from(["", "loss: cover", "join: load"])}),
    st.fixed_dictionaries({"survivable": st.integers(0, 4)}),
    st.fixed_dictionaries({"boots_fail": st.dictionaries(st.integers(0, 3), st.integers(1, 5), min_size=1)}),
    st.fixed_dictionaries({"hook_fails": st.just(["reset"])}),
    st.fixed_dictionaries({"drain_hangs": st.booleans()}),
    st.fixed_dictionaries({"refuse": st.sampled_from(["", "no room"])}),
    st.fixed_dictionaries({"restart": st.just(True)}),
    st.fixed_dictionaries({"reset_breaker": st.just("alice")}),
    st.fixed_dictionaries({"scale": st.integers(1, 8)}),
)
_PAUSES = st.one_of(
    _EVENT, st.fixed_dictionaries({"pause": st.just("alice")}), st.fixed_dictionaries({"resume": st.just("alice")})
)
_EVENTS = st.dictionaries(st.integers(1, ENDS - 1), _EVENT, max_size=12)

_RUNGS: list[Any] = [
    {"action": "retry", "maxAttempts": 2, "backoff": "2s"},
    {"action": "replace", "maxAttempts": 2, "backoff": "2s"},
    {"action": "scale-down"},
    {"action": "drain", "maxAttempts": 1, "deadline": "5s"},
    {"hook": "reset", "maxAttempts": 2, "backoff": "2s"},
    {"hook": "page", "maxAttempts": 1},
]


@st.composite
def _specs(draw: st.DrawFn) -> dict[str, Any]:
    ladder = draw(st.permutations(_RUNGS))[: draw(st.integers(1, 6))]
    other = draw(st.permutations(_RUNGS))[: draw(st.integers(1, 6))]
    bounds: dict[str, Any] = {"minRanks": draw(st.integers(1, 4)), "maxRanks": draw(st.integers(4, 8))}
    if draw(st.booleans()):
        bounds["breaker"] = {"maxDestructive": draw(st.integers(1, 3)), "window": "20s"}
    if draw(st.booleans()):
        bounds["faultBudget"] = {"failures": draw(st.integers(1, 3)), "window": "30s", "quarantine": "15s"}
    if draw(st.booleans()):
        bounds["maxUnavailable"] = draw(st.integers(1, 2))
    if draw(st.booleans()):
        bounds["redundancyFloor"] = draw(st.integers(1, 2))
    rules = [{"name": "gpu", "match": {"cause": ["ecc", "xid", "remap"]}, "actions": other}]
    return {
        "hooks": {
            "reset": {"kind": "reset", "command": ["/bin/true"], "deadline": "5s"},
            "page": {"kind": "exec", "command": ["/bin/true"], "deadline": "5s"},
        },
        "healing": {"rules": [*rules, {"name": "any", "actions": ladder}]},
        "bounds": bounds,
    }


def _play(spec: dict[str, Any], events: dict[int, Any], check: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.db"
        world, _ = play({"spec": spec, "events": events, "ends": ENDS}, journal, check)
        assert remembered(journal) == world.roster.memory, "what was written down is what is remembered"
        for verdicts, state, now, found in world.states:
            assert decide(world.policy, verdicts, state, now) == found, "the same state gives the same decisions"


@settings(max_examples=80, deadline=None)
@given(_specs(), _EVENTS)
def test_under_any_events_bounds_hold_and_no_healthy_rank_is_touched(
    spec: dict[str, Any], events: dict[int, Any]
) -> None:
    bounds = spec["bounds"]

    def check(world: World) -> None:
        assert bounds["minRanks"] <= len(world.group.target) <= bounds["maxRanks"]
        verdicts, state, _, decisions = world.states[-1]
        by_slot = {v.rank.slot: v for v in verdicts}
        for one in decisions:
            if not one.acts:
                continue
            for slot in one.slots:
                seen = by_slot.get(slot)
                if one.step in (Step.REPLACE, Step.SCALE_DOWN, Step.DRAIN, Step.RETRY):
                    assert seen is not None
                    assert seen.health == Health.UNHEALTHY
                elif one.step in (Step.REFILL, Step.GIVE_UP) or one.hook == "reset":
                    assert slot not in {rank.slot for rank in state.live}, "the slot is empty"

    _play(spec, events, check)


_COLLISION = st.one_of(
    st.fixed_dictionaries({"busy": st.sampled_from(["", "loss: cover", "join: load"]), "sick": _SICK}),
    st.fixed_dictionaries({"sick": _SICK, "hung": _SLOTS}),
    st.fixed_dictionaries({"sick": _SICK, "dead": _SLOTS}),
    st.fixed_dictionaries({"well": _SLOTS}),
)


@settings(max_examples=80, deadline=None)
@given(_specs(), st.dictionaries(st.integers(1, ENDS - 1), _COLLISION, min_size=4, max_size=12))
def test_under_any_events_no_two_reconfigurations_are_begun_by_choice_at_once(
    spec: dict[str, Any], events: dict[int, Any]
) -> None:
    for rule in spec["healing"]["rules"]:
        rule["actions"] = [one for one in rule["actions"] if one.get("action") in ("drain", "replace")] or ["drain"]

    def check(world: World) -> None:
        _, state, _, decisions = world.states[-1]
        ending = [d for d in decisions if d.acts and d.step in (Step.REPLACE, Step.SCALE_DOWN, Step.DRAIN)]
        slots = [slot for one in ending for slot in one.slots]
        assert len(slots) == len(set(slots)), "a rank is ended once"
        chosen = [d for d in ending if d.destructive and d.cause not in UNRESPONSIVE]
        assert len(chosen) <= 1
        if chosen:
            assert not state.sequence
            assert len(ending) == 1

    _play(spec, events, check)


@settings(max_examples=80, deadline=None)
@given(_specs(), _EVENTS)
def test_under_any_events_the_breaker_bounds_destruction_and_never_blocks_recovery(
    spec: dict[str, Any], events: dict[int, Any]
) -> None:
    spec["bounds"].setdefault("breaker", {"maxDestructive": 1, "window": "20s"})
    for rule in spec["healing"]["rules"]:
        rule["actions"].append({"action": "replace", "maxAttempts": 3})
        rule["actions"] = list({str(one): one for one in rule["actions"] if one.get("action") != "human"}.values())
        seen: list[str] = []
        for one in list(rule["actions"]):
            name = one.get("hook") or one["action"]
            if name in seen:
                rule["actions"].remove(one)
            seen.append(name)
    most = spec["bounds"]["breaker"]["maxDestructive"]
    begun: list[float] = []
    reset = [0.0]

    def check(world: World) -> None:
        verdicts, state, now, decisions = world.states[-1]
        if "reset_breaker" in events.get(world.second, {}):
            reset[0] = now
        acted = {slot for d in decisions if d.acts for slot in d.slots}
        for verdict in verdicts:
            dead = verdict.cause == Cause.PROCESS_DEATH and verdict.rank in state.live
            tried = state.memory.ladders.get(verdict.rank.slot)
            if dead and (tried is None or tried.rank != verdict.rank):
                assert verdict.rank.slot in acted, "the survivors of a death are released at once"
        for one in decisions:
            if one.reason == Reason.BREAKER_OPEN:
                assert one.cause != Cause.PROCESS_DEATH or one.acts
            begun.extend([now] * len(one.slots) if one.acts and one.destructive else [])
        recent = [at for at in begun if now - at <= 20.0 and at >= reset[0]]
        assert len(recent) <= most

    _play(spec, events, check)


@settings(max_examples=40, deadline=None)
@given(_specs(), _EVENTS, st.sampled_from(["dryRun", "pause"]))
def test_under_any_events_a_dry_run_and_a_pause_never_act(
    spec: dict[str, Any], events: dict[int, Any], mode: str
) -> None:
    quiet = {second: event for second, event in events.items() if "scale" not in event}

    def check(world: World) -> None:
        assert world.group.calls == []
        assert world.hooks == []
        assert not any(d.acts for d in world.states[-1][3])

    _play(spec | {mode: True}, quiet, check)


@settings(max_examples=40, deadline=None)
@given(_specs(), st.dictionaries(st.integers(1, ENDS - 1), _PAUSES, max_size=12))
def test_under_any_events_a_ladder_comes_to_an_end(spec: dict[str, Any], events: dict[int, Any]) -> None:
    """Nothing is asked for without end: a slot gets at most the attempts of all its rungs between two faults."""
    asked: dict[int, int] = {}

    def check(world: World) -> None:
        verdicts, _, _, decisions = world.states[-1]
        for verdict in verdicts:
            if verdict.health == Health.HEALTHY:
                asked.pop(verdict.rank.slot, None)
        if "reset_breaker" in events.get(world.second, {}) or "scale" in events.get(world.second, {}):
            asked.clear()
        for slot in [slot for d in decisions if d.acts for slot in d.slots]:
            asked[slot] = asked.get(slot, 0) + 1
            assert asked[slot] <= 30

    _play(spec, events, check)
