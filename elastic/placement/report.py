"""Figures of a map and of a solution: balance, faults, bytes, and what could not be done."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic.placement.maps import HOLE
from elastic.placement.problem import Floats, Ints, System
from elastic.placement.solution import Kind, Solution


@dataclass(frozen=True)
class Faults:
    """Orphans when one of several equal parts (a rank, a host) is lost, for one layer on average."""

    expected: float
    """Mean over the parts."""
    worst: float
    """The worst part."""
    expected_load: float
    """Share of the load that goes to orphans, mean over the parts."""
    worst_load: float


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How good a map is for a load."""

    balancedness: Floats
    """Mean by busiest rank load; [layers]."""
    rank: Faults
    host: Faults | None
    """None where there is one host."""
    sole: float
    """Experts with one copy, for one layer on average."""
    holes: int
    """Slots of live ranks that hold nothing, over all layers."""

    @property
    def mean(self) -> float:
        return float(self.balancedness.mean())

    @property
    def worst(self) -> float:
        return float(self.balancedness.min())


@dataclass(frozen=True)
class Traffic:
    """What the moves of a solution carry. Times are of the links alone, all moves at once."""

    moved: int
    moved_bytes: int
    domain_bytes: int
    network_bytes: int
    unread_bytes: int
    """From the host-memory tier, or from disk where the problem says that there is no tier."""
    busiest_sender: int
    """Rank, or -1 if nobody sends."""
    busiest_sender_bytes: int
    busiest_receiver: int
    busiest_receiver_bytes: int
    link_s: float
    """The time of the busiest link: a rank's sends or receives, or a host's disk."""


@dataclass(frozen=True, eq=False)
class Report:
    evaluation: Evaluation
    coverage: Traffic
    total: Traffic
    shortfalls: tuple[str, ...]
    """What could not be done, and why."""


def rank_loads(system: System, load: Floats, rows: Ints) -> Floats:
    """Load of every rank if each replica takes an equal share; [layers, ranks]."""
    layers, experts = load.shape
    flat = np.where(rows == HOLE, experts, rows) + (np.arange(layers) * (experts + 1))[:, None]
    copies = np.bincount(flat.ravel(), minlength=layers * (experts + 1)).reshape(layers, experts + 1)
    shares = np.zeros((layers, experts + 1))
    np.divide(load, copies[:, :experts], out=shares[:, :experts], where=copies[:, :experts] > 0)
    of_slot = np.take_along_axis(shares, np.where(rows == HOLE, experts, rows), axis=1)
    at = system.owner + (np.arange(layers) * system.ranks)[:, None]
    total: Floats = np.bincount(at.ravel(), of_slot.ravel(), layers * system.ranks).reshape(layers, system.ranks)
    return total


def evaluate(system: System, load: Floats, rows: Ints, live: Collection[int]) -> Evaluation:
    """Figures of any map that fits the system, on its live ranks."""
    alive = sorted(live)
    loads = rank_loads(system, load, rows)[:, alive]
    busiest = loads.max(axis=1)
    balanced = np.divide(loads.mean(axis=1), busiest, out=np.ones(len(busiest)), where=busiest > 0)
    layers, experts = load.shape
    held = np.zeros((layers, system.ranks, experts + 1), dtype=bool)
    held[np.arange(layers)[:, None], system.owner[None, :], rows] = True
    present = held[:, alive, :experts]
    hosts = np.array(system.hosts)[alive]
    names = np.unique(hosts)
    by_host = np.stack([present[:, hosts == name].any(axis=1) for name in names], axis=1)
    usable = np.isin(system.owner, alive)
    return Evaluation(
        balancedness=balanced,
        rank=_faults(present, load),
        host=_faults(by_host, load) if len(names) > 1 else None,
        sole=float((present.sum(axis=1) == 1).sum(axis=1).mean()),
        holes=int((rows[:, usable] == HOLE).sum()),
    )


def report(solution: Solution) -> Report:
    """The figures of the solution's target, of its moves, and what it leaves undone."""
    problem = solution.problem
    found = evaluate(problem.system, problem.load, solution.target, problem.live)
    covered = traffic(solution, solution.coverage)
    return Report(found, covered, traffic(solution, len(solution)), tuple(_shortfalls(solution, found)))


def traffic(solution: Solution, count: int) -> Traffic:
    """What the first `count` steps carry."""
    problem, system = solution.problem, solution.problem.system
    steps, sources = solution.steps[:count], solution.sources[:count]
    to = np.concatenate((steps[:, 2], steps[steps[:, 4] != HOLE, 4]))
    read = np.concatenate((sources[:, 0], sources[steps[:, 4] != HOLE, 1]))
    receiver, known = system.owner[to], read != HOLE
    sender = system.owner[read[known]]
    domains, links = np.array(system.domains), system.links
    near = domains[sender] == domains[receiver[known]]
    size = system.expert_bytes
    sent, received = np.bincount(sender, minlength=system.ranks), np.bincount(receiver, minlength=system.ranks)
    gigabytes = size / 1e9
    pair_s = np.where(near, gigabytes / links.domain_gbps, gigabytes / links.network_gbps)
    send_s = np.bincount(sender, pair_s, system.ranks)
    receive_s = np.bincount(receiver[known], pair_s, system.ranks)
    unread = np.bincount(receiver[~known], minlength=system.ranks)
    slowest = max(send_s.max(), receive_s.max(), unread.max() * gigabytes / links.tier_gbps if problem.host_tier else 0.0)
    if not problem.host_tier:
        by_host = np.bincount(np.unique(system.hosts, return_inverse=True)[1], unread)
        slowest = max(slowest, by_host.max() * gigabytes / links.disk_gbps)
    return Traffic(
        moved=len(to),
        moved_bytes=len(to) * size,
        domain_bytes=int(near.sum()) * size,
        network_bytes=int((~near).sum()) * size,
        unread_bytes=int((~known).sum()) * size,
        busiest_sender=int(sent.argmax()) if len(sender) else HOLE,
        busiest_sender_bytes=int(sent.max()) * size,
        busiest_receiver=int(received.argmax()) if len(to) else HOLE,
        busiest_receiver_bytes=int(received.max()) * size,
        link_s=float(slowest),
    )


def _faults(present: npt.NDArray[np.bool_], load: Floats) -> Faults:
    """`present` [layers, parts, experts]."""
    sole = present & (present.sum(axis=1) == 1)[:, None, :]
    count = sole.sum(axis=2).mean(axis=0)
    total = load.sum(axis=1, keepdims=True)
    lost = (sole * (load / np.where(total > 0, total, 1.0))[:, None, :]).sum(axis=2).mean(axis=0)
    return Faults(float(count.mean()), float(count.max()), float(lost.mean()), float(lost.max()))


def _shortfalls(solution: Solution, found: Evaluation) -> list[str]:
    problem, said = solution.problem, []
    experts, layers = problem.experts, problem.layers
    slots = sum(min(problem.system.slots[r], experts) for r in problem.live)
    reached = solution.busiest_before.copy()
    for layer, after in zip(solution.steps[:, 1], solution.busiest_after, strict=True):
        reached[layer] = after
    if not np.isnan(solution.bounds).all():
        mean = problem.load.sum(axis=1) / len(problem.live)
        best = np.divide(solution.bounds, mean, out=np.ones(layers), where=mean > 0)
        short = np.flatnonzero(reached * (1 - problem.goals.tolerance) > best * (1 + 1e-9))
        if len(short):
            worst = short[np.argmax(reached[short] / best[short])]
            said.append(
                f"balance: {len(short)} of {layers} layers stay above the target, the worst is layer {worst} with a "
                f"busiest rank at {reached[worst]:.3f} mean loads, no placement is below {best[worst]:.3f}; no further "
                f"step is worth its bytes"
            )
    if found.sole:
        said.append(
            f"faults: {found.sole:.1f} experts per layer have one copy; {slots} slots leave at least "
            f"{max(0, 2 * experts - slots)} of {experts}, the others gave way to the balance or to fewer moves"
        )
    if found.holes:
        said.append(
            f"holes: {found.holes} slots over {layers} layers stay empty: more replicas are not asked for, or every rank "
            f"with a hole holds the expert already"
        )
    dropped = int(((problem.current != HOLE) & np.isin(problem.system.owner, sorted(set(problem.present) & set(problem.live)))).sum())
    dropped -= int((solution.start != HOLE).sum())
    if dropped:
        said.append(f"duplicates: {dropped} slots held an expert twice on one rank; they count as empty")
    kinds = solution.steps[:, 0]
    lost = int(((kinds == Kind.COVER) & (solution.sources[:, 0] == HOLE)).sum()) if problem.present else 0
    if lost:
        where = "the host-memory tier" if problem.host_tier else "disk: there is no host-memory tier"
        said.append(f"copies: {lost} experts have no live copy and come from {where}")
    return said
