"""From logical experts to physical slots, through a table that a commit changes in place."""

from collections.abc import Collection

import torch

from elastic.errors import NeedsReplan
from elastic.placement.maps import HOLE, Placement
from elastic.rank.buffers import Buffers
from elastic.rank.device import CPU, Device


class RouteTable:
    """`table[layer, expert, row]`: the physical slot that row `row` of a step uses; the column after the last row is
    HOLE for ever, padding rows point at it.

    A replica on the own rank is preferred; otherwise rows are spread over the replicas by (rank + row). Which replica
    computes never changes a result.
    """

    def __init__(
        self, rank: int, layers: int, experts: int, max_tokens: int, buffers: Buffers, device: Device = CPU
    ) -> None:
        self.padding = max_tokens
        """The row index of a padding row."""
        shape = (layers, experts, max_tokens + 1)
        self._rank = rank
        self._table = buffers.add("route.table", device.zeros(*shape, dtype=torch.int64).fill_(HOLE))
        self._layers = [self._table[layer].view(-1) for layer in range(layers)]

    def physical(self, layer: int, experts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[rows, k] physical slots for logical `experts` [rows, k] int64; `rows` [rows, 1] int64."""
        return self._layers[layer].take(torch.add(rows, experts, alpha=self.padding + 1))

    def take_over(self, placement: Placement, live: Collection[int]) -> None:
        """Use `placement` on the `live` ranks from the next step on. Only between steps.

        Raises NeedsReplan, with nothing changed, when the map has other sizes than this rank or leaves an expert without
        a live copy: no step may run under such a map.
        """
        layers, experts, _ = self._table.shape
        if (len(placement.rows), placement.experts) != (layers, experts):
            raise NeedsReplan(
                f"placement {placement.hash}: {len(placement.rows)} layers of {placement.experts} experts, "
                f"this rank has {layers} of {experts}"
            )
        alive = set(live)
        replicas: list[list[int]] = [[] for _ in range(layers * experts)]
        for layer, row in enumerate(placement.rows):
            for physical, expert in enumerate(row):
                if expert != HOLE and placement.slot_of(physical) in alive:
                    replicas[layer * experts + expert].append(physical)
        missing = [divmod(i, experts) for i, held in enumerate(replicas) if not held]
        if missing:
            raise NeedsReplan(
                f"placement {placement.hash}: {len(missing)} experts have no copy on slots {sorted(alive)}, "
                f"the first is expert {missing[0][1]} of MoE layer {missing[0][0]}"
            )
        for held in replicas:
            own = [p for p in held if placement.slot_of(p) == self._rank]
            held[:] = own or held
        width = max(len(held) for held in replicas)
        padded = torch.tensor([held + [HOLE] * (width - len(held)) for held in replicas])
        counts = torch.tensor([len(held) for held in replicas])
        choice = (torch.arange(self.padding) + self._rank)[None] % counts[:, None]
        self._table[..., : self.padding].copy_(padded.gather(1, choice).view(layers, experts, self.padding))
