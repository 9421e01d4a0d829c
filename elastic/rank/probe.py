"""The active check of a device before it is trusted with a slot: memory, arithmetic, the copy to and from the host.

A device that failed and came back often answers every query and computes wrongly, or runs at a fraction of its speed. So a
new rank in a slot with a history does some work whose result is known. What it cannot see: faults that need heat or hours.
"""

import time
from collections.abc import Iterator

import msgspec
import torch

from elastic.errors import ElasticError
from elastic.rank.device import Device

MEMORY_SHARE = 0.5
"""Of the memory that is free; checked in chunks."""
CHUNK_BYTES = 256 << 20
PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
MATMUL_SIZE = 2048
MATMUL_ROUNDS = 20
COPY_BYTES = 256 << 20
CPU_BYTES = 32 << 20
"""A process's own memory is the kernel's business: on the CPU a small piece is enough to prove the arithmetic."""


class ProbeReport(msgspec.Struct, frozen=True):
    memory_bytes: int
    seconds: float
    to_device_gb_s: float
    """1e9 bytes a second; 0 on the CPU."""
    to_host_gb_s: float


def probe(device: Device) -> ProbeReport:
    """Takes about a second for 40 GB on a modern GPU. Raises ElasticError naming the check that failed."""
    began = time.monotonic()
    budget = _budget(device)
    _memory(device, budget)
    _arithmetic(device)
    up, down = _copies(device) if device.is_gpu else (0.0, 0.0)
    return ProbeReport(budget, time.monotonic() - began, up, down)


def _budget(device: Device) -> int:
    if not device.is_gpu:
        return CPU_BYTES
    return int(torch.cuda.mem_get_info(device.place)[0] * MEMORY_SHARE)


def _memory(device: Device, budget: int) -> None:
    """Write all chunks with a pattern, then read all: a fault that mirrors one address to another shows too."""
    chunks = [torch.empty(size, dtype=torch.uint8, device=device.place) for size in _sizes(budget)]
    for pattern in PATTERNS:
        for number, chunk in enumerate(chunks):
            # differs from chunk to chunk
            chunk.fill_(pattern ^ (number & 0xFF))
        for number, chunk in enumerate(chunks):
            wrong = int((chunk != (pattern ^ (number & 0xFF))).sum())
            if wrong:
                raise ElasticError(
                    f"probe: memory: {wrong} bytes read back other than written (pattern {pattern:#04x})"
                )


def _sizes(budget: int) -> Iterator[int]:
    while budget > 0:
        yield min(CHUNK_BYTES, budget)
        budget -= CHUNK_BYTES


def _arithmetic(device: Device) -> None:
    """Whole numbers small enough to be exact in bfloat16 products and float32 sums: the result is known to the bit."""
    size = MATMUL_SIZE if device.is_gpu else MATMUL_SIZE // 8
    generator = torch.Generator().manual_seed(7)
    left = torch.randint(-8, 9, (size, size), generator=generator)
    right = torch.randint(-8, 9, (size, size), generator=generator)
    want = (left.double() @ right.double()).float()
    on_left, on_right = (device.to(m.to(device.dtype)) for m in (left, right))
    expected = device.to(want)
    rounds = MATMUL_ROUNDS if device.is_gpu else 1
    for number in range(rounds):
        # the rounding of the result to the weights' type is the same everywhere, and the sums before it are exact
        got = on_left @ on_right
        if not torch.equal(got, expected.to(device.dtype)):
            raise ElasticError(
                f"probe: arithmetic: a matrix product of known result came out wrong in round {number + 1}"
            )


def _copies(device: Device) -> tuple[float, float]:
    """Bandwidth to the device and back, and whether what came back is what went."""
    host = torch.randint(
        0, 256, (COPY_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7)
    ).pin_memory()
    back, on_device = (
        torch.empty_like(host).pin_memory(),
        torch.empty(COPY_BYTES, dtype=torch.uint8, device=device.place),
    )
    on_device.copy_(host)
    speeds = []
    for source, target in ((host, on_device), (on_device, back)):
        torch.cuda.synchronize(device.place)
        began = time.monotonic()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device.place)
        speeds.append(COPY_BYTES / (time.monotonic() - began) / 1e9)
    if not torch.equal(back, host):
        raise ElasticError("probe: copy: bytes came back from the device other than they went")
    return speeds[0], speeds[1]
