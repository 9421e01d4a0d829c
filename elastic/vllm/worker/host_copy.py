"""One copy a host of every expert's weights, as the kernels use them, in shared memory that outlives the ranks.

Rows are taken from the ranks after vLLM has post-processed them (packed, transposed, quantized), so a row that comes from here
can be copied over another as it is. Each rank writes the experts whose first copy it holds. The file lies in /dev/shm and
belongs to whoever named it: ranks create and fill it, and never remove it.

File: a header page (magic, length, JSON), one byte for each (layer, expert) that is whole, from the next page on the rows:
all tensors of an expert of a layer in one piece.
"""

import contextlib
import fcntl
import json
import mmap
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elastic.errors import ElasticError

MAGIC = b"healer-experts-1"
PAGE = 4096
ALIGN_BYTES = 256
"""Of each tensor of a row; what CUDA's own allocator keeps is 256 to 512."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Layout:
    """What the file holds; equal on all ranks of a deployment."""

    model: str
    """Hash of the model's configuration: another model's rows are refused."""
    layers: int
    experts: int
    row_bytes: tuple[int, ...]
    """Of one expert in each of a layer's tensors, in vLLM's order."""

    @property
    def stride(self) -> int:
        return sum(_aligned(size) for size in self.row_bytes)

    @property
    def rows_at(self) -> int:
        return PAGE + -(-self.layers * self.experts // PAGE) * PAGE

    @property
    def size(self) -> int:
        return self.rows_at + self.layers * self.experts * self.stride


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


class HostCopy:
    """Open it once in a process. Safe for several processes that write different experts."""

    def __init__(self, path: Path, layout: Layout) -> None:
        """Create the file, or join it. Raises ElasticError, naming the file, where there is no room or it is another model's."""
        self.path, self.layout = path, layout
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ElasticError(f"{path}: cannot open the host copy of experts: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                self._agree()
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self.memory = mmap.mmap(self._file, layout.size)
        except BaseException:
            os.close(self._file)
            raise
        self._bytes: Bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self._whole = self._bytes[PAGE : PAGE + layout.layers * layout.experts].reshape(layout.layers, layout.experts)

    @property
    def descriptor(self) -> int:
        return self._file

    def _agree(self) -> None:
        wanted = json.dumps(asdict(self.layout) | {"row_bytes": list(self.layout.row_bytes)}, sort_keys=True).encode()
        head = len(MAGIC) + 4
        if head + len(wanted) > PAGE:
            raise ElasticError(f"{self.path}: {len(self.layout.row_bytes)} tensors a row are too many for the header")
        if os.fstat(self._file).st_size == 0:
            try:
                # memory is taken here: a lack of it later would be a SIGBUS in the middle of a copy
                os.posix_fallocate(self._file, 0, self.layout.size)
            except OSError as error:
                os.ftruncate(self._file, 0)
                gib = self.layout.size / 2**30
                raise ElasticError(f"{self.path}: no room for {gib:.1f} GiB of experts: {error.strerror}") from error
            os.pwrite(self._file, MAGIC + len(wanted).to_bytes(4, "little") + wanted, 0)
            return
        found = os.pread(self._file, PAGE, 0)
        record = found[head : head + int.from_bytes(found[len(MAGIC) : head], "little")]
        if found[: len(MAGIC)] != MAGIC or record != wanted:
            raise ElasticError(f"{self.path}: holds the experts of another model; remove the file")

    def has(self, layer: int, expert: int) -> bool:
        return bool(self._whole[layer, expert])

    def absent(self) -> int:
        """Experts that nobody has written yet, all layers together."""
        return int(self._whole.size - np.count_nonzero(self._whole))

    def row(self, layer: int, expert: int) -> tuple[Bytes, ...]:
        """The memory of an expert, a piece for each tensor; to read when `has` says so."""
        at, pieces = self.layout.rows_at + (layer * self.layout.experts + expert) * self.layout.stride, list[Bytes]()
        for size in self.layout.row_bytes:
            pieces.append(self._bytes[at : at + size])
            at += _aligned(size)
        return tuple(pieces)

    def written(self, layer: int, expert: int) -> None:
        """Say that `row` has been filled; before this nobody reads it."""
        self._whole[layer, expert] = 1

    def close(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)
        self._whole = self._bytes.reshape(0, 0)
        with contextlib.suppress(BufferError):  # rows are still in somebody's hands; the mapping goes with them
            self.memory.close()
        os.close(self._file)
