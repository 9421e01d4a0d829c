"""Copies into a rank's weights: on a GPU at the speed of the bus, and over when the call returns.

Large pieces go through the copy engines, on several streams. An engine spends about 20 us on a piece whatever its size, and
an expert's tensor may be a MiB, which the bus moves in as long: small pieces are read by the GPU's own threads instead, all of
them in one kernel over a table of addresses (pinned memory has the same address on the device).

The streams are not the default one, on which the steps run: a copy does not wait behind a step, nor a step behind a copy.
"""

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import structlog
import torch

STREAMS = 4
"""So that an engine that is done with one piece finds another."""
SMALL_BYTES = 8 << 20
"""Below this a piece goes through the kernel."""
CHUNK_BYTES = 32 << 10
"""Of a program of that kernel; a multiple of 16, which every tensor's address is too."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""(to, from), of the same shape and type."""

log = structlog.get_logger("elastic.copies")


class Copier:
    """Used by one thread."""

    def __init__(self, place: torch.device) -> None:
        """Made after the memory that it fills; what was queued for that memory is waited for here."""
        self._place = place
        self._streams: list[torch.cuda.Stream] = []
        self._gather: Any = None
        if place.type == "cuda":
            torch.cuda.synchronize(place)
            self._streams = [torch.cuda.Stream(place) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]
            self._driver = ctypes.CDLL("libcuda.so.1")
            try:
                from elastic.rank.kernels import gather
            except ImportError as error:
                log.info("small copies go through the copy engines, at about 60% of the bandwidth", why=str(error))
            else:
                self._gather = gather

    def run(self, pairs: Sequence[Pair], *, pinned: bool = False) -> None:
        """All of `pairs`. Raises RuntimeError for a device error; what was to be filled is then rubbish.

        `pinned`: the device may read the memory on the host that the pairs name."""
        if not self._streams:
            for to, source in pairs:
                to.copy_(source)
            return
        small: list[Pair] = []
        large: list[Pair] = []
        for pair in pairs:
            (small if self._gather is not None and _fits(*pair, pinned) else large).append(pair)
        if small:
            with torch.cuda.stream(self._streams[0]):
                self._gather(torch.from_numpy(chunks(small)).to(self._place), CHUNK_BYTES)
        for stream, part in zip(self._streams, share(large, len(self._streams)), strict=True):
            if part:
                self._issue(stream, part)
        for stream in self._streams:
            stream.synchronize()

    def _issue(self, stream: torch.cuda.Stream, pairs: Sequence[Pair]) -> None:
        """Queue copies through the driver's own call, which takes a fraction of the time that torch spends on one."""
        queue = ctypes.c_void_p(stream.cuda_stream)
        for to, source in pairs:
            if to.is_contiguous() and source.is_contiguous():
                size = ctypes.c_size_t(_bytes(to))
                code = self._driver.cuMemcpyAsync(
                    ctypes.c_uint64(to.data_ptr()), ctypes.c_uint64(source.data_ptr()), size, queue
                )
                if code:
                    raise RuntimeError(f"CUDA error: cuMemcpyAsync returned {code}")
            else:
                with torch.cuda.stream(stream):
                    to.copy_(source, non_blocking=True)


def _fits(to: torch.Tensor, source: torch.Tensor, pinned: bool) -> bool:
    """Whether the kernel may copy it: small, in whole pieces of 16 bytes, and within the device's reach."""
    size = _bytes(to)
    whole = size < SMALL_BYTES and not (size | to.data_ptr() | source.data_ptr()) % 16
    return whole and (pinned or source.is_cuda) and to.is_contiguous() and source.is_contiguous()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def chunks(pairs: Sequence[Pair]) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """[pieces, 3] rows (to, from, bytes) of at most CHUNK_BYTES, by address."""
    sizes = np.array([_bytes(to) for to, _ in pairs], dtype=np.int64)
    pieces = -(-sizes // CHUNK_BYTES)
    first = np.cumsum(pieces) - pieces
    offset = (np.arange(int(pieces.sum())) - np.repeat(first, pieces)) * CHUNK_BYTES
    to = np.repeat(np.array([to.data_ptr() for to, _ in pairs], dtype=np.int64), pieces)
    source = np.repeat(np.array([source.data_ptr() for _, source in pairs], dtype=np.int64), pieces)
    return np.stack([to + offset, source + offset, np.minimum(CHUNK_BYTES, np.repeat(sizes, pieces) - offset)], axis=1)


def share(pairs: Sequence[Pair], parts: int) -> list[list[Pair]]:
    """Split into `parts` of about the same bytes; a single large pair is cut into pieces."""
    size = max(1, -(-sum(to.numel() for to, _ in pairs) // parts))
    shares: list[list[Pair]] = [[] for _ in range(parts)]
    at, left = 0, size
    for to, source in pairs:
        if at == parts - 1 or to.numel() <= left or not (to.is_contiguous() and source.is_contiguous()):
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
