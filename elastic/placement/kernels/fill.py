"""Holes: which experts get another replica, and where.

Second copies come before third ones, because an expert with one copy is an orphan when its rank is lost; a replica that
alone is too much for a rank comes before both. How much is too much is tried from generous to strict, until the layer is
balanced; the strictest choice is the one that balances best and looks at nothing else.
"""

import heapq

import numpy as np

from elastic.placement.kernels.improve import improve
from elastic.placement.kernels.jit import compiled, inlined
from elastic.placement.kernels.state import Flags, Frame, Ints, Layer, duplicate, heaviest, put, spread
from elastic.placement.kernels.steps import BALANCE

CHOICES = np.array([0.7, 0.45, 0.0])
"""Largest share of one replica, in mean rank loads, that waits for the second copies of others."""
NEAR_ENOUGH = 5e-4
"""Balance within this of the bound ends the trials for a new layer."""
GOOD_START = 0.03
"""The same where the layer holds something: the steps for balance follow."""
FREE = 0.02
"""Cost of writing a slot that is loaded anyway: next to nothing, and not nothing, so that a search ends."""
ELSEWHERE = 0.02
"""How much heavier, in mean loads, a rank on another host may be to get the copy that an expert needs there."""
NEVER = 1e12
"""Cost of giving up a second copy while holes are filled; finite, because it is multiplied by none."""


@compiled
def fill(
    frame: Frame, layer: Layer, filled: Flags, bound: float, mean: float, most: int, scratch: Ints
) -> tuple[Layer, Ints]:
    """Give up to `most` holes an expert; returns the layer with them, and their slots. `scratch` is room for steps that are thrown away.

    Experts without a copy come first: then the layer was empty, and all its slots are filled together.
    """
    holes = 0
    for p in range(len(layer.held)):
        holes += layer.held[p] < 0
    usable = 0
    for rank in frame.live:
        if filled[rank]:
            for p in range(frame.first[rank], frame.first[rank + 1]):
                usable += layer.held[p] < 0
    most = min(most, usable)
    best, best_layer = np.inf, layer
    best_slots = np.empty(0, dtype=np.int32)
    if most <= 0:
        return best_layer, best_slots
    enough = NEAR_ENOUGH if holes == len(layer.held) else GOOD_START
    level = bound * (1 + NEAR_ENOUGH / 5)
    last = np.empty(0, dtype=np.int32)
    for choice in CHOICES:
        counts = _allot(frame, layer, choice * mean, most)
        if len(last) and np.array_equal(counts, last):
            continue
        last = counts
        trial = duplicate(layer)
        slots = _pack(frame, trial, filled, counts, most, mean)
        cost = np.full(len(trial.held), np.inf)
        cost[slots] = FREE
        improve(frame, trial, cost, level, mean, 0.0, NEVER, 8 * len(frame.live), 0, BALANCE, 0, scratch, 0)
        reached = heaviest(frame, trial)
        # a stricter choice costs second copies, so it must be clearly better
        if reached < best * (1 - NEAR_ENOUGH):
            best, best_layer, best_slots = reached, trial, slots
        if best <= bound * (1 + enough):
            break
    return best_layer, best_slots


@compiled
def _allot(frame: Frame, layer: Layer, too_much: float, most: int) -> Ints:
    """How many more replicas each expert gets; `most` in all."""
    experts = len(layer.load)
    counts = np.zeros(experts, dtype=np.int32)
    shares = np.empty(experts, dtype=np.float64)
    left = most
    for expert in range(experts):
        if layer.copies[expert] == 0:
            counts[expert] = 1
            left -= 1
        shares[expert] = layer.load[expert] / max(1, layer.copies[expert])
    order = np.argsort(-layer.load, kind="mergesort")
    next_single = 0
    ranks = len(frame.live)
    largest = [(-shares[expert], expert) for expert in range(experts)]
    heapq.heapify(largest)
    while left > 0 and len(largest) > 0:
        share, chosen = largest[0]
        if share != -shares[chosen]:
            # a second copy was given since
            heapq.heapreplace(largest, (-shares[chosen], chosen))
            continue
        if shares[chosen] <= too_much and ranks > 1:
            while next_single < experts and layer.copies[order[next_single]] + counts[order[next_single]] > 1:
                next_single += 1
            if next_single < experts:
                chosen = order[next_single]
        total = layer.copies[chosen] + counts[chosen]
        if total >= ranks:
            heapq.heappop(largest)
            continue
        counts[chosen] += 1
        left -= 1
        shares[chosen] = layer.load[chosen] / (total + 1)
    return counts


@compiled
def _pack(frame: Frame, layer: Layer, filled: Flags, counts: Ints, most: int, mean: float) -> Ints:
    """Place the replicas, largest share first, each on the lightest rank that has a hole and no copy; a copy that would
    leave all copies on one host goes to another host if one has room."""
    experts, ranks = len(layer.load), len(frame.first) - 1
    shares = np.empty(experts, dtype=np.float64)
    base = np.zeros(ranks, dtype=np.float64)
    for expert in range(experts):
        shares[expert] = layer.load[expert] / max(1, layer.copies[expert] + counts[expert])
        for k in range(layer.copies[expert]):
            base[frame.owner[layer.holders[expert, k]]] += shares[expert]
    open_at = frame.first[:-1].copy()
    lightest = [
        (base[rank], rank) for rank in frame.live if filled[rank] and _next_hole(frame, layer, open_at, rank) >= 0
    ]
    heapq.heapify(lightest)
    slots = np.empty(most, dtype=np.int32)
    placed = 0
    for expert in np.argsort(-shares, kind="mergesort"):
        for _ in range(counts[expert]):
            p = _place(frame, layer, lightest, open_at, expert, shares[expert], mean)
            if p >= 0:
                slots[placed] = p
                placed += 1
    # where a replica met only ranks that hold it already, another expert takes the place
    if placed == most or len(lightest) == 0:
        return slots[:placed]
    order = np.argsort(-layer.load, kind="mergesort")
    for few in range(1, ranks):
        if placed == most or len(lightest) == 0:
            break
        for expert in order:
            if placed < most and layer.copies[expert] == few:
                p = _place(frame, layer, lightest, open_at, expert, 0.0, mean)
                if p >= 0:
                    slots[placed] = p
                    placed += 1
    return slots[:placed]


@inlined
def _next_hole(frame: Frame, layer: Layer, open_at: Ints, rank: int) -> int:
    p = open_at[rank]
    while p < frame.first[rank + 1] and layer.held[p] >= 0:
        p += 1
    open_at[rank] = p
    return p if p < frame.first[rank + 1] else -1


@inlined
def _place(
    frame: Frame,
    layer: Layer,
    lightest: list[tuple[float, int]],
    open_at: Ints,
    expert: int,
    share: float,
    mean: float,
) -> int:
    """Put one replica on the lightest rank that takes it; -1 if none does. `lightest` holds the ranks with a hole."""
    alone = layer.copies[expert] > 0
    host = -1
    if alone:
        host = frame.host[frame.owner[layer.holders[expert, 0]]]
        alone = layer.copies[expert] == 1 or not spread(frame, layer, expert, -1, -1)
    if len(lightest) > 0:
        load, rank = lightest[0]
        if not layer.on[rank, expert] and not (alone and frame.host[rank] == host):
            p = _next_hole(frame, layer, open_at, rank)
            put(frame, layer, p, expert)
            if _next_hole(frame, layer, open_at, rank) >= 0:
                heapq.heapreplace(lightest, (load + share, rank))
            else:
                heapq.heappop(lightest)
            return p
    passed = [lightest[0] for _ in range(0)]
    first, found = -1, -1
    first_load = 0.0
    while len(lightest) > 0:
        load, rank = lightest[0]
        if first >= 0 and load > first_load + ELSEWHERE * mean and load + share > mean:
            break
        passed.append(heapq.heappop(lightest))
        if layer.on[rank, expert]:
            continue
        if not alone or frame.host[rank] != host:
            found = rank
            break
        if first < 0:
            first, first_load = rank, load
    if found < 0:
        found = first
    p = -1
    if found >= 0:
        p = _next_hole(frame, layer, open_at, found)
        put(frame, layer, p, expert)
    for load, rank in passed:
        if rank != found:
            heapq.heappush(lightest, (load, rank))
        elif _next_hole(frame, layer, open_at, found) >= 0:
            heapq.heappush(lightest, (load + share, rank))
    return p
