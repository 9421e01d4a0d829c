"""Fault tolerance for its own sake: a second copy in place of a third one, where the balance does not suffer."""

import numpy as np

from elastic.placement.kernels.jit import compiled
from elastic.placement.kernels.state import Frame, Ints, Layer, put, take
from elastic.placement.kernels.steps import PROTECT, record


@compiled
def protect(frame: Frame, layer: Layer, level: float, most_moves: int, number: int, steps: Ints, at: int) -> int:
    """Up to `most_moves` steps, the most loaded of the sole experts first; no rank goes above `level` that was not."""
    moves = 0
    for expert in np.argsort(-layer.load, kind="mergesort"):
        if moves == most_moves:
            break
        if layer.copies[expert] != 1:
            continue
        p = _slot_for(frame, layer, expert, level)
        if p >= 0:
            if layer.held[p] >= 0:
                take(frame, layer, p)
            put(frame, layer, p, expert)
            at = record(steps, at, PROTECT, number, p, expert, -1, -1)
            moves += 1
    return at


@compiled
def _slot_for(frame: Frame, layer: Layer, expert: int, level: float) -> int:
    """The slot whose rank stays lightest; another host comes first."""
    home = frame.host[frame.owner[layer.holders[expert, 0]]]
    share = layer.load[expert] / 2
    best, best_near, best_load = -1, False, 0.0
    for rank in frame.live:
        if layer.on[rank, expert]:
            continue
        near = frame.host[rank] == home
        for p in range(frame.first[rank], frame.first[rank + 1]):
            held = layer.held[p]
            after = layer.rank_load[rank] + share
            if held >= 0:
                count = layer.copies[held]
                if count < 3:
                    continue
                after -= layer.load[held] / count
                more = layer.load[held] / (count - 1) - layer.load[held] / count
                fits = True
                for k in range(count):
                    q = layer.holders[held, k]
                    if q != p and layer.rank_load[frame.owner[q]] + more > level:
                        fits = False
                if not fits:
                    continue
            if after > max(level, layer.rank_load[rank]):
                continue
            if best < 0 or (near, after) < (best_near, best_load):
                best, best_near, best_load = p, near, after
    return best
