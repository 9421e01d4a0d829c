"""What is decided about a vLLM group, and from which facts: no processes, no time."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healer.targets.vllm.endpoints import Engine, EngineStatus, FaultStatus, Gate, Phase, Scaling
from healer.targets.vllm.machine import ACTS_NEVER, TRANSITIONS, Machine, State, Trigger
from healer.targets.vllm.plan import Do, Facts, RankFacts, decide
from healer.targets.vllm.records import Canaried, Held, Look, Role

NOW = 1000.0
SOUND = Scaling(False, Phase.IDLE)


def held(slot: int, dp_rank: int | None = None) -> Held:
    return Held(slot, 0, slot if dp_rank is None else dp_rank, 10 + slot, 1, "http://x", Role.LIVE)


def rank(slot: int, *, look: dict[str, Any] | None = None, dp_rank: int | None = None, **changes: Any) -> RankFacts:
    fields = {"at": NOW, "health": True, "gate": Gate.OPEN, "scaling": SOUND} | (look or {})
    facts: dict[str, Any] = {
        "held": held(slot, dp_rank),
        "look": Look(**fields),
        "alive": True,
        "canary": Canaried(NOW, True, (1,)),
    }
    return RankFacts(**(facts | changes))


def facts(*ranks: RankFacts, **changes: Any) -> Facts:
    found: dict[str, Any] = {
        "state": State.SERVING,
        "now": NOW,
        "ranks": ranks,
        "target": tuple(r.held.slot for r in ranks),
        "lost": {},
    }
    return Facts(**(found | changes))


def sick(slot: int, since: float = NOW - 10.0) -> RankFacts:
    fault = FaultStatus(1, 1, (Engine(slot, EngineStatus.UNHEALTHY, "RuntimeError"),))
    return rank(slot, look={"fault": fault}, unhealthy_since=since)


def test_a_sound_group_is_left_alone() -> None:
    assert decide(facts(rank(0), rank(1))).do == Do.NOTHING


def test_growing_and_shrinking_name_the_slots() -> None:
    grow = decide(facts(rank(0), rank(1), target=(0, 1, 3)))
    assert (grow.do, grow.slots) == (Do.GROW, (3,))
    shrink = decide(facts(rank(0), rank(1), rank(2), target=(0, 1)))
    assert (shrink.do, shrink.slots) == (Do.SHRINK, (2,))


def test_who_leaves_is_settled_by_dp_rank_not_by_slot() -> None:
    group = (rank(0, dp_rank=0), rank(1, dp_rank=2), rank(2, dp_rank=1))
    assert decide(facts(*group, target=(0, 2))).slots == (1,)
    refused = decide(facts(*group, target=(0, 1)))
    assert refused.do == Do.NOTHING
    assert "last ranks only" in refused.why


@pytest.mark.parametrize(
    "doubt",
    [
        {"alive": False},
        {"look": {"health": None, "gate": None, "scaling": None}},
        {"look": {"at": NOW - 60.0}},
        {"look": {"gate": Gate.SCALING}},
        {"look": {"scaling": None}},
        {"look": {"health": False}},
        {"still_since": NOW - 11.0},
        {"canary": None},
        {"canary": Canaried(NOW, False, ())},
    ],
    ids=str,
)
def test_vllm_is_never_asked_to_scale_while_a_rank_is_not_known_to_be_alive(doubt: dict[str, Any]) -> None:
    for target in ((0, 1, 2, 3), (0, 1)):
        step = decide(facts(rank(0), rank(1, **doubt), rank(2), target=target))
        assert step.do == Do.NOTHING, step


def test_a_rank_that_is_lost_ends_in_a_restart_never_in_a_scaling() -> None:
    step = decide(facts(rank(0), rank(1), lost={1: "process-death"}, target=(0,)))
    assert (step.do, step.slots) == (Do.RESTART, (1,))


def three(lost: dict[int, str], *changed: RankFacts, **changes: Any) -> Facts:
    """Three ranks of a vLLM that goes on without dead ones."""
    ranks = {one.held.slot: one for one in (rank(0), rank(1), rank(2), *changed)}
    return facts(*ranks.values(), lost=lost, **({"can_remove": True, "least_ranks": 2} | changes))


def test_a_vllm_that_knows_how_to_goes_on_without_a_lost_rank() -> None:
    step = decide(three({1: "process-death"}, rank(1, alive=False)))
    assert (step.do, step.slots) == (Do.REMOVE, (1,))


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (three({1: "x"}, can_remove=False), "has no scale_down"),
        (three({1: "x"}, scaled=True), "the size has changed"),
        (three({1: "x"}, least_ranks=3), "2 ranks are left, 3 are needed"),
        (three({1: "x", 2: "x"}), "1 ranks are left, 2 are needed"),
        (three({1: "x"}, can_retry=False), "prefix caches"),
        (three({1: "x"}, rank(2, alive=False)), "slots [2] are not sound either"),
        (three({1: "x"}, rank(0, sticky=True)), "slots [0] are not sound either"),
        (three({1: "x"}, rank(0, look={"health": False})), "slots [0] are not sound either"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_removal_that_cannot_work_is_not_tried(found: Facts, told: str) -> None:
    step = decide(found)
    assert step.do == Do.RESTART
    assert told in step.why


def test_after_a_removal_the_size_changes_by_a_restart_at_a_quiet_moment_only() -> None:
    short: dict[str, Any] = {"target": (0, 1, 2), "removed": True}
    busy = facts(rank(0), rank(2), **short)
    assert decide(busy).do == Do.NOTHING
    idle, just = {"idle_since": NOW - 60.0}, {"idle_since": NOW - 59.0}
    for other in ({}, just):
        assert decide(facts(rank(0, **idle), rank(2, **other), **short)).do == Do.NOTHING, "one of them served lately"
    step = decide(facts(rank(0, **idle), rank(2, **idle), **short))
    assert (step.do, step.slots) == (Do.RESTART, (0, 1, 2))
    larger = facts(rank(0), rank(2), target=(0, 1, 2, 3), removed=True)
    assert decide(larger).do == Do.NOTHING, "a load rule asks for more just when all are served"
    smaller = facts(rank(0), rank(2), rank(3), target=(0, 2), removed=True)
    assert decide(smaller).do == Do.NOTHING, "never a scaling of vLLM's own"


HEALS: dict[str, Any] = {"in_place": ""}
"""The ranks have the plugin, and can go on by it."""


def test_ranks_with_the_plugin_go_on_in_place_whatever_vllm_itself_can_do() -> None:
    for changes in ({}, {"can_remove": False}, {"scaled": True}, {"holes": True}, {"can_retry": False}):
        step = decide(three({1: "process-death"}, rank(1, alive=False), **HEALS, **changes))
        assert (step.do, step.slots) == (Do.HEAL, (1,)), changes


def test_without_the_plugin_the_ladder_is_what_it_was() -> None:
    dead = rank(1, alive=False)
    assert decide(three({1: "x"}, dead, in_place="not loaded")).do == Do.REMOVE
    assert decide(three({1: "x"}, dead, in_place="not loaded", can_remove=False)).do == Do.RESTART
    step = decide(three({1: "x"}, dead, in_place="rank 2 has lost a worker", holes=True))
    assert step.do == Do.RESTART, "the pull request's instruction knows of no empty places"


def test_a_second_dead_rank_is_waited_for_a_moment_until_the_policy_has_given_it_up() -> None:
    both = (rank(1, alive=False), rank(2, alive=False))
    assert decide(three({1: "x"}, *both, **HEALS, lost_since=NOW - 1.0)).do == Do.NOTHING
    assert decide(three({1: "x"}, *both, **HEALS, lost_since=NOW - 6.0)).do == Do.RESTART
    step = decide(three({1: "x", 2: "x"}, *both, **HEALS))
    assert (step.do, step.slots) == (Do.HEAL, (1, 2))


def test_a_fault_costs_no_request_where_the_plugin_is_whoever_met_it() -> None:
    for group in ((sick(0), sick(1)), (sick(0, NOW), rank(1))):
        step = decide(facts(*group, **HEALS))
        assert (step.do, step.slots) == (Do.HEAL, ())
        assert decide(facts(sick(0, NOW - 46.0), rank(1), **HEALS, retries=1)).do == Do.RESTART, "once"
    assert decide(facts(sick(0), rank(1, alive=False), **HEALS)).do == Do.NOTHING


def test_vllms_own_retry_is_never_sent_after_an_order_of_the_plugin() -> None:
    step = decide(facts(sick(0), sick(1), ordered=True))
    assert step.do == Do.RESTART
    assert "after an order" in step.why


def test_an_empty_place_is_filled_one_after_another_and_nothing_else_changes_the_size() -> None:
    short: dict[str, Any] = {"holes": True, "in_place": "not asked"}
    step = decide(facts(rank(0), rank(3), target=(0, 1, 2, 3), **short))
    assert (step.do, step.slots) == (Do.FILL, (1,))
    smaller = decide(facts(rank(0), rank(2), target=(0,), **short))
    assert smaller.do == Do.NOTHING
    assert "cannot leave" in smaller.why
    assert decide(facts(rank(0), rank(2), **short)).do == Do.NOTHING, "nobody wants it back"
    for doubt in ({"alive": False}, {"look": {"health": None, "gate": None, "scaling": None}}, {"canary": None}):
        assert decide(facts(rank(0), rank(2, **doubt), target=(0, 1, 2), **short)).do == Do.NOTHING
    assert decide(facts(rank(0), rank(2), target=(0, 1, 2), not_before=NOW + 1.0, **short)).do == Do.NOTHING


def test_a_fault_that_every_engine_met_is_retried_once() -> None:
    group = (sick(0), sick(1))
    assert decide(facts(*group)).do == Do.RETRY
    for changes in ({"scaled": True}, {"retries": 1}, {"can_retry": False}):
        assert decide(facts(*group, **changes)).do == Do.RESTART


def test_a_fault_that_one_engine_met_waits_for_the_others_and_then_ends_in_a_restart() -> None:
    assert decide(facts(sick(0, NOW - 1.0), rank(1))).do == Do.NOTHING
    assert decide(facts(sick(0, NOW - 31.0), rank(1))).do == Do.NOTHING, "the other one waits for NIXL EP's timeout yet"
    step = decide(facts(sick(0, NOW - 46.0), rank(1)))
    assert (step.do, step.slots) == (Do.RESTART, (0,))


def test_a_retry_is_not_tried_with_a_dead_rank_in_the_group() -> None:
    assert decide(facts(sick(0), rank(1, alive=False))).do == Do.NOTHING


@pytest.mark.parametrize(
    "trouble",
    [
        {"look": {"scaling": Scaling(False, Phase.FAILED, "e1", "drains")}},
        {"shut_since": NOW - 121.0},
        {"wrong": 2},
        {"eplb_stopped": True},
    ],
    ids=str,
)
def test_what_vllm_never_recovers_from_ends_in_a_restart(trouble: dict[str, Any]) -> None:
    step = decide(facts(rank(0), rank(1, **trouble), epoch="e1"))
    assert (step.do, step.slots) == (Do.RESTART, (1,))


def test_a_balancer_that_healing_in_place_has_ended_is_no_trouble() -> None:
    stopped = rank(1, eplb_stopped=True)
    assert decide(facts(rank(0), stopped, ordered=True, unbalanced=True)).do == Do.NOTHING
    assert decide(facts(rank(0), stopped, ordered=True)).do == Do.RESTART, "a refill has started it anew"


def test_a_standstill_of_all_counts_only_when_it_is_of_all_and_long() -> None:
    still, moving = {"still_since": NOW - 61.0}, {}
    assert decide(facts(rank(0, **still), rank(1, **still))).do == Do.RESTART
    assert decide(facts(rank(0, **still), rank(1, **moving))).do == Do.NOTHING
    assert decide(facts(rank(0, **still), rank(1, still_since=NOW - 30.0))).do == Do.NOTHING


@pytest.mark.parametrize(
    "look",
    [
        {"gate": Gate.RETIRED},
        {"scaling": Scaling(True, Phase.PREPARING, "other", None, 4)},
        {"scaling": Scaling(False, Phase.COMPLETED, "other", None, 4)},
        {"scaling": Scaling(True, Phase.COMMITTING)},
    ],
    ids=str,
)
def test_a_scaling_that_healer_did_not_ask_for_makes_it_stand_still(look: dict[str, Any]) -> None:
    assert decide(facts(rank(0), rank(1, look=look), epoch="mine")).do == Do.YIELD


def test_healers_own_last_scaling_is_nobody_elses() -> None:
    mine = {"scaling": Scaling(False, Phase.COMPLETED, "mine", None, 2)}
    assert decide(facts(rank(0, look=mine), rank(1, look=mine), epoch="mine")).do == Do.NOTHING


def test_after_a_failed_start_what_can_be_started_is_and_not_at_once() -> None:
    down = {"state": State.DOWN, "target": (0, 1, 2)}
    assert decide(facts(**down, not_before=NOW + 1.0)).do == Do.NOTHING
    step = decide(facts(**down, unstartable=frozenset({1})))
    assert (step.do, step.slots) == (Do.START, (0, 2))
    assert decide(facts(**down, unstartable=frozenset({0, 1}))).do == Do.NOTHING


@given(
    st.sampled_from(sorted(State)),
    st.lists(st.sampled_from(["sound", "sick", "dead", "silent", "shut"]), min_size=1, max_size=4),
    st.sets(st.integers(0, 5), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_no_facts_lead_to_a_scaling_of_an_unsound_group(
    state: State, kinds: list[str], target: set[int], scaled: bool, holes: bool
) -> None:
    make = {
        "sound": rank,
        "sick": sick,
        "dead": lambda s: rank(s, alive=False),
        "silent": lambda s: rank(s, look={"health": None, "gate": None, "scaling": None}),
        "shut": lambda s: rank(s, look={"gate": Gate.SCALING}),
    }
    group = [make[kind](slot) for slot, kind in enumerate(kinds)]
    step = decide(facts(*group, state=state, target=tuple(sorted(target)), scaled=scaled, holes=holes))
    assert not (holes and step.do in (Do.GROW, Do.SHRINK)), "vLLM refuses it"
    if step.do in (Do.GROW, Do.SHRINK, Do.FILL):
        assert state == State.SERVING
        assert set(kinds) == {"sound"}
    if state in ACTS_NEVER:
        assert step.do == Do.NOTHING


def test_every_state_can_be_closed_and_none_is_a_trap_but_those_that_never_act() -> None:
    for state in State:
        assert (state, Trigger.CLOSE) in TRANSITIONS
        leads = [trigger for (start, trigger) in TRANSITIONS if start == state and trigger != Trigger.CLOSE]
        assert bool(leads) != (state in ACTS_NEVER)


def test_a_change_that_the_table_does_not_have_is_refused() -> None:
    for state, trigger in itertools.product(State, Trigger):
        machine = Machine()
        machine.state = state
        if (state, trigger) in TRANSITIONS:
            machine.move(trigger, "x")
            assert machine.state == TRANSITIONS[state, trigger]
        else:
            with pytest.raises(ValueError, match=str(trigger)):
                machine.move(trigger, "x")
