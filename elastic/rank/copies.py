"""Copies into a rank's weights: on a GPU by several streams at once, and over when the call returns.

A copy engine spends about 10 us on each piece, and an expert's tensor may be a MiB, which the bus moves in 20: pieces that
lie at regular distances, as the tensors of neighbouring experts do, are given to it as the rows of one two-dimensional copy.
(Measured on an H200: 61% of the bandwidth with one call for each of 256 tensors of 0.8 MB; a kernel that reads the host's
memory by itself reaches 46%.)

The streams are not the default one, on which the steps run: a copy does not wait behind a step, nor a step behind a copy.
"""

import ctypes
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

STREAMS = 4
"""So that an engine that is done with one piece finds another."""
MAX_RUN_BYTES = 16 << 20
"""Of a two-dimensional copy: longer ones would leave the other streams without work."""
_UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED: the address says where the memory is."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""(to, from), of the same shape and type."""


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


class Copier:
    """Used by one thread."""

    def __init__(self, place: torch.device) -> None:
        """Made after the memory that it fills; what was queued for that memory is waited for here."""
        self._streams: list[torch.cuda.Stream] = []
        if place.type == "cuda":
            torch.cuda.synchronize(place)
            self._streams = [torch.cuda.Stream(place) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]
            self._driver = ctypes.CDLL("libcuda.so.1")

    def run(self, pairs: Sequence[Pair]) -> None:
        """All of `pairs`. Raises RuntimeError for a device error; what was to be filled is then rubbish."""
        self.queue(pairs)
        self.wait()

    def queue(self, pairs: Sequence[Pair]) -> None:
        """Begin to copy `pairs`; both sides must stay as they are until `wait` returns. Raises as `run`."""
        if not self._streams:
            for to, source in pairs:
                to.copy_(source)
            return
        plain = [pair for pair in pairs if pair[0].is_contiguous() and pair[1].is_contiguous()]
        for stream, part in zip(self._streams, share(plain, len(self._streams)), strict=True):
            for run in runs(part):
                self._queue(run, stream.cuda_stream)
        with torch.cuda.stream(self._streams[0]):
            for to, source in pairs:
                if not (to.is_contiguous() and source.is_contiguous()):
                    to.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Until all that was queued is copied. Raises as `run`."""
        for stream in self._streams:
            stream.synchronize()

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


def runs(pairs: Iterable[Pair]) -> list[Run]:
    """The pairs as runs, ascending. Pieces that do not fit a neighbour's distance are runs of one."""
    pieces = sorted((to.data_ptr(), source.data_ptr(), to.numel() * to.element_size()) for to, source in pairs)
    found: list[Run] = []
    for to, source, size in pieces:
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


def share(pairs: Sequence[Pair], parts: int) -> list[list[Pair]]:
    """Split into `parts` of about the same bytes; a single large pair is cut into pieces."""
    size = max(1, -(-sum(to.numel() for to, _ in pairs) // parts))
    shares: list[list[Pair]] = [[] for _ in range(parts)]
    at, left = 0, size
    for to, source in pairs:
        if at == parts - 1 or to.numel() <= left:
            pieces = [(to, source)]
        else:
            flat_to, flat_source = to.view(-1), source.view(-1)
            cuts = (0, *range(left, to.numel(), size), to.numel())
            pieces = [(flat_to[a:b], flat_source[a:b]) for a, b in pairwise(cuts)]
        for piece in pieces:
            shares[at].append(piece)
            left -= piece[0].numel()
            if left <= 0 and at < parts - 1:
                at, left = at + 1, size
    return shares
