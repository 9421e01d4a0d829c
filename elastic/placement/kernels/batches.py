"""Steps into batches: what may run at once, without a hot link."""

import numpy as np

from elastic.placement.kernels.jit import compiled
from elastic.placement.kernels.state import Frame, Ints
from elastic.placement.kernels.steps import COVER


@compiled
def assign_batches(
    frame: Frame,
    experts: int,
    layers: int,
    rows: Ints,
    steps: Ints,
    sources: Ints,
    most: int,
    most_tier: int,
    batch: Ints,
) -> int:
    """The batch of each step; returns the number of batches.

    Steps of one layer that name a common expert, as arriving or as overwritten, keep their order, in different batches.
    In a batch a rank sends and receives at most `most` experts, and a host reads at most `most_tier` from tier or disk.
    `rows` is the map before the first step. The first step after coverage is in a later batch than all of coverage.
    """
    ranks, hosts = len(frame.first) - 1, int(frame.host.max()) + 1
    after = np.zeros((layers, experts), dtype=np.int32)
    free = 64
    used = np.zeros((free, 2 * ranks + hosts), dtype=np.int32)
    # the first batch in which each sender, receiver and host has room
    room_from = np.zeros(2 * ranks + hosts, dtype=np.int32)
    floor, count = 0, 0
    held = rows.copy()
    for i in range(len(steps)):
        number = steps[i, 1]
        if steps[i, 0] != COVER and floor == 0:
            floor = count
        b = floor
        for k in range(2):
            p, expert = steps[i, 2 + 2 * k], steps[i, 3 + 2 * k]
            if p < 0:
                continue
            b = max(b, after[number, expert])
            if held[number, p] >= 0:
                b = max(b, after[number, held[number, p]])
            b = max(b, room_from[ranks + frame.owner[p]], room_from[_source_of(frame, sources[i, k], p, ranks)])
        while True:
            if b >= free:
                more = np.zeros((free, 2 * ranks + hosts), dtype=np.int32)
                used = np.concatenate((used, more))
                free *= 2
            if _fits(frame, steps[i], sources[i], used[b], most, most_tier, ranks):
                break
            b += 1
        batch[i] = b
        count = max(count, b + 1)
        for k in range(2):
            p, expert = steps[i, 2 + 2 * k], steps[i, 3 + 2 * k]
            if p < 0:
                continue
            source = _source_of(frame, sources[i, k], p, ranks)
            used[b, ranks + frame.owner[p]] += 1
            used[b, source] += 1
            _raise_to_room(used, room_from, ranks + frame.owner[p], most)
            _raise_to_room(used, room_from, source, most if source < ranks else most_tier)
            after[number, expert] = b + 1
            if held[number, p] >= 0:
                after[number, held[number, p]] = b + 1
        for k in range(2):
            if steps[i, 2 + 2 * k] >= 0:
                held[number, steps[i, 2 + 2 * k]] = steps[i, 3 + 2 * k]
    return count


@compiled
def _source_of(frame: Frame, source: int, p: int, ranks: int) -> int:
    """The column of the counts: the rank that sends, or the host whose tier or disk is read."""
    return int(frame.owner[source] if source >= 0 else 2 * ranks + frame.host[frame.owner[p]])


@compiled
def _raise_to_room(used: Ints, room_from: Ints, column: int, most: int) -> None:
    while room_from[column] < len(used) and used[room_from[column], column] >= most:
        room_from[column] += 1


@compiled
def _fits(frame: Frame, step: Ints, source: Ints, used: Ints, most: int, most_tier: int, ranks: int) -> bool:
    """Whether a batch has room for a step; the moves of an exchange have different senders and receivers."""
    for k in range(2):
        p = step[2 + 2 * k]
        if p < 0:
            continue
        column = _source_of(frame, source[k], p, ranks)
        if used[ranks + frame.owner[p]] >= most or used[column] >= (most if column < ranks else most_tier):
            return False
    return True
