"""Step graphs: one step for a fixed number of rows, captured once and replayed, bound to the addresses of its tensors.

On a GPU this is a CUDA graph. On a CPU there is nothing to capture, so the stand-in keeps the same promises by checking:
while it captures it watches every tensor that the step touches, insists that each is either made by the step itself or
registered, and before each replay it refuses to run when one of them has moved. The step binds its tensors when it is
built, as a graph does; a tensor swapped in an attribute afterwards is therefore not used, on either device.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from elastic.errors import ElasticError
from elastic.rank.buffers import AddressMoved, Buffers

T = TypeVar("T")

HOST_READS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default})
"""Operations that bring a value to the host: no captured graph can do that, so no step may."""


class Nodes(Protocol):
    """What a step does beside tensor arithmetic; passed to it by the graph, in the thread of the graph."""

    def external(self, call: Callable[..., T], *args: Any) -> T:
        """Run a call whose inside is not the graph's concern (communication). Its tensor arguments are the step's; its
        tensor results must be registered buffers, at the same addresses in every replay."""
        ...

    def largest(self, counts: torch.Tensor) -> int:
        """The largest of `counts`: the one value a CPU step reads, to bound its matrix sizes. A GPU step does not call
        it: its grouped kernels read the counts on the device."""
        ...


Step = Callable[[int, Nodes], None]
"""step(rows, nodes): inputs are read from, outputs left in, registered buffers."""


class StepGraph(Protocol):
    """One step for `rows` rows. Called by the round loop's thread only."""

    rows: int

    def capture(self) -> None:
        """Warm up and record. Called once, when all buffers stand and hold nothing that a run of the step may spoil;
        afterwards no buffer may move. Raises ElasticError when the step cannot be captured."""
        ...

    def replay(self) -> None:
        """Run the step. Raises AddressMoved, and runs nothing, when a buffer moved since the capture."""
        ...


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """The garbage of this process may hold graphs and device memory: to free them is forbidden while a graph is captured, and
    ends the capture (cudaErrorStreamCaptureInvalidated, seen on an H200)."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class StepGraphs:
    """The graphs of a rank by row count, and the counters that prove that nothing was captured anew."""

    def __init__(self, sizes: Sequence[int], make: Callable[[int], StepGraph]) -> None:
        self.captures = 0
        self.replays = 0
        self.address_changes = 0
        self._sizes = tuple(sorted(sizes))
        self._make = make
        self._graphs: dict[int, StepGraph] = {}

    @property
    def complete(self) -> bool:
        return len(self._graphs) == len(self._sizes)

    def capture(self) -> None:
        """Capture every size that is not captured yet, largest first, so that smaller ones fit its memory."""
        missing = [rows for rows in reversed(self._sizes) if rows not in self._graphs]
        with _nothing_collected() if missing else contextlib.nullcontext():
            for rows in missing:
                graph = self._make(rows)
                graph.capture()
                self._graphs[rows] = graph
                self.captures += 1

    def fit(self, rows: int) -> int:
        """The smallest captured size that holds `rows`. Raises ElasticError when none does."""
        for size in self._sizes:
            if size >= rows:
                return size
        raise ElasticError(f"a step of {rows} rows exceeds the largest graph, {self._sizes[-1]} rows")

    def replay(self, size: int) -> None:
        """Run the graph of exactly `size` rows. Raises ElasticError when it is not captured, AddressMoved as above."""
        graph = self._graphs.get(size)
        if graph is None:
            raise ElasticError(f"no graph of {size} rows is captured; captured: {sorted(self._graphs)}")
        try:
            graph.replay()
        except AddressMoved:
            self.address_changes += 1
            raise
        self.replays += 1


class CpuStepGraph:
    """The stand-in for a CUDA graph on a CPU. See the module's docstring for what it checks."""

    def __init__(self, rows: int, step: Step, buffers: Buffers) -> None:
        self.rows = rows
        self._step = step
        self._buffers = buffers
        self._held: list[tuple[str, torch.Tensor, int]] = []
        self._nodes = _Replay(())

    def capture(self) -> None:
        self._step(self.rows, PlainNodes())
        recorder = _Recorder(self._buffers)
        with recorder:
            self._step(self.rows, recorder)
        if recorder.strangers:
            raise ElasticError(
                f"step graph of {self.rows} rows: {len(recorder.strangers)} tensors are not registered buffers: "
                f"{'; '.join(recorder.strangers[:4])}; allocate them once and add them to the registry"
            )
        buffers = self._buffers
        self._held = [(name, buffers[name], buffers.address(name)) for name in sorted(recorder.touched)]
        self._nodes = _Replay(tuple(recorder.results))

    @property
    def touched(self) -> tuple[str, ...]:
        """The buffers that the captured step reads or writes."""
        return tuple(name for name, _, _ in self._held)

    def replay(self) -> None:
        moved = [name for name, tensor, address in self._held if tensor.data_ptr() != address]
        if moved:
            raise AddressMoved(f"step graph of {self.rows} rows: moved since the capture: {', '.join(moved)}")
        self._nodes.at = 0
        self._step(self.rows, self._nodes)


def _addresses(result: Any) -> tuple[int, ...]:
    return tuple(leaf.data_ptr() for leaf in result) if isinstance(result, tuple) else ()


class PlainNodes:
    """Nodes of a run outside any graph, such as the one before a capture: nothing is checked."""

    def external(self, call: Callable[..., T], *args: Any) -> T:
        return call(*args)

    def largest(self, counts: torch.Tensor) -> int:
        return int(counts.max())


class _Replay(PlainNodes):
    """Nodes of a replay: the results of external calls must be where they were at the capture."""

    def __init__(self, results: tuple[tuple[int, ...], ...]) -> None:
        self.at = 0
        self._results = results

    def external(self, call: Callable[..., T], *args: Any) -> T:
        result = call(*args)
        if _addresses(result) != self._results[self.at]:
            name = getattr(call, "__qualname__", repr(call))
            raise AddressMoved(f"{name} returned tensors at other addresses than at the capture")
        self.at += 1
        return result


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a step; sorts its tensors into made here, registered, and strangers."""

    def __init__(self, buffers: Buffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.touched: set[str] = set()
        self.strangers: list[str] = []
        self.results: list[tuple[int, ...]] = []
        self._buffers = buffers
        self._made: dict[int, torch.Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Steps are not compiled; otherwise the first capture would import the compiler, 2 s and its memory."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in HOST_READS:
            raise ElasticError(f"the step reads a value on the host ({func}): it cannot be captured")
        self._read(str(func), (args, kwargs))
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            # Kept alive: a freed address could come back as memory that the step did not make.
            if isinstance(leaf, torch.Tensor) and self._buffers.owner(leaf) is None:
                self._made.setdefault(leaf.untyped_storage().data_ptr(), leaf)
        return out

    def external(self, call: Callable[..., T], *args: Any) -> T:
        name = getattr(call, "__qualname__", repr(call))
        self._read(name, args)
        with _disable_current_modes():
            result = call(*args)
        self._read(name, result)
        self.results.append(_addresses(result))
        return result

    def largest(self, counts: torch.Tensor) -> int:
        self._read("largest", counts)
        with _disable_current_modes():
            return int(counts.max())

    def _read(self, where: str, tree: Any) -> None:
        for leaf in tree_leaves(tree):
            if not isinstance(leaf, torch.Tensor) or leaf.numel() == 0:
                continue
            name = self._buffers.owner(leaf)
            if name is not None:
                self.touched.add(name)
            elif leaf.untyped_storage().data_ptr() not in self._made:
                self.strangers.append(f"{where} uses {leaf.dtype} {list(leaf.shape)}")
