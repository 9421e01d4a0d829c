"""The table that all ranks sum up before every step, in a group with empty slots.

vLLM gives each data-parallel rank a column (tokens, graph mode, …) and takes minima and unanimity over all of them. An empty
slot's column stays zero, which reads as "no graph": all survivors would run eager for ever. So a live slot's column stands in
for it after the sum; every minimum, maximum and vote is then the one over the live slots.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import functools
import traceback
from collections.abc import Callable
from typing import Any

from elastic.vllm.worker.slots import Slots


class LeftGroup(RuntimeError):
    """A step in a group that this worker has left: the engine must not run one before it has an order."""


class Table:
    """What the replaced functions need to know; the worker's part keeps it up to date."""

    def __init__(self) -> None:
        self.stand_ins: tuple[tuple[int, int], ...] = ()
        self.left = False
        self.on_fault: Callable[[], None] | None = None

    def set(self, slots: Slots) -> None:
        self.stand_ins, self.left = slots.stand_ins(), False

    def fill(self, table: Any) -> Any:
        """In place; `table` is [rows, slots]."""
        for slot, voice in self.stand_ins:
            table[:, slot] = table[:, voice]
        return table


table = Table()


def _faulted(error: Exception) -> RuntimeError:
    """Leave the group so that peers that wait in it fail, too. The frames of the error hold the group alive: without them its
    sockets close."""
    words = f"{type(error).__name__}: {error}"
    traceback.clear_frames(error.__traceback__)
    table.left = True
    if table.on_fault is not None:
        table.on_fault()
    return RuntimeError(f"data-parallel sync failed: {words}")


def _synced(sync: Callable[[], Any]) -> Any:
    if table.left:
        raise LeftGroup("this worker has left its data-parallel group and waits for an order")
    failed: RuntimeError | None = None
    try:
        found = sync()
    except Exception as error:
        failed = _faulted(error)
    if failed is not None:
        raise failed
    return table.fill(found)


def replace_sync(parallel_state: Any, dp_utils: Any) -> None:
    """Wrap both of vLLM's: model runner V2's `cpu_all_reduce_`, which nothing else uses, and V1's `_run_ar`."""
    for_v2, for_v1 = parallel_state.GroupCoordinator.cpu_all_reduce_, dp_utils._run_ar

    @functools.wraps(for_v2)
    def cpu_all_reduce_(self: Any, tensor: Any) -> Any:
        return _synced(lambda: for_v2(self, tensor))

    @functools.wraps(for_v1)
    def run_ar(*args: Any, **options: Any) -> Any:
        return _synced(lambda: for_v1(*args, **options))

    parallel_state.GroupCoordinator.cpu_all_reduce_ = cpu_all_reduce_
    dp_utils._run_ar = run_ar


def replace_retry(sentinel: Any) -> None:
    """Wrap stock `retry` of a worker: it makes the group anew that a failed step has left."""
    original = sentinel.retry

    @functools.wraps(original)
    def retry(self: Any, request: Any) -> Any:
        found = original(self, request)
        table.left = False
        return found

    sentinel.retry = retry
