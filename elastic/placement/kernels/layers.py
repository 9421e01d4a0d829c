"""All layers, one after another: holes, balance, protection. They do not depend on each other."""

import numpy as np

from elastic.placement.kernels.counts import decisive_counts, even_counts, fresh_plan, recount
from elastic.placement.kernels.fill import fill
from elastic.placement.kernels.improve import improve
from elastic.placement.kernels.jit import compiled
from elastic.placement.kernels.protect import protect
from elastic.placement.kernels.shorten import shorten
from elastic.placement.kernels.state import (
    Flags,
    Floats,
    Frame,
    Ints,
    Layer,
    fill_from,
    heaviest,
    least_busiest,
    new_layer,
)
from elastic.placement.kernels.steps import BALANCE, COVER, FILL, record

HOPS = 5
"""Most exchanges of one chain."""


@compiled
def improve_layers(
    frame: Frame,
    loads: Floats,
    rows: Ints,
    usable: Flags,
    filled: Flags,
    tolerance: float,
    worth: float,
    fault_cost: float,
    replicas: int,
    balance_moves: int,
    protect_moves: int,
    rows_out: Ints,
    bounds: Floats,
    steps: Ints,
) -> int:
    """Append the steps that follow coverage; returns their number. `bounds` gets the least possible busiest load.

    `usable` are the ranks of the next view, `filled` those whose holes are all filled. Where a layer is empty (a new group)
    its experts are placed together with their replicas, as COVER and FILL.
    """
    at = 0
    scratch = np.empty((16 * len(frame.live) + 16, 6), dtype=np.int32)
    made = np.empty((balance_moves, 6), dtype=np.int32)
    cost = np.ones(len(frame.owner), dtype=np.float64)
    for number in range(len(rows)):
        layer = new_layer(frame, loads[number])
        fill_from(frame, layer, rows[number], usable)
        mean = layer.load.sum() / len(frame.live)
        bounds[number] = least_busiest(frame, layer.load)
        held = 0
        for expert in range(len(layer.load)):
            held += layer.copies[expert]
        start = layer.copies.copy()
        layer, slots = fill(frame, layer, filled, bounds[number], mean, replicas - held, scratch)
        at = _filled(layer, slots, start, number, steps, at)
        level = bounds[number] / (1 - tolerance)
        if held > 0 and heaviest(frame, layer) > level:
            # few slots or heavy experts: the bound is out of reach, and chasing it is not worth the moves
            level = max(level, fresh_plan(frame, layer.load, replicas) / (1 - tolerance))
            layer, at = _balance(
                frame,
                layer,
                usable,
                level,
                mean,
                worth,
                fault_cost,
                replicas,
                balance_moves,
                number,
                cost,
                made,
                steps,
                at,
            )
        at = protect(frame, layer, level, protect_moves, number, steps, at)
        rows_out[number] = layer.held
    return at


@compiled
def _filled(layer: Layer, slots: Ints, start: Ints, number: int, steps: Ints, at: int) -> int:
    """The steps that fill `slots`: experts without a copy first, then what halves the largest shares first."""
    counts = start.copy()
    relief = np.empty(len(slots), dtype=np.float64)
    kinds = np.full(len(slots), FILL, dtype=np.int32)
    for i in range(len(slots)):
        expert = layer.held[slots[i]]
        count = counts[expert]
        counts[expert] += 1
        if count == 0:
            kinds[i] = COVER
            relief[i] = np.inf
        else:
            relief[i] = layer.load[expert] / count - layer.load[expert] / (count + 1)
    for i in np.argsort(-relief, kind="mergesort"):
        at = record(steps, at, kinds[i], number, slots[i], layer.held[slots[i]], -1, -1)
    return at


@compiled
def _balance(
    frame: Frame,
    layer: Layer,
    usable: Flags,
    level: float,
    mean: float,
    worth: float,
    fault_cost: float,
    replicas: int,
    most_moves: int,
    number: int,
    cost: Floats,
    made: Ints,
    steps: Ints,
    at: int,
) -> tuple[Layer, int]:
    """Steps until no rank is above `level`, for as few moves as are found; returns the layer and the new end of `steps`.

    First with the replicas that the experts have, except where their number decides; if that is not enough, with as many
    as make the largest share least. `cost` and `made` are room.
    """
    begin, before = at, layer.held.copy()
    decisive = decisive_counts(frame, layer.load, replicas)
    for counts in (decisive, np.minimum(even_counts(frame, layer.load, replicas), np.int32(len(frame.live)))):
        reached, end, kept = heaviest(frame, layer), at, layer.held.copy()
        if reached <= level:
            break
        cost[:] = 1.0
        at = recount(frame, layer, counts, most_moves - _moves(steps, begin, at), number, steps, at)
        left = most_moves - _moves(steps, begin, at)
        at = improve(frame, layer, cost, level, mean, worth * mean, fault_cost, left, HOPS, BALANCE, number, steps, at)
        if reached - heaviest(frame, layer) <= worth * mean * _moves(steps, end, at):
            at, layer = end, new_layer(frame, layer.load)
            fill_from(frame, layer, kept, usable)
    if at > begin + 1:
        now = new_layer(frame, layer.load)
        fill_from(frame, now, before, usable)
        layer, at = shorten(frame, now, layer, number, steps, begin, at, made)
    return layer, at


@compiled
def _moves(steps: Ints, begin: int, end: int) -> int:
    moves = 0
    for i in range(begin, end):
        moves += 1 if steps[i, 4] < 0 else 2
    return moves
