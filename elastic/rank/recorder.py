"""Writes down each step of this rank, for checkers that trust none of its code: only where the group allows fault injection.

What is written is read from where it takes effect: masks from the back end, routes from the table's memory, addresses from the
tensors. A line is one write to a file opened for appending, so what a killed rank has told stays. On two busy cores it costs
a step about 0.1 ms.
"""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from elastic.flight import Boot, Emission, StepLine, Stepped, Viewed
from elastic.placement.maps import HOLE, Row
from elastic.protocol import Emitted, Rejected
from elastic.rank.buffers import Buffers
from elastic.rank.comm.base import MASKED, EpBackend
from elastic.rank.gate import Gate
from elastic.rank.graphs import StepGraphs
from elastic.view import View

TABLE_BYTES = 1 << 20
"""A route table above this, or on a GPU, is read at a commit only."""


class StepRecorder:
    """`committing` is called by the worker while the rank stands, or by the round loop, as all else. A file that cannot be written ends
    the recording with one line in the log, never the rank."""

    def __init__(
        self,
        path: Path,
        slot: int,
        incarnation: int,
        ep: EpBackend,
        gate: Gate,
        buffers: Buffers,
        graphs: StepGraphs,
        contents: Callable[[], tuple[Row, ...]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slot, self._incarnation = slot, incarnation
        self._ep, self._gate, self._buffers, self._graphs = ep, gate, buffers, graphs
        self._contents, self._clock = contents, clock
        self._encoder = msgspec.json.Encoder()
        self._addresses: tuple[int, ...] = ()
        self._address_hash = ""
        self._ran: Stepped | None = None
        self._round = 0
        table = buffers["route.table"]
        self._reads_table = table.device.type == "cpu" and table.nbytes <= TABLE_BYTES
        self._file = -1
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            print(f"step records: {path}: cannot be written: {error.strerror}", flush=True)
        self._write(
            Boot(
                slot=slot,
                incarnation=incarnation,
                pid=os.getpid(),
                at=clock(),
                capacity=ep.capacity,
                slots_per_rank=ep.experts_per_rank,
            )
        )

    def committing(self, view: View, round_: int, base: int) -> None:
        """A view has been taken over; the first step under it, of `round_`, has not run. `base`: the number of its dispatch."""
        self._write(
            Viewed(
                at=self._clock(),
                incarnation=self._incarnation,
                epoch=view.epoch,
                live=view.live,
                placement_hash=view.placement.hash,
                rows=view.placement.rows,
                contents=self._contents(),
                routed=self._routed(),
                table_hash=self._table_hash(),
                next_round=round_,
                base=base,
            )
        )

    def ran(self, view: View | None, round_: int, rows: int, began: float) -> None:
        """A step has run; nobody has decided yet whether it counts."""
        masks = self._ep.masks()
        self._round = round_
        self._ran = Stepped(
            at=self._clock(),
            began=began,
            incarnation=self._incarnation,
            round=round_,
            epoch=view.epoch if view else 0,
            placement_hash=view.hash if view else "",
            table_hash=self._table_hash() if self._reads_table else "",
            captures=self._graphs.captures,
            address_hash=self._hash_addresses(),
            committed=False,
            masked=tuple(s for s in (view.live if view else ()) if s != self._slot and masks[s] == MASKED),
            halted=self._gate.halted,
            rows=rows,
        )

    def ended(self, *, committed: bool) -> None:
        if self._ran is not None:
            self._write(msgspec.structs.replace(self._ran, committed=committed))
            self._ran = None

    def emitting(self, messages: Sequence[Emitted | Rejected]) -> None:
        """Before they are handed to the gateway."""
        tokens = tuple((m.request, m.attempt, m.start, m.tokens) for m in messages if isinstance(m, Emitted))
        if any(part[3] for part in tokens):
            self._write(Emission(at=self._clock(), incarnation=self._incarnation, round=self._round, tokens=tokens))

    def _hash_addresses(self) -> str:
        found = tuple(self._buffers[name].data_ptr() for name in self._buffers)
        if found != self._addresses:
            self._addresses = found
            text = ",".join(f"{name}={at}" for name, at in zip(self._buffers, found, strict=True))
            self._address_hash = _digest(text.encode())
        return self._address_hash

    def _table_hash(self) -> str:
        return _digest(self._buffers["route.table"].cpu().numpy().tobytes())

    def _routed(self) -> tuple[tuple[int, ...], ...]:
        """The last column is for padding rows, which go nowhere."""
        table = self._buffers["route.table"].cpu().numpy()[..., :-1]
        flat = table.reshape(-1, table.shape[-1])
        per_rank = self._ep.experts_per_rank
        return tuple(
            tuple(int(slot) for slot in np.unique(row[row != HOLE] // per_rank)) if (row != HOLE).all() else ()
            for row in flat
        )

    def _write(self, line: StepLine) -> None:
        if self._file < 0:
            return
        try:
            os.write(self._file, self._encoder.encode(line) + b"\n")
        except OSError as error:
            print(f"step records: cannot be written any more: {error.strerror}", flush=True)
            os.close(self._file)
            self._file = -1


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
