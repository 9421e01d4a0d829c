"""Coverage: a slot for every orphan (an expert that no live rank holds), least work for the busiest receiver first."""

import numpy as np

from elastic.placement.kernels.counts import decisive_counts
from elastic.placement.kernels.jit import compiled
from elastic.placement.kernels.state import Flags, Floats, Frame, Ints, Layer, fill_from, new_layer, put, take
from elastic.placement.kernels.steps import COVER, record

UNLIMITED = 1 << 30
"""No limit on the number of replicas but the slots."""
SLACK = 1
"""Experts that a receiver may load beyond its share, if a better slot is there."""


@compiled
def cover_layers(frame: Frame, loads: Floats, rows: Ints, staying: Flags, rows_out: Ints, steps: Ints) -> int:
    """Cover every layer; returns the number of steps. `rows_out` gets the covered map without duplicates.

    A receiver takes at most an even share of all orphans so far, rounded up, and SLACK more, where its layers allow it.
    """
    at, total = 0, 0
    to_load = np.zeros(len(frame.first) - 1, dtype=np.int32)
    for number in range(len(rows)):
        layer = new_layer(frame, loads[number])
        fill_from(frame, layer, rows[number], staying)
        orphans = 0
        for expert in range(len(layer.load)):
            orphans += layer.copies[expert] == 0
        if orphans:
            total += orphans
            share = -(-total // len(frame.live)) + SLACK
            missing = np.empty(orphans, dtype=np.int32)
            slots = np.empty(orphans, dtype=np.int32)
            found = 0
            wanted = decisive_counts(frame, layer.load, UNLIMITED)
            for expert in np.argsort(-layer.load, kind="mergesort"):
                if layer.copies[expert] == 0:
                    p = _slot_for(frame, layer, expert, to_load, share, wanted)
                    if layer.held[p] >= 0:
                        take(frame, layer, p)
                    put(frame, layer, p, expert)
                    to_load[frame.owner[p]] += 1
                    missing[found], slots[found] = expert, p
                    found += 1
            _exchange(frame, layer, missing, slots, layer.load.sum() / len(frame.live))
            for i in range(orphans):
                at = record(steps, at, COVER, number, slots[i], missing[i], -1, -1)
        rows_out[number] = layer.held
    return at


@compiled
def _slot_for(frame: Frame, layer: Layer, expert: int, to_load: Ints, share: int, wanted: Ints) -> int:
    """A hole, or a replica that can be given up: on a rank that has not loaded its share, holes before replicas, of
    these the ones of experts with more than `wanted` first, then where the busiest rank that it concerns stays lightest."""
    best, best_excess, best_given, best_load = -1, 0, 0, 0.0
    for rank in frame.live:
        excess = max(0, to_load[rank] - share + 1)
        if best >= 0 and excess > best_excess:
            continue
        for p in range(frame.first[rank], frame.first[rank + 1]):
            held = layer.held[p]
            after = layer.rank_load[rank] + layer.load[expert]
            given = 0
            if held >= 0:
                count = layer.copies[held]
                if count < 2:
                    continue
                given = 1 if count > wanted[held] else 2
                share_now = layer.load[held] / count
                more = layer.load[held] / (count - 1) - share_now
                after -= share_now
                for k in range(count):
                    q = layer.holders[held, k]
                    if q != p:
                        after = max(after, layer.rank_load[frame.owner[q]] + more)
            better = best < 0 or excess < best_excess
            if not better and excess == best_excess:
                better = given < best_given or (given == best_given and after < best_load)
            if better:
                best, best_excess, best_given, best_load = p, excess, given, after
    return best


@compiled
def _exchange(frame: Frame, layer: Layer, missing: Ints, slots: Ints, mean: float) -> None:
    """Exchange the slots of orphans, which costs nothing, as long as that evens out the load of two ranks."""
    count = len(missing)
    for _ in range(8 * count):
        best, best_i, best_k = 1e-9 * mean * mean, -1, -1
        for i in range(count):
            heavy = layer.rank_load[frame.owner[slots[i]]]
            for k in range(count):
                low = layer.rank_load[frame.owner[slots[k]]]
                d = layer.load[missing[i]] - layer.load[missing[k]]
                # the fall of the sum of squares, halved
                gain = d * (heavy - low - d)
                if d > 0 and gain > best:
                    best, best_i, best_k = gain, i, k
        if best_i < 0:
            break
        p, q = slots[best_i], slots[best_k]
        take(frame, layer, p)
        take(frame, layer, q)
        put(frame, layer, p, missing[best_k])
        put(frame, layer, q, missing[best_i])
        slots[best_i], slots[best_k] = q, p
