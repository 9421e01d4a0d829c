"""Coverage: a slot for every orphan (an expert that no live rank holds), least work for the busiest receiver first."""

import numpy as np

from elastic.placement.kernels.jit import compiled
from elastic.placement.kernels.state import Flags, Floats, Frame, Ints, Layer, fill_from, new_layer, put, take

COVER, FILL, BALANCE, PROTECT = 0, 1, 2, 3
"""Why a step is made; the first column of the step arrays."""

SLACK = 1
"""Experts that a receiver may load beyond its share, if a better slot is there."""


@compiled
def record(steps: Ints, at: int, kind: int, layer: int, p: int, expert: int, q: int, other: int) -> int:
    """Write one step: `expert` goes to slot `p`; in an exchange `other` goes to slot `q` at the same time, else -1."""
    steps[at, 0] = kind
    steps[at, 1] = layer
    steps[at, 2] = p
    steps[at, 3] = expert
    steps[at, 4] = q
    steps[at, 5] = other
    return at + 1


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
            for expert in np.argsort(-layer.load, kind="mergesort"):
                if layer.copies[expert] == 0:
                    p = _slot_for(frame, layer, expert, to_load, share)
                    if layer.held[p] >= 0:
                        take(frame, layer, p)
                    put(frame, layer, p, expert)
                    to_load[frame.owner[p]] += 1
                    at = record(steps, at, COVER, number, p, expert, -1, -1)
        rows_out[number] = layer.held
    return at


@compiled
def _slot_for(frame: Frame, layer: Layer, expert: int, to_load: Ints, share: int) -> int:
    """A hole, or a replica that can be given up: on a rank that has not loaded its share, holes before replicas, then
    where the busiest rank that it concerns stays lightest."""
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
                given = 1
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
