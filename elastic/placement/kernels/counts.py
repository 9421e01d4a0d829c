"""How many replicas each expert should have, where that decides about the balance: on ranks with few slots."""

import heapq

import numpy as np

from elastic.placement.kernels.jit import compiled
from elastic.placement.kernels.state import Floats, Frame, Ints, Layer, put, take
from elastic.placement.kernels.steps import BALANCE, record

TOO_MUCH = 0.7
"""Share of one replica, in mean rank loads, beside which a rank can take next to nothing."""


@compiled
def even_counts(frame: Frame, load: Floats, most: int) -> Ints:
    """Replicas of each expert, `most` in all or as many as there are slots, that make the largest share least; [experts]."""
    slots = 0
    for rank in frame.live:
        slots += frame.first[rank + 1] - frame.first[rank]
    counts = np.ones(len(load), dtype=np.int32)
    largest = [(-load[expert], expert) for expert in range(len(load))]
    heapq.heapify(largest)
    for _ in range(min(most, slots) - len(load)):
        chosen = largest[0][1]
        counts[chosen] += 1
        heapq.heapreplace(largest, (-load[chosen] / counts[chosen], chosen))
    return counts


@compiled
def decisive_counts(frame: Frame, load: Floats, most: int) -> Ints:
    """The same, on a rank once at most, but zeros where no share has to be too much for a rank: there other counts are as
    good; [experts]."""
    ranks = len(frame.live)
    slots = 0
    for rank in frame.live:
        slots += frame.first[rank + 1] - frame.first[rank]
    enough = TOO_MUCH * load.sum() / ranks
    spare, possible = min(most, slots) - len(load), True
    for expert in range(len(load)):
        needed = int(np.ceil(load[expert] / enough))
        possible = possible and needed <= ranks
        spare -= needed - 1
    if possible and spare >= 0:
        return np.zeros(len(load), dtype=np.int32)
    counts: Ints = np.minimum(even_counts(frame, load, most), np.int32(ranks))
    return counts


@compiled
def fresh_plan(frame: Frame, load: Floats, most: int) -> float:
    """The busiest rank's load if the layer were placed anew for balance alone, by DeepSeek's algorithm: even counts, then
    the largest share first, on the lightest rank. That may put an expert twice on a rank; so this is a figure to compare
    with, not one that a valid map is sure to reach."""
    counts = even_counts(frame, load, most)
    shares = load / counts
    free = frame.first[1:] - frame.first[:-1]
    lightest = [(0.0, rank) for rank in frame.live if free[rank] > 0]
    heapq.heapify(lightest)
    busiest = 0.0
    for expert in np.argsort(-shares, kind="mergesort"):
        for _ in range(counts[expert]):
            rank_load, rank = lightest[0]
            rank_load += shares[expert]
            busiest = max(busiest, rank_load)
            free[rank] -= 1
            if free[rank] > 0:
                heapq.heapreplace(lightest, (rank_load, rank))
            else:
                heapq.heappop(lightest)
    return busiest


@compiled
def recount(frame: Frame, layer: Layer, wanted: Ints, most_moves: int, number: int, steps: Ints, at: int) -> int:
    """Append copies of experts that have fewer replicas than `wanted`, over replicas of experts that have more; the largest
    share first, each on the rank with most room. Returns the new end of `steps`."""
    for _ in range(most_moves):
        expert, share = -1, 0.0
        for e in range(len(wanted)):
            if layer.copies[e] < wanted[e] and layer.load[e] / layer.copies[e] > share:
                expert, share = e, layer.load[e] / layer.copies[e]
        if expert < 0:
            break
        best, best_rest = -1, 0.0
        for rank in frame.live:
            if layer.on[rank, expert]:
                continue
            for p in range(frame.first[rank], frame.first[rank + 1]):
                held = layer.held[p]
                rest = layer.rank_load[rank]
                if held >= 0:
                    if layer.copies[held] <= wanted[held]:
                        continue
                    rest -= layer.load[held] / layer.copies[held]
                if best < 0 or rest < best_rest:
                    best, best_rest = p, rest
        if best < 0:
            break
        if layer.held[best] >= 0:
            take(frame, layer, best)
        put(frame, layer, best, expert)
        at = record(steps, at, BALANCE, number, best, expert, -1, -1)
    return at
