"""Maps that leave the package and come in: vLLM's arrays, its policy interface, the JSON object."""

import subprocess
import sys

import numpy as np
import pytest

from elastic.errors import ElasticError
from elastic.placement.export import export, from_placement, read, rows_of, to_placement, write
from elastic.placement.maps import HOLE
from elastic.placement.problem import Ints, System, problem
from elastic.placement.solver import solve
from elastic.placement.validate import check_rows
from elastic.placement.vllm import FewMovesEplbPolicy, logical_maps, physical_to_logical

SYSTEM = System.uniform(4, 5)
LOAD = np.random.default_rng(0).lognormal(0, 1, size=(3, 12))


@pytest.fixture(scope="module")
def placed() -> Ints:
    return solve(problem(SYSTEM, LOAD, live=range(4))).target


def test_the_daemon_can_import_the_package_without_numpy() -> None:
    blocked = "import sys; sys.modules['numpy'] = None; sys.modules['numba'] = None; import elastic.placement"
    subprocess.run([sys.executable, "-c", blocked], check=True, timeout=60)


def test_vllm_arrays_of_a_small_map_are_laid_out_as_vllm_does() -> None:
    rows = np.array([[0, 2, 1, 0, HOLE, 2]], dtype=np.int32)
    assert physical_to_logical(rows, 8).tolist() == [[0, 2, 1, 0, -1, 2, -1, -1]]
    placed, counts = logical_maps(rows, 3)
    assert placed.tolist() == [[[0, 3], [2, -1], [1, 5]]]
    assert counts.tolist() == [[2, 1, 2]]
    wide, _ = logical_maps(rows, 3, 4)
    assert wide[0, 0].tolist() == [0, 3, -1, -1]


def test_a_map_that_vllm_buffers_cannot_hold_is_refused() -> None:
    rows = np.array([[0, 0, 1]], dtype=np.int32)
    with pytest.raises(ElasticError, match="3 physical slots do not fit the capacity of 2"):
        physical_to_logical(rows, 2)
    with pytest.raises(ElasticError, match="2 replicas, the buffer has room for 1"):
        logical_maps(rows, 2, 1)


def test_the_policy_moves_little_when_a_rank_leaves_or_joins(placed: Ints) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.from_numpy(LOAD)
    grown = torch.full((3, 25), -1, dtype=torch.int64)
    grown[:, :20] = torch.from_numpy(placed)
    new = FewMovesEplbPolicy.rebalance_experts(weight, 25, 1, 1, 5, grown)
    assert new.dtype == torch.int64
    assert new.shape == (3, 25)
    check_rows(new.numpy(), (5,) * 5, 12, live=range(5))
    assert int((new[:, :20] != grown[:, :20]).sum()) <= 12
    shrunk = FewMovesEplbPolicy.rebalance_experts(weight, 15, 1, 1, 3, torch.from_numpy(placed))
    check_rows(shrunk.numpy(), (5,) * 3, 12, live=range(3))
    fresh = FewMovesEplbPolicy.rebalance_experts(weight, 20, 1, 1, 4)
    assert (fresh.numpy() == placed).all()


def test_the_policy_refuses_sizes_that_do_not_divide() -> None:
    with pytest.raises(ElasticError, match="21 replicas do not divide over 4 ranks"):
        FewMovesEplbPolicy.place(LOAD, 21, 1, 4)
    with pytest.raises(ElasticError, match="an old map of 7 slots does not divide into ranks of 5"):
        FewMovesEplbPolicy.place(LOAD, 20, 1, 4, np.zeros((3, 7), dtype=np.int64))


def test_the_policy_leaves_no_hole_where_slots_outnumber_what_ranks_can_hold() -> None:
    assert (FewMovesEplbPolicy.place(LOAD[:, :3], 8, 1, 2) >= 0).all()


@pytest.mark.vllm
def test_vllm_derives_the_same_arrays_and_takes_the_policy(placed: Ints) -> None:
    state = pytest.importorskip("vllm.distributed.eplb.eplb_state")
    abstract = pytest.importorskip("vllm.distributed.eplb.policy.abstract")
    torch = pytest.importorskip("torch")
    ours, counts = logical_maps(placed, 12)
    theirs, their_counts = state.compute_logical_maps(torch.from_numpy(physical_to_logical(placed)), 12)
    assert (theirs.numpy() == ours).all()
    assert (their_counts.numpy() == counts).all()

    import inspect

    wanted = inspect.signature(abstract.AbstractEplbPolicy.rebalance_experts)
    assert list(inspect.signature(FewMovesEplbPolicy.rebalance_experts).parameters) == list(wanted.parameters)


def test_an_exported_map_comes_back_as_it_was(placed: Ints) -> None:
    made = export(SYSTEM, 12, placed, range(4))
    again = read(write(made))
    assert again == made
    assert (rows_of(again) == placed).all()
    assert (from_placement(to_placement(SYSTEM, 12, placed)) == placed).all()


def test_the_hash_of_a_map_never_changes_between_processes() -> None:
    rows = np.array([[0, 1, 1, 2]], dtype=np.int32)
    assert export(System.uniform(2, 2), 3, rows, [0, 1]).hash == "e980b6a6fbf34e78"
    other = np.array([[1, 0, 1, 2]], dtype=np.int32)
    assert export(System.uniform(2, 2), 3, other, [0, 1]).hash != "e980b6a6fbf34e78"


def test_a_changed_or_broken_object_is_refused(placed: Ints) -> None:
    written = write(export(SYSTEM, 12, placed, range(4)))
    with pytest.raises(ElasticError, match="does not fit the content"):
        read(written.replace(b'"experts":12', b'"experts":13'))
    with pytest.raises(ElasticError, match="placement object"):
        read(b"{}")
    with pytest.raises(ElasticError, match="placement object"):
        read(b"not json")
