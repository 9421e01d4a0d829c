"""Golden decisions: what a policy does, or does not, in small situations; each with its reason."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healer.diagnosis import Cause, Confidence, Health, Verdict
from healer.policy.decide import Decision, FailedRefill, Reason, State, Step, decide
from healer.policy.load import parse_policy
from healer.policy.schema import Policy
from tests.healer.support import POLICY, rank


def policy(rules: str = "[{name: all, actions: [replace, scale-down, human]}]", more: str = "") -> Policy:
    text = f"{POLICY}  healing: {{rules: {rules}}}\n{more}"
    return parse_policy(text, name="p.yaml", base=Path("/base"))


def verdict(slot: int, health: Health = Health.HEALTHY, cause: Cause = Cause.NONE) -> Verdict:
    return Verdict(
        subject=rank(slot),
        health=health,
        cause=cause,
        confidence=Confidence.NONE,
        evidence=(),
        since=0.0,
        sentence=f"rank {slot}.0 is {health}",
    )


def dead(slot: int, cause: Cause = Cause.PROCESS_DEATH) -> Verdict:
    return verdict(slot, Health.UNHEALTHY, cause)


def state(
    slots: tuple[int, ...] = (0, 1, 2, 3), *, failed: dict[int, FailedRefill] | None = None, target: int = 4
) -> State:
    return State(live=tuple(rank(s) for s in slots), target=tuple(range(target)), sequence="", failed=failed or {})


def failed(rule: str = "all", attempts: int = 1, *, asked: bool = False) -> FailedRefill:
    return FailedRefill(rule=rule, attempts=attempts, failed_at=100.0, asked=asked, why="exit code 1")


def one(decisions: tuple[Decision, ...]) -> tuple[Step, Reason, tuple[int, ...]]:
    (decision,) = decisions
    return decision.step, decision.reason, decision.slots


ALL = tuple(verdict(s) for s in range(4))


def test_a_healthy_group_is_left_alone_and_says_so() -> None:
    (decision,) = decide(policy(), ALL, state(), 0.0)
    assert (decision.step, decision.reason) == (Step.NONE, Reason.ALL_HEALTHY)
    assert decision.sentence == "did nothing: all 4 ranks are healthy"


def test_a_dead_rank_is_replaced() -> None:
    (decision,) = decide(policy(), (*ALL[:3], dead(3)), state(), 0.0)
    assert (decision.step, decision.reason, decision.slots) == (Step.REPLACE, Reason.RULE_MATCHED, (3,))
    assert decision.sentence == "replaces slot 3 (rule all): rank 3.0 is unhealthy"
    assert decision.acts


def test_ranks_that_die_together_are_replaced_together() -> None:
    assert one(decide(policy(), (dead(0), dead(2)), state(), 0.0)) == (Step.REPLACE, Reason.RULE_MATCHED, (0, 2))


def test_the_first_rule_that_matches_wins() -> None:
    rules = "[{name: hung, match: {cause: [stopped, hang]}, actions: [human]}, {name: all, actions: [scale-down]}]"
    assert one(decide(policy(rules), (dead(1, Cause.HANG),), state(), 0.0)) == (
        Step.HUMAN,
        Reason.RULE_SAYS_HUMAN,
        (1,),
    )
    assert one(decide(policy(rules), (dead(1),), state(), 0.0)) == (Step.SCALE_DOWN, Reason.RULE_MATCHED, (1,))


def test_a_cause_without_a_rule_is_left_to_a_human() -> None:
    rules = "[{name: dead, match: {cause: [process-death]}, actions: [replace]}]"
    (decision,) = decide(policy(rules), (dead(1, Cause.SILENT),), state(), 0.0)
    assert (decision.step, decision.reason) == (Step.HUMAN, Reason.NO_RULE)
    assert not decision.acts


def test_a_rank_that_was_not_heard_yet_is_waited_for() -> None:
    (decision,) = decide(policy(), (*ALL[:3], verdict(3, Health.UNKNOWN, Cause.UNHEARD)), state(), 0.0)
    assert (decision.step, decision.reason) == (Step.NONE, Reason.IN_PROGRESS)
    assert decision.sentence == "did nothing: 3 of 4 ranks are live and healthy"


def test_unknown_is_never_acted_upon() -> None:
    doubt = verdict(1, Health.UNKNOWN, Cause.SUSPECTED)
    assert one(decide(policy(), (*ALL[:1], doubt), state(), 0.0)) == (Step.NONE, Reason.SUSPICION, (1,))
    lost = tuple(verdict(s, Health.UNKNOWN, Cause.TELEMETRY_LOST) for s in range(4))
    assert one(decide(policy(), lost, state(), 0.0))[:2] == (Step.NONE, Reason.TELEMETRY_LOST)


def test_scaling_down_never_goes_below_the_bound_and_the_survivors_are_released_all_the_same() -> None:
    bounded = policy("[{name: shrink, actions: [scale-down]}]", "  bounds: {minRanks: 3}\n")
    assert one(decide(bounded, (dead(3),), state(), 0.0)) == (Step.SCALE_DOWN, Reason.RULE_MATCHED, (3,))
    (decision,) = decide(bounded, (dead(2), dead(3)), state(), 0.0)
    assert (decision.step, decision.reason) == (Step.REPLACE, Reason.BELOW_MIN_RANKS)
    assert "2 ranks are below bounds.minRanks 3" in decision.sentence


def test_a_dry_run_never_acts_and_says_what_it_would_have_done() -> None:
    (decision,) = decide(policy(more="  dryRun: true\n"), (dead(3),), state(), 0.0)
    assert not decision.acts
    assert decision.sentence == "did nothing, dry run; without it: replaces slot 3 (rule all): rank 3.0 is unhealthy"


@pytest.mark.parametrize(
    ("attempts", "now", "step", "reason"),
    [
        (1, 104.9, Step.NONE, Reason.BACKOFF),
        (1, 105.0, Step.REFILL, Reason.REPLACEMENT_FAILED),
        (2, 109.9, Step.NONE, Reason.BACKOFF),
        (2, 110.0, Step.REFILL, Reason.REPLACEMENT_FAILED),
        (3, 100.0, Step.GIVE_UP, Reason.ATTEMPTS_EXHAUSTED),
    ],
)
def test_a_replacement_that_fails_is_tried_again_ever_later_and_then_given_up(
    attempts: int, now: float, step: Step, reason: Reason
) -> None:
    found = decide(policy(), ALL[:3], state((0, 1, 2), failed={3: failed(attempts=attempts)}), now)
    assert one(found) == (step, reason, (3,))


def test_a_slot_is_not_given_up_where_that_would_shrink_the_group_below_its_bound() -> None:
    bounded = policy(more="  bounds: {minRanks: 4}\n")
    found = decide(bounded, ALL[:3], state((0, 1, 2), failed={3: failed(attempts=3)}), 999.0)
    assert one(found) == (Step.HUMAN, Reason.BELOW_MIN_RANKS, (3,))


def test_a_replacement_under_way_is_not_asked_for_twice() -> None:
    found = decide(policy(), ALL[:3], state((0, 1, 2), failed={3: failed(asked=True)}), 999.0)
    assert one(found)[:2] == (Step.NONE, Reason.IN_PROGRESS)


def test_a_rank_of_a_planned_scale_up_that_does_not_start_is_a_humans() -> None:
    found = decide(policy(), ALL, state(failed={4: failed(rule="")}, target=5), 999.0)
    assert one(found) == (Step.HUMAN, Reason.BOOT_FAILED, (4,))


def test_a_death_is_acted_upon_although_another_slot_waits_for_its_replacement() -> None:
    found = decide(policy(), (*ALL[:2], dead(2)), state((0, 1, 2), failed={3: failed()}), 100.0)
    assert [(d.step, d.slots) for d in found] == [(Step.REPLACE, (2,)), (Step.NONE, (3,))]


_HEALTHS = st.sampled_from(
    [(Health.HEALTHY, Cause.NONE), (Health.UNKNOWN, Cause.SUSPECTED), (Health.UNKNOWN, Cause.UNHEARD)]
)


@given(
    st.lists(st.one_of(_HEALTHS, st.just((Health.UNHEALTHY, Cause.HANG))), min_size=1, max_size=6),
    st.sampled_from(["[replace]", "[scale-down]", "[scale-down, replace]", "[human]", "[scale-down, human]"]),
    st.booleans(),
)
def test_no_rank_is_acted_upon_unless_it_is_unhealthy_and_a_dry_run_never_acts(
    healths: list[tuple[Health, Cause]], actions: str, dry: bool
) -> None:
    rules = f"[{{name: all, actions: {actions}}}]"
    found = decide(
        policy(rules, f"  dryRun: {str(dry).lower()}\n"),
        [verdict(slot, health, cause) for slot, (health, cause) in enumerate(healths)],
        state(tuple(range(len(healths))), target=len(healths)),
        0.0,
    )
    sick = {slot for slot, (health, _) in enumerate(healths) if health == Health.UNHEALTHY}
    acted = [slot for d in found if d.acts for slot in d.slots]
    assert set(acted) <= sick
    assert len(acted) == len(set(acted))
    assert not (dry and acted)
    assert found, "there is always a sentence"
    assert all(d.sentence for d in found)
