"""Copies into a rank's weights, by address: on a GPU by several streams at once.

A copy engine spends about 10 us on each piece, and an expert's tensor may be a MiB, which the bus moves in 20: pieces that
lie at regular distances, as the tensors of neighbouring experts do, are given to it as the rows of one two-dimensional copy.
(Measured on an H200: 61% of the bandwidth with one call for each of 256 tensors of 0.8 MB; a kernel that reads the host's
memory by itself reaches 46%.) Pieces are plain numbers, since to look a tensor up, and to ask it for its address, takes Python
as long as the bus needs for it.

The streams are not the default one, on which the steps run: a copy does not wait behind a step, nor a step behind a copy.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

STREAMS = 4
"""So that an engine that is done with one piece finds another."""
MAX_RUN_BYTES = 16 << 20
"""Of a copy: longer ones would leave the other streams without work."""
_UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED: the address says where the memory is."""

Piece = tuple[int, int, int]
"""(to, from, bytes): two addresses and a length."""


class Run(NamedTuple):
    """`rows` pieces of `size` bytes: from `source` on, every `source_step` bytes, to `to` on, every `to_step`."""

    to: int
    source: int
    size: int
    rows: int
    to_step: int
    source_step: int


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's API."""

    _fields_ = (
        *((f"source_{name}", kind) for name, kind in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t))),
        ("source_type", ctypes.c_int),
        *((f"source_{name}", ctypes.c_uint64) for name in ("host", "device", "array")),
        ("source_pitch", ctypes.c_size_t),
        *((f"to_{name}", kind) for name, kind in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t))),
        ("to_type", ctypes.c_int),
        *((f"to_{name}", ctypes.c_uint64) for name in ("host", "device", "array")),
        *((name, ctypes.c_size_t) for name in ("to_pitch", "width", "height")),
    )


class Queued(NamedTuple):
    """Copies under way."""

    events: tuple[Any, ...] = ()


class Copier:
    """Used by one thread."""

    def __init__(self, place: torch.device) -> None:
        """Made after the memory that it fills; what was queued for that memory is waited for here."""
        self._streams: list[torch.cuda.Stream] = []
        if place.type == "cuda":
            torch.cuda.synchronize(place)
            self._streams = [torch.cuda.Stream(place) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]
            self._driver = ctypes.CDLL("libcuda.so.1")

    def run(self, pieces: Sequence[Piece]) -> None:
        """All of `pieces`. Raises RuntimeError for a device error; what was to be filled is then rubbish."""
        self.wait(self.queue(pieces))

    def queue(self, pieces: Sequence[Piece]) -> Queued:
        """Begin to copy `pieces`; both sides must stay as they are until `wait` returns. Raises as `run`."""
        if not self._streams:
            for to, source, size in pieces:
                ctypes.memmove(to, source, size)
            return Queued()
        for stream, part in zip(self._streams, share(runs(pieces), len(self._streams)), strict=True):
            for run in part:
                self._queue(run, stream.cuda_stream)
        return Queued(tuple(stream.record_event() for stream in self._streams))

    def wait(self, queued: Queued) -> None:
        """Until all of it is copied. Raises as `run`."""
        for event in queued.events:
            event.synchronize()

    def _queue(self, run: Run, stream: int) -> None:
        """Through the driver's own calls: torch spends longer on a tensor than the bus does."""
        queue = ctypes.c_void_p(stream)
        if run.rows == 1:
            to, source = ctypes.c_uint64(run.to), ctypes.c_uint64(run.source)
            code = self._driver.cuMemcpyAsync(to, source, ctypes.c_size_t(run.size), queue)
        else:
            copy = _Copy2D(
                source_type=_UNIFIED,
                source_device=run.source,
                source_pitch=run.source_step,
                to_type=_UNIFIED,
                to_device=run.to,
                to_pitch=run.to_step,
                width=run.size,
                height=run.rows,
            )
            code = self._driver.cuMemcpy2DAsync_v2(ctypes.byref(copy), queue)
        if code:
            raise RuntimeError(f"CUDA error: the driver returned {code} for a copy of {run}")


def piece(to: torch.Tensor, source: torch.Tensor) -> Piece:
    """Of two contiguous tensors of the same size and type, which must outlive the copy. Raises ValueError."""
    if not (to.is_contiguous() and source.is_contiguous()) or (to.numel(), to.dtype) != (source.numel(), source.dtype):
        raise ValueError(f"no copy in one piece: {source.dtype} {list(source.shape)} to {to.dtype} {list(to.shape)}")
    return to.data_ptr(), source.data_ptr(), to.numel() * to.element_size()


def runs(pieces: Iterable[Piece]) -> list[Run]:
    """The pieces as runs, ascending. Those that do not fit a neighbour's distance are runs of one, long ones are cut."""
    found: list[Run] = []
    for to, source, size in sorted(pieces):
        for at in range(0, size - MAX_RUN_BYTES, MAX_RUN_BYTES):
            found.append(Run(to + at, source + at, MAX_RUN_BYTES, 1, MAX_RUN_BYTES, MAX_RUN_BYTES))
        if size > MAX_RUN_BYTES:
            rest = (size - 1) % MAX_RUN_BYTES + 1
            found.append(Run(to + size - rest, source + size - rest, rest, 1, rest, rest))
            continue
        last = found[-1] if found else None
        if last is not None and last.size == size and (last.rows + 1) * size <= MAX_RUN_BYTES:
            end_to, end_source = last.to + last.rows * last.to_step, last.source + last.rows * last.source_step
            step_to, step_source = to - last.to, source - last.source
            if last.rows == 1 and step_to >= size and step_source >= size:
                found[-1] = Run(last.to, last.source, size, 2, step_to, step_source)
                continue
            if last.rows > 1 and (to, source) == (end_to, end_source):
                found[-1] = last._replace(rows=last.rows + 1)
                continue
        found.append(Run(to, source, size, 1, size, size))
    return found


def share(all_: Iterable[Run], parts: int) -> list[list[Run]]:
    """Deal the runs out, each to the part that has the fewest bytes."""
    shares: list[list[Run]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for run in all_:
        least = sizes.index(min(sizes))
        shares[least].append(run)
        sizes[least] += run.size * run.rows
    return shares
