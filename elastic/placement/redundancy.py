"""How many losses the placement of the experts survives without a byte to load: a pure function of the map."""

from collections.abc import Collection

from elastic.placement.maps import HOLE, Placement


def losses_without_load(placement: Placement, live: Collection[int]) -> int:
    """How many ranks of `live`, whichever they are, can be lost with a copy of every expert left on another: coverage then
    needs no byte. Computed from the map: the fewest ranks that hold one expert of one layer, less one; 0 where an expert has
    one copy or none. Time grows with layers x physical slots.

    Losses with room for every expert, some of which are then loaded, are `losses_survivable`.
    """
    alive = set(live)
    fewest = len(alive)
    width = placement.slots_per_rank
    for row in placement.rows:
        held: dict[int, set[int]] = {}
        for physical, expert in enumerate(row):
            if expert != HOLE and physical // width in alive:
                held.setdefault(expert, set()).add(physical // width)
        if len(held) < placement.experts:
            return 0
        fewest = min(fewest, *map(len, held.values()))
    return max(0, fewest - 1)
