"""One layer while it is planned: what each slot holds, and what follows from it."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elastic.placement.kernels.jit import compiled

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


class Frame(NamedTuple):
    """What does not change: the ranks."""

    owner: Ints
    """Rank of each physical slot; [slots]."""
    first: Ints
    """First physical slot of each rank; [ranks + 1]."""
    host: Ints
    domain: Ints
    live: Ints
    """The ranks of the next view, ascending."""


class Layer(NamedTuple):
    """What changes; every replica of an expert takes an equal share of its load."""

    load: Floats
    """[experts]"""
    held: Ints
    """Expert or HOLE; [slots]. Slots of ranks that are not live are holes."""
    copies: Ints
    """Replicas of each expert; [experts]."""
    holders: Ints
    """The slots of those replicas, in the first `copies` columns; [experts, ranks]."""
    on: Flags
    """Which rank holds which expert; [ranks, experts]."""
    rank_load: Floats
    """[ranks]"""


@compiled
def new_layer(frame: Frame, load: Floats) -> Layer:
    """A layer of holes."""
    ranks, experts = len(frame.first) - 1, len(load)
    return Layer(
        load,
        np.full(len(frame.owner), -1, dtype=np.int32),
        np.zeros(experts, dtype=np.int32),
        np.empty((experts, ranks), dtype=np.int32),
        np.zeros((ranks, experts), dtype=np.bool_),
        np.zeros(ranks, dtype=np.float64),
    )


@compiled
def duplicate(layer: Layer) -> Layer:
    """A copy to try something with."""
    return Layer(
        layer.load,
        layer.held.copy(),
        layer.copies.copy(),
        layer.holders.copy(),
        layer.on.copy(),
        layer.rank_load.copy(),
    )


@compiled
def put(frame: Frame, layer: Layer, p: int, expert: int) -> None:
    """Place a replica in the hole `p`."""
    rank = frame.owner[p]
    count = layer.copies[expert]
    share = layer.load[expert] / (count + 1)
    if count > 0:
        less = layer.load[expert] / count - share
        for k in range(count):
            layer.rank_load[frame.owner[layer.holders[expert, k]]] -= less
    layer.holders[expert, count] = p
    layer.copies[expert] = count + 1
    layer.on[rank, expert] = True
    layer.rank_load[rank] += share
    layer.held[p] = expert


@compiled
def take(frame: Frame, layer: Layer, p: int) -> None:
    """Make slot `p` a hole."""
    expert = layer.held[p]
    rank = frame.owner[p]
    count = layer.copies[expert]
    share = layer.load[expert] / count
    more = layer.load[expert] / (count - 1) - share if count > 1 else 0.0
    at = 0
    for k in range(count):
        q = layer.holders[expert, k]
        if q == p:
            at = k
        else:
            layer.rank_load[frame.owner[q]] += more
    # keeps the order of the others: which copy is first must not depend on the history
    for k in range(at, count - 1):
        layer.holders[expert, k] = layer.holders[expert, k + 1]
    layer.copies[expert] = count - 1
    layer.on[rank, expert] = False
    layer.rank_load[rank] -= share
    layer.held[p] = -1


@compiled
def fill_from(frame: Frame, layer: Layer, row: Ints, usable: Flags) -> None:
    """Take over the slots of `row` whose ranks are `usable`; a second copy on one rank is left out."""
    for p in range(len(row)):
        expert = row[p]
        rank = frame.owner[p]
        if expert >= 0 and usable[rank] and not layer.on[rank, expert]:
            put(frame, layer, p, expert)


@compiled
def heaviest(frame: Frame, layer: Layer) -> float:
    most = 0.0
    for rank in frame.live:
        most = max(most, layer.rank_load[rank])
    return most


@compiled
def least_busiest(frame: Frame, load: Floats) -> float:
    """A lower bound of the busiest rank's load for any placement: the mean, or the largest share of one replica when all
    slots are given to the most loaded experts."""
    slots = 0
    for rank in frame.live:
        slots += min(frame.first[rank + 1] - frame.first[rank], len(load))
    ranks = len(frame.live)
    counts = np.ones(len(load), dtype=np.int32)
    mean = load.sum() / ranks
    shares = load.copy()
    for _ in range(slots - len(load)):
        top = int(np.argmax(shares))
        if shares[top] <= mean or counts[top] >= ranks:
            break
        counts[top] += 1
        shares[top] = load[top] / counts[top]
    return float(max(mean, shares.max()))


@compiled
def spread(frame: Frame, layer: Layer, expert: int, without: int, rank: int) -> bool:
    """Whether `expert`, with the copy in slot `without` (-1: none) gone and one on `rank` (-1: none) more, would have
    copies on two hosts; or has only one copy, for which there is nothing to spread."""
    seen = frame.host[rank] if rank >= 0 else -1
    count = 1 if rank >= 0 else 0
    for k in range(layer.copies[expert]):
        q = layer.holders[expert, k]
        if q == without:
            continue
        host = frame.host[frame.owner[q]]
        if seen >= 0 and host != seen:
            return True
        seen = host
        count += 1
    return count < 2
