"""What the solver is asked: the machines, the load, what the buffers hold, who is live, and how much change is worth.

A *physical slot* here is a position in a row of the map: the slots of rank 0, then those of rank 1, and so on. Ranks may
have different numbers of slots. All records are frozen; the arrays in them must not be written to.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from elastic.errors import ElasticError, Infeasible
from elastic.placement.maps import HOLE
from elastic.placement.validate import check_rows

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Links:
    """Bandwidths in GB/s, each for one rank and one direction, except the disk's."""

    domain_gbps: float = 450.0
    """Between two ranks of one NVLink domain."""
    network_gbps: float = 50.0
    """Between domains."""
    tier_gbps: float = 50.0
    """From the host-memory tier."""
    disk_gbps: float = 12.0
    """From a host's disk, shared by its ranks."""


@dataclass(frozen=True)
class System:
    """The ranks of the group, live or not, by slot number of the group."""

    slots: tuple[int, ...]
    """Expert buffers per layer of each rank; they may differ."""
    hosts: tuple[int, ...]
    """Host of each rank."""
    domains: tuple[int, ...]
    """NVLink domain of each rank; a domain may span hosts."""
    expert_bytes: int = 1
    """Bytes of one expert of one layer."""
    links: Links = field(default_factory=Links)

    def __post_init__(self) -> None:
        if not self.slots or not len(self.slots) == len(self.hosts) == len(self.domains):
            raise ElasticError(
                f"placement system: {len(self.slots)} ranks with slots, {len(self.hosts)} with hosts and "
                f"{len(self.domains)} with domains; give one of each for every rank"
            )
        if min(self.slots) < 0 or self.expert_bytes < 1:
            raise ElasticError("placement system: slots must not be negative, and an expert has at least one byte")

    @classmethod
    def uniform(
        cls,
        ranks: int,
        slots_per_rank: int,
        *,
        ranks_per_host: int = 8,
        ranks_per_domain: int | None = None,
        expert_bytes: int = 1,
    ) -> "System":
        """Equal ranks on equal hosts; without `ranks_per_domain` every host is a domain."""
        per_domain = ranks_per_domain or ranks_per_host
        return cls(
            slots=(slots_per_rank,) * ranks,
            hosts=tuple(r // ranks_per_host for r in range(ranks)),
            domains=tuple(r // per_domain for r in range(ranks)),
            expert_bytes=expert_bytes,
        )

    @property
    def ranks(self) -> int:
        return len(self.slots)

    @cached_property
    def first(self) -> Ints:
        """First physical slot of each rank, and the number of all slots at the end; [ranks + 1]."""
        return np.concatenate(([0], np.cumsum(self.slots))).astype(np.int32)

    @cached_property
    def owner(self) -> Ints:
        """Rank of each physical slot; [physical slots]."""
        return np.repeat(np.arange(self.ranks, dtype=np.int32), self.slots)


@dataclass(frozen=True)
class Goals:
    """How far to go. Coverage is never traded; these decide what else is worth moving bytes for."""

    tolerance: float = 0.009
    """A layer is good enough if its busiest rank is within this share of the least possible load, or of what DeepSeek's
    planner would reach; less than 1%, because of rounding."""
    worth: float = 1e-4
    """Least relief of overloaded ranks, in mean rank loads, for which one expert is moved."""
    balance_moves: int | None = None
    """Most moves per layer for balance; None: as many as are worth it."""
    protect_moves: int = 0
    """Most moves per layer that only make a later loss cheaper (a second copy in place of a third)."""
    replicas: int | None = None
    """Replicas per layer up to which holes are filled, never fewer than experts; None: no limit but the slots."""
    fill_holes: bool = False
    """Fill also the holes of ranks that serve already; without it only ranks that join are filled, and other holes are used
    where coverage or balance needs them."""
    fault_cost: float = 3.0
    """What giving up a second copy counts as, in moves, when steps for balance are compared."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1 or self.worth < 0 or self.fault_cost < 0 or self.protect_moves < 0:
            raise ElasticError("placement goals: tolerance must be in [0, 1), worth, costs and limits not negative")


@dataclass(frozen=True, eq=False)
class Problem:
    """One question to the solver.

    `present` are the ranks that serve now and survive: they alone can be copied from, the slots of all others count as
    empty. `live` are the ranks of the next view; a rank in `live` but not in `present` joins empty, one in `present` but
    not in `live` leaves, and is still a source.
    """

    system: System
    load: Floats
    """Load of each logical expert; [layers, experts], not negative. See `mean_load` for a window of samples."""
    current: Ints
    """What each physical slot holds, or HOLE; [layers, physical slots]."""
    present: tuple[int, ...]
    live: tuple[int, ...]
    goals: Goals = field(default_factory=Goals)
    host_tier: bool = True
    """The hosts keep a copy of every expert in memory; without it what no rank holds comes from disk."""

    @property
    def layers(self) -> int:
        return int(self.load.shape[0])

    @property
    def experts(self) -> int:
        return int(self.load.shape[1])


def problem(
    system: System,
    load: npt.ArrayLike,
    *,
    live: Collection[int],
    current: npt.ArrayLike | None = None,
    present: Collection[int] | None = None,
    goals: Goals | None = None,
    host_tier: bool = True,
) -> Problem:
    """Check and complete a question: no `current` is an empty group, no `present` means everyone who is live (nobody,
    for an empty group).

    A map that holds an expert twice on one rank is accepted: the second copy is useless and its slot counts as empty.

    Raises ElasticError for arrays that do not fit each other, and Infeasible, with the numbers, where the live ranks
    cannot hold every expert.
    """
    loads = np.ascontiguousarray(load, dtype=np.float64)
    if loads.ndim != 2 or 0 in loads.shape:
        raise ElasticError(f"placement load: shape {loads.shape}, expected [layers, experts]")
    if not np.isfinite(loads).all() or (loads < 0).any():
        layer, expert = np.argwhere(~(np.isfinite(loads) & (loads >= 0)))[0]
        raise ElasticError(f"placement load: layer {layer} expert {expert}: {loads[layer, expert]} is no load")
    alive = _ranks(system, live, "live")
    if current is None:
        rows = np.full((len(loads), int(system.first[-1])), HOLE, dtype=np.int32)
        serving: tuple[int, ...] = ()
    else:
        rows = check_rows(current, system.slots, loads.shape[1], layers=len(loads), duplicates_allowed=True)
        serving = _ranks(system, alive if present is None else present, "present")
    room = sum(min(system.slots[r], loads.shape[1]) for r in alive)
    if room < loads.shape[1]:
        raise Infeasible(
            f"placement: {len(alive)} live ranks with {sum(system.slots[r] for r in alive)} slots can hold {room} of "
            f"{loads.shape[1]} experts; {loads.shape[1] - room} more slots are needed"
        )
    return Problem(system, loads, rows, serving, alive, goals or Goals(), host_tier)


def mean_load(window: npt.ArrayLike, *, half_life: float | None = None) -> Floats:
    """The load to plan for, from samples [samples, layers, experts], oldest first; with `half_life` (in samples) recent
    ones count more."""
    samples = np.asarray(window, dtype=np.float64)
    if samples.ndim != 3 or not len(samples):
        raise ElasticError(f"placement load window: shape {samples.shape}, expected [samples, layers, experts]")
    age = np.arange(len(samples))[::-1]
    weights = np.ones(len(samples)) if half_life is None else 0.5 ** (age / half_life)
    mean: Floats = np.tensordot(weights / weights.sum(), samples, axes=1)
    return mean


def _ranks(system: System, ranks: Collection[int], what: str) -> tuple[int, ...]:
    outside = sorted(r for r in ranks if not 0 <= r < system.ranks)
    if outside:
        raise Infeasible(f"placement: {what} ranks {outside} are outside the system of {system.ranks} ranks")
    return tuple(sorted(set(ranks)))
