"""What the solver answers: an ordered list of steps, of which any prefix from full coverage on is a valid map."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from elastic.errors import ElasticError
from elastic.placement.maps import HOLE, Move
from elastic.placement.problem import Floats, Ints, Problem
from elastic.placement.validate import duplicates


class Kind(IntEnum):
    """Why a step is made."""

    COVER = 0
    """An expert that no live rank holds."""
    FILL = 1
    """A replica in a hole."""
    BALANCE = 2
    """Relief of a busy rank: a replica over another, or an exchange."""
    PROTECT = 3
    """A second copy in place of a third."""


@dataclass(frozen=True, eq=False)
class Solution:
    """Steps in the order in which they should be made. Stop after any of them that is not before `coverage`.

    A step is one move, or an exchange: two moves between which nothing may read the slots. Steps of one layer that name a
    common expert (arriving or overwritten) keep their order; all others may be made in any order or at once, coverage
    first. `elastic.placement.schedule` makes batches of them.
    """

    problem: Problem
    steps: Ints
    """[steps, 6]: Kind, layer, physical slot, expert, and for an exchange the other slot and expert, else -1."""
    sources: Ints
    """[steps, 2]: physical slot that each move of a step reads, HOLE where no rank holds the expert: the host-memory
    tier, else the checkpoint."""
    busiest_before: Floats
    """Load of the busiest rank in mean rank loads before the first step; [layers]."""
    busiest_after: Floats
    """The same after each step, in its layer; [steps]."""
    bounds: Floats
    """A lower bound of the busiest rank's load, in units of the load; [layers]. NaN in a plan of coverage alone."""

    @cached_property
    def coverage(self) -> int:
        """The number of leading steps after which every expert has a live copy."""
        return int((self.steps[:, 0] == Kind.COVER).sum())

    @cached_property
    def start(self) -> Ints:
        """The map before the first step: the ranks that stay, without useless second copies; [layers, slots]."""
        problem = self.problem
        staying = np.isin(problem.system.owner, sorted(set(problem.present) & set(problem.live)))
        rows = np.where(staying, problem.current, np.int32(HOLE))
        return np.where(duplicates(rows, problem.system.slots, problem.experts), np.int32(HOLE), rows)

    @cached_property
    def target(self) -> Ints:
        """The map after the last step; [layers, slots]."""
        return self.map_at(len(self.steps))

    def map_at(self, count: int) -> Ints:
        """The map after the first `count` steps; [layers, slots]. Raises ElasticError outside 0..steps."""
        if not 0 <= count <= len(self.steps):
            raise ElasticError(f"placement solution: {count} steps of {len(self.steps)}")
        rows = self.start.copy()
        # slot by slot in order: a slot that is written twice must end with the later expert
        for _, layer, p, expert, q, other in self.steps[:count].tolist():
            rows[layer, p] = expert
            if q != HOLE:
                rows[layer, q] = other
        return rows

    def moves(self, first: int = 0, last: int | None = None) -> tuple[Move, ...]:
        """The moves of steps `first` to `last` (exclusive), in order; those of an exchange follow each other."""
        owner, start = self.problem.system.owner.tolist(), self.problem.system.first.tolist()
        made: list[Move] = []
        pairs = zip(self.steps[first:last].tolist(), self.sources[first:last].tolist(), strict=True)
        for (_, layer, p, expert, q, other), (source, other_source) in pairs:
            for slot, arriving, read in ((p, expert, source), (q, other, other_source)):
                if slot == HOLE:
                    continue
                rank = owner[slot]
                from_rank = owner[read] if read != HOLE else HOLE
                from_index = read - start[from_rank] if read != HOLE else HOLE
                made.append(Move(layer, arriving, rank, slot - start[rank], from_rank, from_index))
        return tuple(made)

    @property
    def moved(self) -> int:
        """Experts that are loaded or copied, over all layers."""
        return len(self.steps) + int((self.steps[:, 4] != HOLE).sum())

    def __len__(self) -> int:
        return len(self.steps)
