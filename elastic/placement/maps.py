"""Where every expert lives: the logical-to-physical map of a group, with replicas and holes.

A *physical slot* is `slot * slots_per_rank + index`: the `index`-th expert buffer of the rank in that slot, one per layer.
A *hole* (`HOLE`) is a physical slot that holds no expert.
"""

import hashlib
from collections.abc import Collection, Iterator
from functools import cached_property

import msgspec

from elastic.errors import ElasticError

HOLE = -1

Row = tuple[int, ...]
"""The experts of one layer by physical slot; length `capacity * slots_per_rank`."""


class Placement(msgspec.Struct, frozen=True, dict=True):
    """An immutable map; `rows[layer][physical slot]` is a logical expert or `HOLE`."""

    experts: int
    """Logical experts per MoE layer."""
    capacity: int
    """Slots of the group (`max_ranks`), live or not."""
    slots_per_rank: int
    rows: tuple[Row, ...]
    """One row per MoE layer, in model order (dense layers have no row)."""

    @cached_property
    def hash(self) -> str:
        """A stable 16-digit digest: equal on two processes only if the maps are equal."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()

    def physical(self, slot: int) -> range:
        """The physical slots of the rank in `slot`."""
        return range(slot * self.slots_per_rank, (slot + 1) * self.slots_per_rank)

    def slot_of(self, physical: int) -> int:
        return physical // self.slots_per_rank

    def of_rank(self, slot: int) -> tuple[Row, ...]:
        """What one rank holds: `[layer][index]`."""
        span = self.physical(slot)
        return tuple(row[span.start : span.stop] for row in self.rows)

    def replicas(self, layer: int, expert: int) -> Iterator[int]:
        """The physical slots that hold `expert`, ascending."""
        return (p for p, held in enumerate(self.rows[layer]) if held == expert)

    def uncovered(self, live: Collection[int]) -> list[tuple[int, int]]:
        """Every (layer, expert) without a copy on a live slot."""
        alive = set(live)
        missing: list[tuple[int, int]] = []
        for layer, row in enumerate(self.rows):
            held = {e for p, e in enumerate(row) if e != HOLE and self.slot_of(p) in alive}
            missing += [(layer, e) for e in range(self.experts) if e not in held]
        return missing

    def only(self, live: Collection[int]) -> "Placement":
        """The same map with every slot outside `live` turned into holes."""
        alive = set(live)
        rows = tuple(tuple(e if self.slot_of(p) in alive else HOLE for p, e in enumerate(row)) for row in self.rows)
        return msgspec.structs.replace(self, rows=rows)

    def check(self) -> None:
        """Raise ElasticError, naming layer and slot, where the map is malformed."""
        width = self.capacity * self.slots_per_rank
        for layer, row in enumerate(self.rows):
            if len(row) != width:
                raise ElasticError(f"placement layer {layer}: {len(row)} physical slots, expected {width}")
            for slot in range(self.capacity):
                span = self.physical(slot)
                held = [e for e in row[span.start : span.stop] if e != HOLE]
                if len(set(held)) != len(held):
                    raise ElasticError(f"placement layer {layer} slot {slot}: two replicas of one expert on one rank")
                if any(not 0 <= e < self.experts for e in held):
                    raise ElasticError(f"placement layer {layer} slot {slot}: expert outside 0..{self.experts - 1}")


class Move(msgspec.Struct, frozen=True):
    """Fill one expert buffer: `expert` of `layer` into `index` of the rank in `slot`."""

    layer: int
    expert: int
    slot: int
    index: int
    source_slot: int = HOLE
    """The live rank to copy from, or HOLE: no live copy, take the host tier, else the checkpoint."""
    source_index: int = HOLE


class Plan(msgspec.Struct, frozen=True):
    """What turns the present contents into `target`.

    Moves whose destination is in use by the present map are listed in `overwrites`; they may only run while the group is
    parked, or after a commit of `vacated`, the present map without those destinations (and still covering).
    Moves in `fills` go to holes and may run while the group serves. No source of a move is a destination of another.
    """

    target: Placement
    vacated: Placement
    fills: tuple[Move, ...]
    overwrites: tuple[Move, ...]
