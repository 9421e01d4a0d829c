"""The physical expert map of a group with holes: assembled, covered, refilled. Pure numpy; the same on every rank.

A map is [layers, columns] of logical experts, `HOLE` where a column holds none. Each rank knows for certain only what its own
rows hold: vLLM's asynchronous balancer commits layer by layer, and a fault may come between two ranks' commits. So after a
fault the map is put together from every survivor's own columns, and all survivors go through the same arithmetic on it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elastic.errors import Infeasible

HOLE = -1

Map = npt.NDArray[np.int64]


class Load(NamedTuple):
    """An expert whose weights have to be put into a row."""

    layer: int
    column: int
    expert: int


class Coverage(NamedTuple):
    map: Map
    loads: tuple[Load, ...]
    """By layer, then expert."""


def own_columns(rank: int, rows: int) -> slice:
    """The columns of a rank that holds `rows` experts a layer."""
    return slice(rank * rows, (rank + 1) * rows)


def assemble(own: Mapping[int, Map], columns: int) -> Map:
    """The map of a group from each live rank's own columns, each [layers, rows]; the columns of all others are holes.

    Raises ValueError where two ranks differ in shape or a rank lies outside the `columns`.
    """
    shapes = {columns_of.shape for columns_of in own.values()}
    if len(shapes) != 1:
        raise ValueError(f"the ranks publish columns of different shapes: {sorted(shapes)}")
    layers, rows = shapes.pop()
    found = np.full((layers, columns), HOLE, dtype=np.int64)
    for rank, columns_of in own.items():
        place = own_columns(rank, rows)
        if place.stop > columns:
            raise ValueError(f"rank {rank}: its columns end at {place.stop}, the map at {columns}")
        found[:, place] = columns_of
    return found


def replicas(found: Map, experts: int) -> npt.NDArray[np.int64]:
    """Copies of every expert: [layers, experts]."""
    counts = np.zeros((len(found), experts), dtype=np.int64)
    layer, column = np.nonzero(found != HOLE)
    np.add.at(counts, (layer, found[layer, column]), 1)
    return counts


def cover(found: Map, experts: int, live: tuple[int, ...], rows: int) -> Coverage:
    """Give every expert without a copy a row of a live rank: a free one, else one of the expert with the most copies.

    Among rows of equally many copies the rank that has the fewest loads so far comes first, so that the ranks load side by
    side; then the lowest expert and column. Nothing else of the map changes. Raises Infeasible, naming a layer, where the live
    ranks have fewer rows than there are experts.
    """
    room = len(live) * rows
    if room < experts:
        raise Infeasible(f"{len(live)} ranks of {rows} rows hold {room} experts a layer, {experts} are needed")
    mine = np.concatenate([np.arange(own_columns(rank, rows).start, own_columns(rank, rows).stop) for rank in live])
    number = np.repeat(np.arange(len(live)), rows)
    covered, counts = found.copy(), replicas(found, experts)
    loads_of, loads = np.zeros(len(live), dtype=np.int64), list[Load]()
    for layer in np.flatnonzero((counts == 0).any(axis=1)):
        held, count = covered[layer, mine], counts[layer]
        for expert in np.flatnonzero(count == 0):
            spare = np.where(held == HOLE, np.iinfo(np.int64).max, count[held])
            # np.lexsort sorts by its last key first
            best = np.lexsort((mine, held, loads_of[number], -spare))[0]
            if spare[best] < 2:
                raise Infeasible(f"layer {layer}: no row to spare for expert {expert}")
            if held[best] != HOLE:
                count[held[best]] -= 1
            held[best], count[expert] = expert, 1
            loads_of[number[best]] += 1
            loads.append(Load(int(layer), int(mine[best]), int(expert)))
        covered[layer, mine] = held
    return Coverage(covered, tuple(loads))


def fill(found: Map, experts: int, rank: int, rows: int, demand: npt.NDArray[np.float64] | None = None) -> Coverage:
    """Give an empty rank experts: in each layer those of fewest copies, by `demand` ([layers, experts]) where equal.

    No expert twice on the rank unless it has more rows than there are experts. The other columns stay as they are.
    """
    place = own_columns(rank, rows)
    filled, counts, loads = found.copy(), replicas(found, experts), list[Load]()
    asked = np.zeros(counts.shape) if demand is None else np.asarray(demand, dtype=np.float64)
    for layer in range(len(found)):
        order = np.lexsort((np.arange(experts), -asked[layer], counts[layer]))
        filled[layer, place] = np.sort(np.resize(order, rows))
        loads += [Load(layer, place.start + row, int(e)) for row, e in enumerate(filled[layer, place])]
    return Coverage(filled, tuple(loads))


def primaries(found: Map, rank: int, rows: int) -> tuple[Load, ...]:
    """The rows of a rank that are the first copy of their expert: together, those of all ranks are every expert once."""
    place, own = own_columns(rank, rows), list[Load]()
    for layer in range(len(found)):
        experts, first = np.unique(found[layer], return_index=True)
        own += [
            Load(layer, int(column), int(expert))
            for expert, column in zip(experts, first, strict=True)
            if expert != HOLE and place.start <= column < place.stop
        ]
    return tuple(own)
