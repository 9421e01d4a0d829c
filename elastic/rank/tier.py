"""The host-memory tier: one copy a host of all weights in a shared, read-only file, mapped by every rank.

    python -m elastic.rank.tier build CHECKPOINT PATH

File: a header page (magic, length, msgpack record, zeros), then numbers of one type: dense weights in the order of
`Architecture.dense_shapes`, then each expert of each layer as w13 and w2 in one piece. The file appears under its name only
when it is whole.
"""

import argparse
import contextlib
import fcntl
import mmap
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import structlog
import torch

from elastic.errors import ElasticError
from elastic.rank.architecture import Architecture, read_architecture
from elastic.rank.checkpoint import Checkpoint
from elastic.rank.device import Device
from elastic.rank.pinned import map_pinned

MAGIC = b"elastic-tier\0\0\0\0"
VERSION = 2
HEADER_BYTES = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

log = structlog.get_logger("elastic.tier")


class Layout(msgspec.Struct, frozen=True):
    """Numbers in the file; equal only for the same architecture and type."""

    dtype: str
    """"float32" or "bfloat16"."""
    dense: int
    layers: int
    experts: int
    w13: tuple[int, int]
    w2: tuple[int, int]

    @classmethod
    def of(cls, arch: Architecture, dtype: torch.dtype) -> "Layout":
        return cls(
            dtype=str(dtype).removeprefix("torch."),
            dense=sum(torch.Size(shape).numel() for shape in arch.dense_shapes().values()),
            layers=len(arch.moe_layers),
            experts=arch.experts,
            w13=(2 * arch.expert_intermediate, arch.hidden),
            w2=(arch.hidden, arch.expert_intermediate),
        )

    @property
    def type(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def expert(self) -> int:
        return self.w13[0] * self.w13[1] + self.w2[0] * self.w2[1]

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.type.itemsize * (self.dense + self.layers * self.experts * self.expert)


class _Header(msgspec.Struct, frozen=True):
    version: int
    fingerprint: str
    layout: Layout


class Built(msgspec.Struct, frozen=True):
    """What the builder prints, as one line of JSON."""

    path: str
    bytes: int
    fingerprint: str
    built: bool
    """False: the file was there already."""
    seconds: float


class HostTier:
    """A mapped tier. Its tensors are read-only: writing to one ends the process."""

    def __init__(self, path: Path, fingerprint: str, layout: Layout, memory: mmap.mmap, descriptor: int) -> None:
        """`descriptor`: of the file, kept open for the life of this object."""
        self.path = path
        self.fingerprint = fingerprint
        """Of the checkpoint that it was built from."""
        self.pinned = False
        """Whether a GPU reads the tensors by itself, at the full speed of the bus."""
        self._layout, self._descriptor = layout, descriptor
        weakref.finalize(self, os.close, descriptor)
        self._pinning: threading.Thread | None = None
        self._use(memory)

    def _use(self, memory: mmap.mmap) -> None:
        layout = self._layout
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            numbers = torch.frombuffer(memory, dtype=layout.type, offset=HEADER_BYTES)
        # whoever has the old mapping's tensors keeps it alive
        self._dense = numbers[: layout.dense]
        self._experts = numbers[layout.dense :].view(layout.layers, layout.experts, layout.expert)

    def pin(self, device: Device) -> None:
        """On a GPU: begin to lock the pages for its copy engines, in a thread of its own; once. Until that is done, and
        where it fails (one line in the log), copies go through the driver's own buffers, which is slower."""
        if device.is_gpu and self._pinning is None:
            self._pinning = threading.Thread(target=self._pin, args=(device,), name="pin", daemon=True)
            self._pinning.start()

    def _pin(self, device: Device) -> None:
        began = time.monotonic()
        try:
            device.bind()
            self._use(map_pinned(self._descriptor, self._layout.file_bytes, torch.cuda.cudart()))  # type: ignore[no-untyped-call]
        except (ElasticError, RuntimeError) as error:
            log.warning("the host tier is not pinned: copies to the GPU are slower", why=str(error))
            return
        self.pinned = True
        log.info("the host tier is pinned", bytes=self._layout.file_bytes, seconds=time.monotonic() - began)

    def wait_pinned(self, deadline_s: float) -> bool:
        """Until `pin` has ended, well or not, or the deadline. Returns `pinned`."""
        if self._pinning is not None:
            self._pinning.join(deadline_s)
        return self.pinned

    @classmethod
    def open(cls, path: str | Path, arch: Architecture, dtype: torch.dtype = torch.float32) -> "HostTier | None":
        """Map the tier, or log why not and return None: a rank serves without it, from peers and disk."""
        try:
            return cls.map(path, arch, dtype)
        except ElasticError as error:
            log.warning("the host tier is not used", path=str(path), why=str(error))
            return None

    @classmethod
    def map(cls, path: str | Path, arch: Architecture, dtype: torch.dtype = torch.float32) -> "HostTier":
        """Map the tier. Raises ElasticError where it is absent, torn, or of another model or version."""
        path, advice = Path(path), "build it again with `python -m elastic.rank.tier build CHECKPOINT PATH`"
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = _read_header(file.read(HEADER_BYTES))
                if header.layout != Layout.of(arch, dtype):
                    raise ElasticError(f"host tier {path} is of another model or number type; {advice}")
                if size != header.layout.file_bytes:
                    raise ElasticError(
                        f"host tier {path} is torn: {size} bytes of {header.layout.file_bytes}; {advice}"
                    )
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                descriptor = os.dup(file.fileno())
        except FileNotFoundError:
            raise ElasticError(f"host tier {path}: no such file; {advice}") from None
        except (OSError, ValueError) as error:
            raise ElasticError(f"host tier {path} cannot be used: {error}; {advice}") from error
        return cls(path, header.fingerprint, header.layout, memory, descriptor)

    def dense(self) -> torch.Tensor:
        """All dense weights in one flat tensor, in the order of `Arena.flat`."""
        return self._dense

    def experts(self) -> torch.Tensor:
        """[layers, experts, numbers of one: w13, then w2]. Who copies by address keeps it meanwhile: when the pages are locked
        they get another."""
        return self._experts

    def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 [2 * expert_intermediate, hidden] and w2 [hidden, expert_intermediate] of one expert of a MoE layer."""
        flat, split = self._experts[layer, expert], self._layout.w13[0] * self._layout.w13[1]
        return flat[:split].view(self._layout.w13), flat[split:].view(self._layout.w2)


def build(checkpoint: str | Path, path: str | Path, dtype: torch.dtype = torch.float32) -> Built:
    """Make the tier of a checkpoint, unless it is there already. Safe to run twice at once: the second waits.

    Raises ElasticError for a checkpoint that lacks anything, or where the file does not fit. What ranks have mapped
    stays as it was: a new file takes the name, the old one lives until the last of them ends.
    """
    began, path = time.monotonic(), Path(path)
    arch = read_architecture(checkpoint)
    source = Checkpoint(checkpoint, arch)
    header = _Header(VERSION, source.fingerprint, Layout.of(arch, dtype))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _part_file(path) as (part, descriptor):
            new = not _is_there(path, arch, header)
            if new:
                _write(descriptor, source, header)
                part.replace(path)
    except OSError as error:
        raise ElasticError(
            f"host tier {path} cannot be written: {error.strerror} ({header.layout.file_bytes >> 20} MiB needed); "
            "check the path and the free space, or run without a host tier"
        ) from error
    return Built(str(path), header.layout.file_bytes, header.fingerprint, new, time.monotonic() - began)


def _is_there(path: Path, arch: Architecture, header: _Header) -> bool:
    try:
        return HostTier.map(path, arch, header.layout.type).fingerprint == header.fingerprint
    except ElasticError:
        return False


def _write(descriptor: int, source: Checkpoint, header: _Header) -> None:
    layout = header.layout
    os.ftruncate(descriptor, 0)
    # reserve it all first: a file system that fills up under a mapping ends the process with SIGBUS
    os.posix_fallocate(descriptor, 0, layout.file_bytes)
    memory = mmap.mmap(descriptor, layout.file_bytes)
    _fill(torch.frombuffer(memory, dtype=layout.type, offset=HEADER_BYTES), source, layout)
    body = msgspec.msgpack.encode(header)
    memory[: len(MAGIC) + 4 + len(body)] = MAGIC + len(body).to_bytes(4, "big") + body
    memory.flush()
    # the owner may map it for writing, which is how a GPU's driver locks pages; see `pinned`
    os.fchmod(descriptor, 0o644)
    os.fsync(descriptor)


def _fill(numbers: torch.Tensor, source: Checkpoint, layout: Layout) -> None:
    at = 0
    for name, shape in source.arch.dense_shapes().items():
        size = torch.Size(shape).numel()
        source.read(name, numbers[at : at + size].view(shape))
        at += size
    experts, split = numbers[layout.dense :].view(layout.layers, layout.experts, -1), layout.w13[0] * layout.w13[1]
    for layer in range(layout.layers):
        for expert in range(layout.experts):
            flat = experts[layer, expert]
            source.load_expert(layer, expert, flat[:split].view(layout.w13), flat[split:].view(layout.w2))


def _read_header(page: bytes) -> _Header:
    """Raises ValueError in words that complete "cannot be used: ..."."""
    if page[: len(MAGIC)] != MAGIC or len(page) < HEADER_BYTES:
        raise ValueError("it is not a host tier or torn")
    at = len(MAGIC) + 4
    try:
        header = msgspec.msgpack.decode(page[at : at + int.from_bytes(page[len(MAGIC) : at], "big")], type=_Header)
    except msgspec.MsgspecError as error:
        raise ValueError(f"its header is damaged ({error})") from error
    if header.version != VERSION:
        raise ValueError(f"it has version {header.version}, this program reads {VERSION}")
    return header


@contextlib.contextmanager
def _part_file(path: Path) -> Iterator[tuple[Path, int]]:
    """The file in the making, held by one builder at a time; the kernel lets the next one in when a builder dies. Gone
    from its name at the end."""
    part = path.with_name(path.name + ".part")
    while True:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # the builder before us may have given the file its final name, or removed it
            if not _names(part, descriptor):
                continue
            try:
                yield part, descriptor
            finally:
                if _names(part, descriptor):
                    part.unlink()
            return
        finally:
            os.close(descriptor)


def _names(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="elastic.rank.tier", description="The host-memory tier of a checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="write PATH from CHECKPOINT, unless it is there already")
    command.add_argument("checkpoint")
    command.add_argument("path")
    command.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        print(msgspec.json.encode(build(options.checkpoint, options.path, DTYPES[options.dtype])).decode())
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
