"""Which slots must prove themselves, and what one fault too many costs them."""

from pathlib import Path

import pytest

from healer.diagnosis import Cause, Confidence, Health, Verdict
from healer.evidence import GpuRef
from healer.policy.load import parse_policy
from healer.policy.memory import Memory, Quarantine, QuarantineOver, remember
from healer.policy.probation import on_hold, suspects
from healer.policy.schema import Policy
from tests.healer.stage import gpu
from tests.healer.support import POLICY

MORE = "  healing: {probation: {repeated: 2, holdDown: 1m}}\n  bounds: {faultBudget: {failures: 5, window: 1h, quarantine: 1h}}\n"


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return parse_policy(POLICY + MORE, name="p", base=tmp_path)


def gpu_verdict(of: GpuRef, health: Health) -> Verdict:
    return Verdict(
        subject=of, health=health, cause=Cause.NONE, confidence=Confidence.NONE, evidence=(), since=0.0, sentence=""
    )


def test_a_slot_without_a_history_is_trusted_and_one_with_it_is_not(policy: Policy) -> None:
    memory = Memory(
        faults={1: (10.0,), 2: (10.0, 50.0), 3: (-4000.0, 10.0)},
        quarantined={4: Quarantine(0.0, 500.0, "by hand")},
        returning=frozenset({5}),
    )
    assert suspects(policy, memory, {}, (), 100.0) == {2, 4, 5}


def test_a_slot_whose_gpu_is_not_known_to_be_well_must_prove_it(policy: Policy) -> None:
    gpus = {0: gpu(0), 1: gpu(1)}
    verdicts = [gpu_verdict(gpu(0), Health.HEALTHY), gpu_verdict(gpu(1), Health.UNKNOWN)]
    assert suspects(policy, Memory(), gpus, verdicts, 100.0) == {1}


def test_the_hold_down_begins_when_time_ends_a_quarantine_and_not_when_somebody_who_has_looked_does(
    policy: Policy,
) -> None:
    held = Memory(quarantined={3: Quarantine(0.0, 100.0, "", removed=True)})
    by_time, by_hand = remember(held, QuarantineOver(3, "", 100.0)), remember(held, QuarantineOver(3, "alice", 100.0))
    assert on_hold(policy, by_time, 3, 130.0)
    assert not on_hold(policy, by_time, 3, 161.0)
    assert not on_hold(policy, by_hand, 3, 101.0)
    assert 3 in suspects(policy, by_time, {}, (), 130.0)


def test_a_policy_without_the_check_asks_nobody(tmp_path: Path) -> None:
    off = parse_policy(POLICY + "  healing: {probation: {check: false}}\n", name="p", base=tmp_path)
    assert suspects(off, Memory(quarantined={4: Quarantine(0.0, 500.0, "")}), {}, (), 1.0) == frozenset()
