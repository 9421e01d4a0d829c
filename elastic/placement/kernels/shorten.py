"""The same target with fewer moves: the search may bring an expert to its rank in several steps, or write a slot twice."""

import numpy as np

from elastic.placement.kernels.jit import compiled
from elastic.placement.kernels.state import Flags, Frame, Ints, Layer, put, take
from elastic.placement.kernels.steps import BALANCE, record


@compiled
def shorten(
    frame: Frame, now: Layer, target: Layer, number: int, steps: Ints, begin: int, at: int, made: Ints
) -> tuple[Layer, int]:
    """Replace steps `begin` to `at`, which lead from `now` to `target`, by others for fewer moves, if they are found.

    Returns the layer after them, in which experts may be in other slots of the same rank than in `target`, and the new end
    of `steps`. `now` must not be used afterwards; `made` is room for as many steps.
    """
    moves = 0
    for i in range(begin, at):
        moves += 1 if steps[i, 4] < 0 else 2
    ranks, experts = np.empty(moves, dtype=np.int32), np.empty(moves, dtype=np.int32)
    pending = _arrivals(frame, now, target, steps[begin:at], ranks, experts)
    if pending == moves:
        return target, at
    leaving = np.zeros(len(now.held), dtype=np.bool_)
    for p in range(len(now.held)):
        if now.held[p] < 0:
            leaving[p] = target.held[p] >= 0
        else:
            leaving[p] = not target.on[frame.owner[p], now.held[p]]
    end, used = 0, 0
    while pending > 0:
        i, p, q = _next(frame, now, leaving, ranks, experts, pending)
        if i < 0 or used + 1 + (q >= 0) >= moves:
            return target, at
        expert, other = experts[i], -1
        if now.held[p] >= 0:
            other = now.held[p]
            take(frame, now, p)
        if q >= 0:
            take(frame, now, q)
            put(frame, now, q, other)
            end = record(made, end, BALANCE, number, p, expert, q, other)
            if target.on[frame.owner[q], other]:
                leaving[q] = False
                pending = _drop(ranks, experts, pending, frame.owner[q], other)
        else:
            end = record(made, end, BALANCE, number, p, expert, -1, -1)
        put(frame, now, p, expert)
        leaving[p] = False
        pending = _drop(ranks, experts, pending, frame.owner[p], expert)
        used += 1 if q < 0 else 2
    steps[begin : begin + end] = made[:end]
    return now, begin + end


@compiled
def _arrivals(frame: Frame, now: Layer, target: Layer, steps: Ints, ranks: Ints, experts: Ints) -> int:
    """Which rank gets which expert that it does not hold now, in the order of the steps; returns their number."""
    count = 0
    for i in range(len(steps)):
        for k in range(2):
            p, expert = steps[i, 2 + 2 * k], steps[i, 3 + 2 * k]
            if p < 0:
                continue
            rank = frame.owner[p]
            listed = now.on[rank, expert] or not target.on[rank, expert]
            for j in range(count):
                listed = listed or (ranks[j] == rank and experts[j] == expert)
            if not listed:
                ranks[count], experts[count] = rank, expert
                count += 1
    return count


@compiled
def _drop(ranks: Ints, experts: Ints, pending: int, rank: int, expert: int) -> int:
    at = 0
    for i in range(pending):
        if ranks[i] != rank or experts[i] != expert:
            ranks[at], experts[at] = ranks[i], experts[i]
            at += 1
    return at


@compiled
def _next(frame: Frame, now: Layer, leaving: Flags, ranks: Ints, experts: Ints, pending: int) -> tuple[int, int, int]:
    """The next arrival, its slot, and for an exchange the slot that it comes from: first what can be copied over a replica
    that leaves and is not the only one; then an exchange by which two arrive; then one that is part of a longer cycle."""
    for i in range(pending):
        for p in range(frame.first[ranks[i]], frame.first[ranks[i] + 1]):
            if leaving[p] and (now.held[p] < 0 or now.copies[now.held[p]] > 1):
                return i, p, -1
    cycle, cycle_p, cycle_q = -1, -1, -1
    for i in range(pending):
        expert = experts[i]
        for k in range(now.copies[expert]):
            q = now.holders[expert, k]
            if not leaving[q]:
                continue
            for p in range(frame.first[ranks[i]], frame.first[ranks[i] + 1]):
                if not leaving[p]:
                    continue
                if cycle < 0:
                    cycle, cycle_p, cycle_q = i, p, q
                for j in range(pending):
                    if ranks[j] == frame.owner[q] and experts[j] == now.held[p]:
                        return i, p, q
    return cycle, cycle_p, cycle_q
