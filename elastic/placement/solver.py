"""From a problem to a solution: coverage, then holes, balance and protection as steps that may end anywhere.

The objectives in their order, and how they are met, are described in docs/placement.md.
"""

import numpy as np
import numpy.typing as npt

from elastic.placement.kernels.cover import cover_layers
from elastic.placement.kernels.layers import improve_layers
from elastic.placement.kernels.sequence import choose_sources, merge_keys, trace
from elastic.placement.kernels.state import Frame
from elastic.placement.maps import HOLE
from elastic.placement.problem import Floats, Ints, Problem
from elastic.placement.solution import Solution

_UNLIMITED = 1 << 30


def cover(problem: Problem) -> Solution:
    """Only what coverage needs: every orphan gets a slot, everything else stays. The same steps begin `solve`'s plan, so
    that they can be carried out while the rest is planned. For an empty group this is `solve`."""
    return _assemble(problem, only_coverage=bool(problem.present))


def solve(problem: Problem) -> Solution:
    """The whole way: coverage, then holes and balance, most relief per byte first, then protection.

    Deterministic: equal problems give equal solutions, on any machine.
    """
    return _assemble(problem, only_coverage=False)


def warm_up() -> None:
    """Load the compiled code, or compile it where this has not happened on the machine; call it before the first loss."""
    from elastic.placement.problem import System, problem
    from elastic.placement.schedule import schedule

    system = System.uniform(3, 2, ranks_per_host=2)
    first = solve(problem(system, [[3.0, 1.0, 1.0]], live=range(3)))
    schedule(solve(problem(system, [[3.0, 1.0, 1.0]], live=[0, 1], current=first.target)))


def frame_of(problem: Problem) -> Frame:
    system = problem.system
    hosts = np.unique(system.hosts, return_inverse=True)[1]
    domains = np.unique(system.domains, return_inverse=True)[1]
    return Frame(
        system.owner,
        system.first,
        hosts.astype(np.int32),
        domains.astype(np.int32),
        np.array(problem.live, dtype=np.int32),
    )


def _assemble(problem: Problem, *, only_coverage: bool) -> Solution:
    frame = frame_of(problem)
    staying = _flags(problem, set(problem.present) & set(problem.live))
    live = _flags(problem, problem.live)
    loads = _positive(problem.load)
    layers = problem.layers
    start = np.where(staying[frame.owner], problem.current, np.int32(HOLE))
    covered = np.empty_like(start)
    if problem.present:
        room = np.empty((layers * problem.experts, 6), dtype=np.int32)
        parts = [room[: cover_layers(frame, loads, start, staying, covered, room)]]
    else:
        covered[:] = HOLE
        parts = []
    bounds = np.full(layers, np.nan)
    if not only_coverage:
        parts.append(_improvement(problem, frame, loads, covered, live, bounds))
    steps = np.concatenate(parts)
    steps = steps[np.argsort(steps[:, 1], kind="stable")]
    before, after, keys = np.empty(layers), np.empty(len(steps)), np.empty(len(steps))
    trace(frame, loads, start, staying, steps, before, after)
    merge_keys(steps, before, after, keys)
    order = np.argsort(keys, kind="stable")
    steps = steps[order]
    sources = np.full((len(steps), 2), HOLE, dtype=np.int32)
    if problem.present:
        links = problem.system.links
        readable = _flags(problem, problem.present)
        choose_sources(frame, problem.current, readable, steps, 1 / links.domain_gbps, 1 / links.network_gbps, sources)
    return Solution(problem, steps, sources, before, after[order], bounds)


def _improvement(
    problem: Problem, frame: Frame, loads: Floats, covered: Ints, live: npt.NDArray[np.bool_], bounds: Floats
) -> Ints:
    goals = problem.goals
    layers, slots = covered.shape
    most = 4 * slots + 64 if goals.balance_moves is None else goals.balance_moves
    room = np.empty((layers * (slots + most + goals.protect_moves), 6), dtype=np.int32)
    # a rank that joins is filled; a hole of a rank that serves already is used where balance needs it
    filled = live if goals.fill_holes else _flags(problem, set(problem.live) - set(problem.present))
    target = np.empty_like(covered)
    count = improve_layers(
        frame,
        loads,
        covered,
        live,
        filled,
        goals.tolerance,
        goals.worth,
        goals.fault_cost,
        _UNLIMITED if goals.replicas is None else max(goals.replicas, problem.experts),
        most,
        goals.protect_moves,
        target,
        bounds,
        room,
    )
    return room[:count]


def _flags(problem: Problem, ranks: object) -> npt.NDArray[np.bool_]:
    return np.isin(np.arange(problem.system.ranks), list(ranks))  # type: ignore[call-overload]


def _positive(load: Floats) -> Floats:
    """Experts that nobody asked for get a small load, so that their replicas count for something; a layer without any
    load is treated as even."""
    mean = load.mean(axis=1, keepdims=True)
    return np.where(mean > 0, np.maximum(load, 1e-6 * mean), 1.0)
