"""A step graph on a GPU: a CUDA graph, all sizes in one memory pool."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from elastic.errors import ElasticError
from elastic.rank.buffers import AddressMoved, Buffers
from elastic.rank.graphs import Step

T = TypeVar("T")


class _Plain:
    """Nodes of a GPU step: communication is captured like any kernel, and nothing is read on the host."""

    def external(self, call: Callable[..., T], *args: Any) -> T:
        return call(*args)

    def largest(self, counts: torch.Tensor) -> int:
        raise ElasticError("a GPU step reads no value on the host")


class CudaStepGraph:
    """Implements `StepGraph`. `pool` is shared by all sizes of a rank: only one of them runs at a time."""

    def __init__(self, rows: int, step: Step, buffers: Buffers, pool: Any) -> None:
        self.rows = rows
        self._step, self._buffers, self._pool = step, buffers, pool
        self._graph = torch.cuda.CUDAGraph()
        self._addresses: tuple[tuple[str, int], ...] = ()

    def capture(self) -> None:
        nodes = _Plain()
        try:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(self.rows, nodes)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            # thread_local: what the agent's threads ask of the device meanwhile is no part of the graph and must not end it
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(self.rows, nodes)
            # its first launch brings it to the device (7 ms for 58 layers on an H200), and must not be a step that others wait for
            self._graph.replay()
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise ElasticError(f"step graph of {self.rows} rows: {error}") from error
        self._addresses = tuple((name, self._buffers.address(name)) for name in self._buffers)

    def replay(self) -> None:
        moved = [name for name, address in self._addresses if self._buffers[name].data_ptr() != address]
        if moved:
            raise AddressMoved(f"step graph of {self.rows} rows: moved since the capture: {', '.join(moved)}")
        self._graph.replay()
