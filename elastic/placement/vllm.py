"""Adapters to vLLM's expert maps and its load balancer's interface; importable without vLLM.

vLLM 0.33 keeps three arrays per model: physical to logical [layers, capacity], padded with -1; logical to physical
[layers, experts, most replicas], physical slots ascending, padded with -1; and the replica count [layers, experts].
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from elastic.errors import ElasticError
from elastic.placement.maps import HOLE
from elastic.placement.problem import Goals, Ints, System, problem
from elastic.placement.solver import solve

if TYPE_CHECKING:
    from torch import Tensor

Longs = npt.NDArray[np.int64]


def physical_to_logical(rows: Ints, capacity: int | None = None) -> Longs:
    """vLLM's physical map of a placement, padded with -1 to `capacity` slots; [layers, capacity].

    Raises ElasticError where the map is wider than the capacity.
    """
    width = rows.shape[1] if capacity is None else capacity
    if width < rows.shape[1]:
        raise ElasticError(f"vLLM map: {rows.shape[1]} physical slots do not fit the capacity of {width}")
    padded = np.full((len(rows), width), HOLE, dtype=np.int64)
    padded[:, : rows.shape[1]] = rows
    return padded


def logical_maps(rows: npt.NDArray[Any], experts: int, most_replicas: int | None = None) -> tuple[Longs, Longs]:
    """Logical to physical [layers, experts, most replicas] and replica counts [layers, experts], as vLLM derives them.

    `most_replicas` is the width that vLLM's own buffer has (1024 in 0.33); by default the largest count. Raises ElasticError
    where an expert has more replicas.
    """
    layers = len(rows)
    layer, physical = np.nonzero(rows != HOLE)
    expert = rows[layer, physical]
    key = layer * experts + expert
    counts = np.bincount(key, minlength=layers * experts).astype(np.int64)
    width = int(counts.max(initial=0)) if most_replicas is None else most_replicas
    if counts.max(initial=0) > width:
        raise ElasticError(f"vLLM map: an expert has {counts.max()} replicas, the buffer has room for {width}")
    order = np.argsort(key, kind="stable")
    starts = np.cumsum(counts) - counts
    replica = np.arange(len(key)) - starts[key[order]]
    placed = np.full((layers * experts, width), HOLE, dtype=np.int64)
    placed[key[order], replica] = physical[order]
    return placed.reshape(layers, experts, width), counts.reshape(layers, experts)


class FewMovesEplbPolicy:
    """An EPLB policy with the signature of vLLM 0.32 and 0.33 (`AbstractEplbPolicy`) that starts from the old map.

    To use it, put it into `vllm.distributed.eplb.policy.EPLB_POLICIES` under "default" before the engine starts, in every
    worker. It is a class of class methods, as vLLM's own; `goals` may be set on a subclass.
    """

    goals = Goals(fill_holes=True)
    """vLLM's maps have no holes."""

    @classmethod
    def rebalance_experts(
        cls,
        weight: "Tensor",
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: "Tensor | None" = None,
    ) -> "Tensor":
        """The new physical to logical map [layers, num_replicas], int64, on the CPU.

        `weight` is the load [layers, experts]. `num_groups` is not looked at: placement is global. Of the old map, ranks of
        -1 alone are new, and ranks beyond `num_ranks` leave. Raises ElasticError for sizes that do not divide, and
        Infeasible where the ranks cannot hold every expert.
        """
        import torch

        load = weight.double().cpu().numpy()
        old = None if old_global_expert_indices is None else old_global_expert_indices.cpu().numpy()
        return torch.from_numpy(cls.place(load, num_replicas, num_nodes, num_ranks, old))

    @classmethod
    def place(
        cls,
        load: npt.NDArray[np.float64],
        num_replicas: int,
        num_nodes: int,
        num_ranks: int,
        old: npt.NDArray[Any] | None = None,
    ) -> Longs:
        """The same with arrays of numpy."""
        if num_ranks < 1 or num_replicas % num_ranks:
            raise ElasticError(f"vLLM policy: {num_replicas} replicas do not divide over {num_ranks} ranks")
        slots = num_replicas // num_ranks
        if old is not None and old.shape[1] % slots:
            raise ElasticError(f"vLLM policy: an old map of {old.shape[1]} slots does not divide into ranks of {slots}")
        ranks = num_ranks if old is None else max(num_ranks, old.shape[1] // slots)
        per_host = max(1, num_ranks // max(1, num_nodes))
        system = System.uniform(ranks, slots, ranks_per_host=per_host)
        current = None if old is None else physical_to_logical(old, ranks * slots)
        present = None
        if current is not None:
            held = (current != HOLE).any(axis=0).reshape(ranks, slots).any(axis=1)
            present = np.flatnonzero(held).tolist()
        goals = cls.goals
        asked = problem(system, load, live=range(num_ranks), current=current, present=present, goals=goals)
        return _without_holes(physical_to_logical(solve(asked).target[:, :num_replicas]), load)


def _without_holes(rows: Longs, load: npt.NDArray[np.float64]) -> Longs:
    """vLLM's maps have no holes: what cannot be filled without a duplicate on its rank repeats the most loaded expert."""
    return np.where(rows == HOLE, load.argmax(axis=1)[:, None], rows)
