"""The experts of one vLLM worker: what its rows hold, the maps that the model reads, and the balancer's thread.

Graph-facing tensors keep their addresses: maps are changed by `copy_` into vLLM's buffers and weights by copies into rows.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import functools
import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elastic.errors import ElasticError
from elastic.vllm.worker.checkpoint import Checkpoint
from elastic.vllm.worker.host_copy import HostCopy, Layout
from elastic.vllm.worker.maps import HOLE, Load, Map, own_columns, primaries

log = logging.getLogger("vllm.healer.in_place")

THREAD_END_S = 2.0


POLL_S = 0.001


class _End:
    """In place of the event that vLLM's balancing thread waits for: the thread ends, and nothing is logged as an error."""

    @staticmethod
    def wait(*_: object) -> None:
        raise SystemExit

    query = wait


class NoSource(ElasticError):
    """Experts whose weights are nowhere: the group has to be started anew."""


class Experts:
    def __init__(self, runner: Any, rank: int) -> None:
        """`runner`: vLLM's model runner, when the model is loaded. Raises ElasticError where it has no balancer."""
        self._runner, self.rank = runner, rank
        state = runner.eplb_state
        if state is None or len(state.model_states) != 1:
            raise ElasticError("healing in place needs EPLB on one Mixture-of-Experts model")
        self.state = state
        self.model_state = next(iter(state.model_states.values()))
        self.weights: list[list[torch.Tensor]] = [list(layer) for layer in self.model_state.model.expert_weights]
        self.rows = int(self.weights[0][0].shape[0])
        self.experts = int(self.model_state.model.num_logical_experts)
        self.held: Map | None = None
        """What the rows hold, [layers, rows], from the first change until it is through: the maps may lag behind then."""
        self.copy: HostCopy | None = None
        self.checkpoint: Checkpoint | None = None

    # --- maps ------------------------------------------------------------------------------------------------------------

    @property
    def map(self) -> Map:
        """vLLM's map of all columns, [layers, columns]. Waits for the device."""
        found: Map = self.model_state.physical_to_logical_map.cpu().numpy().astype(np.int64)
        return found

    @property
    def columns(self) -> int:
        return int(self.model_state.physical_to_logical_map.shape[1])

    def begin(self) -> Map:
        """Own columns, [layers, rows]: from the map, unless a change that failed half-way knows better.

        A synchronous rearrangement that was broken off has moved rows that no map tells of: nothing is known then.
        """
        if self.held is None:
            place = own_columns(self.rank, self.rows)
            self.held = self.map[:, place].copy()
        if rearranging.broken:
            self.held[:] = HOLE
            rearranging.broken = False
        return self.held

    def commit(self, found: Map) -> None:
        """Make `found` the map that the model reads; own rows are loaded already."""
        from vllm.distributed.eplb.eplb_state import _commit_eplb_maps

        _commit_eplb_maps(self.model_state, new_physical_to_logical_map=torch.from_numpy(found))
        _wait_for_device()
        self.held = None

    # --- weights ---------------------------------------------------------------------------------------------------------

    def keep_copy(self, path: Path, model: str, layout_only: bool = False) -> int:
        """Open the host copy and write the experts whose first copy this rank holds; returns how many bytes it wrote.

        Raises ElasticError where there is no room for the copy.
        """
        sizes = tuple(int(t[0].numel() * t.element_size()) for t in self.weights[0])
        self.copy = HostCopy(path, Layout(model, len(self.weights), self.experts, sizes))
        if layout_only:
            return 0
        written = 0
        for load in primaries(self.map, self.rank, self.rows):
            if self.copy.has(load.layer, load.expert):
                continue
            row = load.column - self.rank * self.rows
            for tensor, piece in zip(self.weights[load.layer], self.copy.row(load.layer, load.expert), strict=True):
                torch.from_numpy(piece).copy_(_bytes(tensor[row]))
                written += piece.size
            self.copy.written(load.layer, load.expert)
        return written

    def try_checkpoint(self, folder: Path) -> str:
        """Use the checkpoint as the last resort if it proves itself; returns a line that says so, or why not."""
        try:
            found = Checkpoint(folder)
        except (ElasticError, OSError) as error:
            return str(error)
        place = own_columns(self.rank, self.rows)
        if not found.proves_itself(self.weights, self.map[:, place].tolist()):
            return "the kernels use other rows than the checkpoint has"
        self.checkpoint = found
        return "rows are as in the checkpoint"

    def missing(self, loads: Iterable[Load]) -> list[Load]:
        """Of the loads of this rank those that no source has."""
        if self.checkpoint is not None:
            return []
        return [load for load in loads if self.copy is None or not self.copy.has(load.layer, load.expert)]

    def _pieces(self, load: Load) -> list[torch.Tensor]:
        """The bytes of an expert, a tensor for each of the layer's, on the host."""
        if self.copy is not None and self.copy.has(load.layer, load.expert):
            return [torch.from_numpy(piece) for piece in self.copy.row(load.layer, load.expert)]
        assert self.checkpoint is not None
        rows = self.checkpoint.row(load.layer, load.expert, self.weights[load.layer][0].dtype)
        return [row.view(torch.uint8) for row in rows]

    def load(self, loads: Iterable[Load]) -> int:
        """Put experts into own rows; loads of other ranks are left to them. Returns the bytes copied.

        Steps must not run. A row that is being filled holds nothing until it is whole. Raises NoSource before anything is
        changed.
        """
        place = own_columns(self.rank, self.rows)
        own = [load for load in loads if place.start <= load.column < place.stop]
        if lost := self.missing(own):
            raise NoSource(
                f"{len(lost)} experts have no copy left (first: layer {lost[0].layer}, expert {lost[0].expert}) and "
                f"{'the host copy does not hold them' if self.copy else 'there is no host copy'}"
            )
        held = self.begin()
        copied = 0
        for load in own:
            row = load.column - place.start
            held[load.layer, row] = HOLE
            for tensor, piece in zip(self.weights[load.layer], self._pieces(load), strict=True):
                _bytes(tensor[row]).copy_(piece, non_blocking=True)
                copied += piece.numel()
        _wait_for_device()
        for load in own:
            held[load.layer, load.column - place.start] = load.expert
        return copied

    # --- balancer --------------------------------------------------------------------------------------------------------

    def stop_balancing(self) -> bool:
        """Suppress the balancer and end its thread; returns whether the thread has ended.

        The groups that it may wait in are closed already. A thread that stays (in a read from a dead peer) may still write
        to the staging buffer, so balancing is not resumed beside it.
        """
        self._runner.eep_eplb_suppressed = True
        state, model = self.state, self.model_state
        model.rebalanced = False
        pending, model.pending_result = model.pending_result, None
        thread: threading.Thread | None = state.async_worker
        if thread is None:
            return True
        # a thread that is past its event asserts this
        state.is_async = False
        if pending is not None:
            pending.consumed_event.record()
        until = time.monotonic() + THREAD_END_S
        while thread.is_alive() and time.monotonic() < until:
            event = state.rearrange_event
            if not isinstance(event._event, _End):
                event._event = _End()
            event._recorded.set()
            thread.join(0.02)
        state.is_async = bool(state.parallel_config.eplb_config.use_async)
        if thread.is_alive():
            log.warning("[in-place] the balancer's thread has not ended: no balancing until it has")
            return False
        state.async_worker = None
        return True

    def leave_balancing(self, group: Any) -> None:
        """vLLM's communicator keeps the group that it was made with: a thread that waits in it is only freed when that is let go."""
        communicator = self.model_state.communicator
        if hasattr(communicator, "_cpu_group"):
            communicator._cpu_group = group

    def forget_communicator(self) -> None:
        """The balancer's links to all ranks, after its thread has ended. A refill makes new ones, and until then it is suppressed."""
        self.model_state.communicator = None

    @property
    def may_balance(self) -> bool:
        thread = self.state.async_worker
        return thread is None or not thread.is_alive()

    def resume_balancing(self) -> None:
        """With every slot live, on all ranks at the same step: counters start anew, the thread starts again."""
        from vllm.distributed.eplb.eplb_utils import CpuGpuEvent

        state = self.state
        state.async_worker = None
        state.rearrange_event = CpuGpuEvent()
        state.expert_rearrangement_step = state.expert_load_window_step = 0
        self.model_state.expert_load_window.zero_()
        self.model_state.expert_load_pass_buffer.zero_()
        state.start_async_loop()
        self._runner.eep_eplb_suppressed = False


class Rearranging:
    """Whether a synchronous rearrangement was broken off: rows have moved then, and no map says which."""

    def __init__(self) -> None:
        self.broken = False


rearranging = Rearranging()


def replace_rearrangement(eplb_state: Any) -> None:
    """Wrap the function that moves rows of all layers before the map of any is committed."""
    original = eplb_state.rearrange_expert_weights_inplace

    @functools.wraps(original)
    def rearrange(*args: Any, **options: Any) -> Any:
        rearranging.broken = True
        found = original(*args, **options)
        rearranging.broken = False
        return found

    eplb_state.rearrange_expert_weights_inplace = rearrange


def _bytes(row: torch.Tensor) -> torch.Tensor:
    return row.contiguous().view(torch.uint8) if row.dim() else row.view(1).view(torch.uint8)


def _wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def replace_waiting(event_class: Any) -> None:
    """Wrap the wait of vLLM's balancing thread for the main thread's stream.

    vLLM's own goes on to a copy to pageable memory, which stands in the driver until that stream is through; where a kernel in it
    waits for a dead rank, nothing that would free it may begin meanwhile. The thread waits outside CUDA instead.
    """
    original = event_class.wait

    @functools.wraps(original)
    def wait(self: Any, stream: Any = None) -> None:
        self._recorded.wait()
        while not self._event.query():
            time.sleep(POLL_S)
        original(self, stream)

    event_class.wait = wait


class Reducing:
    """Whether the balancer's sum over all ranks is under way: a kernel of NCCL, which no word frees."""

    def __init__(self) -> None:
        self._under_way = False
        self._through: Any = None

    @property
    def pending(self) -> bool:
        return self._under_way and (self._through is None or not self._through.query())

    def __enter__(self) -> None:
        self._under_way, self._through = True, None

    def __exit__(self, *_: object) -> None:
        self._through = torch.Event()
        self._through.record()


reducing = Reducing()


def replace_reduction(state_class: Any) -> None:
    """Wrap the sum of loads, the only collective of NCCL in a step that a rank of another engine is in."""
    original = state_class._allreduce_list

    @functools.wraps(original)
    def reduce(self: Any, *args: Any, **options: Any) -> Any:
        with reducing:
            return original(self, *args, **options)

    state_class._allreduce_list = reduce
