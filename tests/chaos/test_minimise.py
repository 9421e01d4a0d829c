"""The least list of faults that still fails."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.minimise import concrete, ddmin
from chaos.random_faults import FAULTS, OWN_FAULTS, drawn
from chaos.records import Fault
from chaos.runner import NO_STATE
from chaos.scenario import Scenario
from elastic.view import Member


@pytest.mark.parametrize("guilty", [{0}, {7}, {2, 5}, {0, 1, 9}, {3, 4, 5, 6}])
async def test_only_the_faults_that_are_needed_are_left(guilty: set[int]) -> None:
    async def fails(part: Sequence[int]) -> bool:
        return guilty <= set(part)

    assert await ddmin(range(10), fails, trials=500) == sorted(guilty)


async def test_it_ends_when_its_trials_are_used_up_with_a_list_that_fails() -> None:
    tried: list[tuple[int, ...]] = []

    async def fails(part: Sequence[int]) -> bool:
        tried.append(tuple(part))
        return {1, 14} <= set(part)

    found = await ddmin(range(16), fails, trials=5)
    assert len(tried) == 5
    assert {1, 14} <= set(found)


def _fault(id_: str, slot: int) -> Fault:
    member = Member(slot=slot, incarnation=1, pid=1, pid_start=1, address="")
    return Fault(
        id=id_,
        kind="kill",
        family="process",
        parameters={},
        trigger="",
        state=NO_STATE,
        members=(member,),
        at=1.0,
        done_at=1.0,
        undo="",
        must_be_replaced=True,
    )


def test_a_part_of_a_random_run_hurts_the_ranks_that_the_whole_had_hurt() -> None:
    scenario = Scenario.model_validate(
        {
            "apiVersion": "healer-chaos/v1",
            "kind": "Scenario",
            "metadata": {"name": "x", "fear": "something terrible"},
            "spec": {"faults": [{"kind": "kill", "random": 1, "at": "1500ms"}, {"kind": "daemon-kill", "at": "2s"}]},
        }
    )
    same, data = concrete(scenario, [_fault("f1", 3)])
    assert same.spec.faults[0].slots == (3,)
    assert same.spec.faults[0].at_s == 1.5
    assert Scenario.model_validate(data) == same, "what is written beside the record can be read again"


@given(seed=st.integers(0, 2**32), number=st.integers(1, 10_000), faults=st.integers(1, 8))
def test_whatever_is_drawn_is_a_scenario_and_the_same_for_the_same_seed(seed: int, number: int, faults: int) -> None:
    scenario, text = drawn(seed, number, faults)
    assert len(scenario.spec.faults) >= faults
    assert drawn(seed, number, faults) == (scenario, text)


def test_every_case_is_drawn_in_a_campaign_of_500_faults() -> None:
    kinds = {f.kind for number in range(1, 101) for f in drawn(1, number, 5)[0].spec.faults}
    assert kinds >= {"kill", "stop", "terminate", "stuck", "slow", "daemon-kill", "daemon-stop", "disk-slow"}
    assert len(FAULTS.cases) == 12


def test_a_rank_that_boots_may_refuse_an_error_of_a_kernel() -> None:
    for number in range(1, 31):
        spec = drawn(3, number, 5, "gpus")[0].spec
        assert spec.expect.refused_faults >= sum(fault.kind in OWN_FAULTS for fault in spec.faults)


def test_a_campaign_on_gpus_has_errors_of_kernels_and_nothing_that_only_a_cpu_group_can_have() -> None:
    scenarios = [drawn(3, number, 5, "gpus")[0] for number in range(1, 31)]
    assert {one.spec.group.ep_backend for one in scenarios} == {"nixl-ep"}
    kinds = {fault.kind for one in scenarios for fault in one.spec.faults}
    assert {"kill", "stop", "illegal-address", "misaligned-address", "device-assert", "context-freed"} <= kinds
    assert not kinds & {"slow", "disk-slow", "stuck"}


def test_an_honest_campaign_hurts_nobody_and_expects_that_nobody_is_touched() -> None:
    scenarios = [drawn(3, number, 20, "honest")[0] for number in range(1, 31)]
    faults = [fault for one in scenarios for fault in one.spec.faults]
    assert {"burst", "stop", "slow", "throttle", "nvml", "clock-jump", "disk-slow", "kernel-line"} == {
        f.kind for f in faults
    }
    assert all(f.duration_s and not f.is_fault for f in faults if f.kind in ("stop", "nvml"))
    assert not {f.kind for f in faults} & {*OWN_FAULTS, "kill", "terminate", "stuck"}
    assert all(one.spec.expect.no_action and one.spec.expect.kept == (0, 1, 2, 3) for one in scenarios)
