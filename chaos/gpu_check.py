"""What the checks of a GPU's runtime share: a line of the result, the device, and how calls are timed and counted."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic.config import GroupConfig
from elastic.rank.device import Device


@dataclass(frozen=True)
class Line:
    name: str
    ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'} {self.name}: {self.text}"


@dataclass(frozen=True)
class Bench:
    config: GroupConfig
    device: Device
    work: Path


def timed_us(call: Callable[[], Any], repeats: int = 50) -> float:
    """Of one call in a CUDA graph, replayed."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / repeats


def kernels_of(call: Callable[[], Any]) -> int:
    """How many kernels `call` runs on the GPU, those of a replayed graph among them; copies and fills by the copy engines
    do not count. Raises RuntimeError where the profiler cannot be used."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() or () if event.device_type.name == "CUDA"]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)
