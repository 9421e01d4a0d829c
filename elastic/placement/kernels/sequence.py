"""The order of the steps of all layers, what each brings, and where each move reads."""

import numpy as np

from elastic.placement.kernels.jit import compiled
from elastic.placement.kernels.state import Flags, Floats, Frame, Ints, fill_from, heaviest, new_layer, put, take
from elastic.placement.kernels.steps import COVER, PROTECT


@compiled
def trace(frame: Frame, loads: Floats, rows: Ints, usable: Flags, steps: Ints, start: Floats, after: Floats) -> None:
    """The busiest rank's load in mean rank loads: of each layer of `rows` (`start`), and after each step (`after`).

    The steps of a layer follow each other in `steps`; layers ascend.
    """
    at = 0
    for number in range(len(rows)):
        layer = new_layer(frame, loads[number])
        fill_from(frame, layer, rows[number], usable)
        mean = layer.load.sum() / len(frame.live)
        busiest = heaviest(frame, layer)
        start[number] = busiest / mean
        while at < len(steps) and steps[at, 1] == number:
            p, expert, q, other = steps[at, 2], steps[at, 3], steps[at, 4], steps[at, 5]
            given = layer.held[p]
            if given >= 0:
                take(frame, layer, p)
            if q >= 0:
                take(frame, layer, q)
                put(frame, layer, q, other)
            put(frame, layer, p, expert)
            # a lone first copy changes one rank and lightens none
            if given < 0 and layer.copies[expert] == 1:
                busiest = max(busiest, layer.rank_load[frame.owner[p]])
            else:
                busiest = heaviest(frame, layer)
            after[at] = busiest / mean
            at += 1


@compiled
def merge_keys(steps: Ints, start: Floats, after: Floats, keys: Floats) -> None:
    """A sort key for each step, ascending: coverage, then by what a step brings per move, then protection.

    The keys of one layer never descend, so that a stable sort keeps its order: a step that prepares the next one takes
    the mean of both (pool adjacent violators).
    """
    count = len(steps)
    gain, moves = np.empty(count), np.empty(count)
    first = np.empty(count, dtype=np.int64)
    at = 0
    while at < count:
        number = steps[at, 1]
        reached = start[number]
        blocks = 0
        end = at
        while end < count and steps[end, 1] == number:
            kind = steps[end, 0]
            if kind in (COVER, PROTECT):
                keys[end] = -np.inf if kind == COVER else np.inf
            else:
                gain[blocks] = reached - after[end]
                moves[blocks] = 1.0 if steps[end, 4] < 0 else 2.0
                first[blocks] = end
                blocks += 1
                while blocks > 1 and gain[blocks - 1] * moves[blocks - 2] > gain[blocks - 2] * moves[blocks - 1]:
                    gain[blocks - 2] += gain[blocks - 1]
                    moves[blocks - 2] += moves[blocks - 1]
                    blocks -= 1
            reached = after[end]
            end += 1
        block = -1
        for i in range(at, end):
            if steps[i, 0] in (COVER, PROTECT):
                continue
            if block + 1 < blocks and first[block + 1] == i:
                block += 1
            keys[i] = -gain[block] / moves[block]
        at = end


@compiled
def choose_sources(
    frame: Frame, rows: Ints, readable: Flags, steps: Ints, near_s: float, far_s: float, sources: Ints
) -> None:
    """For each move the slot it reads when the steps are made in order, or -1: no rank holds the expert; [steps, 2].

    Of several copies the one is read that lets its rank finish sending first; a buffer that the plan itself has written is
    read only if there is no other.
    """
    now = rows.copy()
    written = np.zeros(rows.shape, dtype=np.bool_)
    sent_s = np.zeros(len(frame.first) - 1, dtype=np.float64)
    for p in range(rows.shape[1]):
        if not readable[frame.owner[p]]:
            now[:, p] = -1
    for i in range(len(steps)):
        number, p, q = steps[i, 1], steps[i, 2], steps[i, 4]
        sources[i, 0] = _source(frame, now[number], written[number], sent_s, steps[i, 3], frame.owner[p], near_s, far_s)
        sources[i, 1] = -1
        if q >= 0:
            sources[i, 1] = _source(
                frame, now[number], written[number], sent_s, steps[i, 5], frame.owner[q], near_s, far_s
            )
            now[number, q] = steps[i, 5]
            written[number, q] = True
        now[number, p] = steps[i, 3]
        written[number, p] = True


@compiled
def _source(
    frame: Frame, now: Ints, written: Flags, sent_s: Floats, expert: int, to: int, near_s: float, far_s: float
) -> int:
    best, best_written, best_s, best_link = -1, False, 0.0, 0.0
    for p in range(len(now)):
        if now[p] != expert:
            continue
        rank = frame.owner[p]
        link = near_s if frame.domain[rank] == frame.domain[to] else far_s
        done = sent_s[rank] + link
        if best < 0 or (written[p], done) < (best_written, best_s):
            best, best_written, best_s, best_link = p, written[p], done, link
    if best >= 0:
        sent_s[frame.owner[best]] += best_link
    return best
