"""All layers, one after another: holes, balance, protection. They do not depend on each other."""

import numpy as np

from elastic.placement.kernels.cover import BALANCE, COVER, FILL, record
from elastic.placement.kernels.fill import fill, fresh_plan
from elastic.placement.kernels.improve import improve
from elastic.placement.kernels.jit import compiled
from elastic.placement.kernels.protect import protect
from elastic.placement.kernels.state import Flags, Floats, Frame, Ints, Layer, fill_from, heaviest, least_busiest, new_layer


@compiled
def improve_layers(
    frame: Frame,
    loads: Floats,
    rows: Ints,
    usable: Flags,
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

    Where a layer is empty (a new group) its experts are placed together with their replicas, as COVER and FILL.
    """
    at = 0
    scratch = np.empty((16 * len(frame.live) + 16, 6), dtype=np.int32)
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
        slots = fill(frame, layer, bounds[number], mean, replicas - held, scratch)
        at = _filled(layer, slots, start, number, steps, at)
        level = bounds[number] / (1 - tolerance)
        if held > 0 and heaviest(frame, layer) > level:
            # few slots or heavy experts: the bound is out of reach, and chasing it is not worth the moves
            level = max(level, fresh_plan(frame, layer.load, mean, replicas) / (1 - tolerance))
            at = improve(
                frame, layer, cost, level, mean, worth * mean, fault_cost, balance_moves, BALANCE, number, steps, at
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
