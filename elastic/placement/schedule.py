"""Batches of a solution's steps, in which no rank and no host is busier than it has to be."""

from dataclasses import dataclass

import numpy as np

from elastic.errors import ElasticError
from elastic.placement.kernels.batches import assign_batches
from elastic.placement.problem import Ints
from elastic.placement.solution import Solution
from elastic.placement.solver import frame_of


@dataclass(frozen=True, eq=False)
class Schedule:
    """Batches are made in order; the steps of one batch in any order or at once, an exchange as a whole."""

    solution: Solution
    batch: Ints
    """The batch of each step; [steps]."""
    count: int

    def steps_of(self, batch: int) -> list[int]:
        """The steps of one batch."""
        return np.flatnonzero(self.batch == batch).tolist()


def schedule(solution: Solution, *, rank_experts: int = 8, host_experts: int | None = None) -> Schedule:
    """Batches in which a rank sends at most `rank_experts` and receives as many, and a host reads at most `host_experts`
    from its tier or disk (by default `rank_experts` for each of its ranks). Coverage ends before anything else begins.

    Raises ElasticError where a limit is below one.
    """
    system = solution.problem.system
    per_host = max(np.unique(system.hosts, return_counts=True)[1])
    tier = rank_experts * int(per_host) if host_experts is None else host_experts
    if rank_experts < 1 or tier < 1:
        raise ElasticError(f"placement schedule: {rank_experts} experts per rank and {tier} per host; at least one each")
    batch = np.empty(len(solution), dtype=np.int32)
    count = assign_batches(
        frame_of(solution.problem),
        solution.problem.experts,
        solution.problem.layers,
        solution.start,
        solution.steps,
        solution.sources,
        rank_experts,
        tier,
        batch,
    )
    return Schedule(solution, batch, count)
