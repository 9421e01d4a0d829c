"""From logical experts to physical slots, through a table that a commit changes in place."""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
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
        # the next map is put together on the host and lies on the device before it is needed
        self._next = torch.full(shape, HOLE, dtype=torch.int64, pin_memory=device.is_gpu)
        self._staged = torch.full_like(self._table, HOLE)
        self._queue = device.queue()
        self._layers = [self._table[layer].view(-1) for layer in range(layers)]

    def physical(self, layer: int, experts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[rows, k] physical slots for logical `experts` [rows, k] int64; `rows` [rows, 1] int64."""
        return self._layers[layer].take(torch.add(rows, experts, alpha=self.padding + 1))

    def stage(self, placement: Placement, live: Collection[int]) -> None:
        """Lay down the map by which `switch` makes steps route: `placement` on the `live` ranks. Beside the steps, by one
        thread at a time.

        Raises NeedsReplan, with what was staged before still there, when the map has other sizes than this rank or leaves an
        expert without a live copy: no step may run under such a map.
        """
        layers, experts, _ = self._table.shape
        self._next[..., : self.padding] = torch.from_numpy(self._rows(placement, live)).view(
            layers, experts, self.padding
        )
        with self._queue.use():
            self._staged.copy_(self._next, non_blocking=True)

    def switch(self) -> None:
        """Route by the staged map from the next step on. Only between steps, by their thread: in its queue, not waited for."""
        self._table.copy_(self._staged, non_blocking=True)

    def _rows(self, placement: Placement, live: Collection[int]) -> npt.NDArray[np.int64]:
        """[layers * experts, padding]: the physical slot for each row of a step."""
        layers, experts, _ = self._table.shape
        if (len(placement.rows), placement.experts) != (layers, experts):
            raise NeedsReplan(
                f"placement {placement.hash}: {len(placement.rows)} layers of {placement.experts} experts, "
                f"this rank has {layers} of {experts}"
            )
        owners = np.array([placement.slot_of(physical) for physical in range(len(placement.rows[0]))])
        held = np.array(placement.rows)
        usable = (held != HOLE) & np.isin(owners, list(live))
        layer, physical = np.nonzero(usable)
        logical = layer * experts + held[layer, physical]
        own = owners[physical] == self._rank
        has_own = np.bincount(logical[own], minlength=layers * experts) > 0
        chosen = own | ~has_own[logical]
        logical, physical = logical[chosen], physical[chosen]
        counts = np.bincount(logical, minlength=layers * experts)
        missing = np.flatnonzero(counts == 0)
        if len(missing):
            first_layer, first_expert = divmod(int(missing[0]), experts)
            raise NeedsReplan(
                f"placement {placement.hash}: {len(missing)} experts have no copy on slots {sorted(live)}, "
                f"the first is expert {first_expert} of MoE layer {first_layer}"
            )
        replicas = physical[np.argsort(logical, kind="stable")]
        turns = (np.arange(self.padding) + self._rank)[None] % counts[:, None]
        rows: npt.NDArray[np.int64] = replicas[(np.cumsum(counts) - counts)[:, None] + turns]
        return rows
