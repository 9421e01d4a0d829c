"""Runs batches on the model through its step graphs: the seam between the round loop and the device."""

from array import array
from collections.abc import Collection

import torch

from elastic.config import GroupConfig
from elastic.placement.maps import Placement
from elastic.rank.architecture import Architecture, Arena, ExpertBuffers
from elastic.rank.arithmetic import Arithmetic
from elastic.rank.buffers import Buffers
from elastic.rank.comm.base import EpBackend
from elastic.rank.cuda_graph import CudaStepGraph
from elastic.rank.device import CPU, Device
from elastic.rank.graphs import CpuStepGraph, StepGraph, StepGraphs
from elastic.rank.model import Model
from elastic.rank.scheduler import Batch


class Runner:
    """One rank's model. Built once; every tensor that a step uses is allocated here or handed in, and registered.

    Weights may be filled before or after: they are read in place. All methods belong to one thread at a time.
    """

    def __init__(
        self,
        config: GroupConfig,
        arch: Architecture,
        arena: Arena,
        experts: ExpertBuffers,
        ep: EpBackend,
        buffers: Buffers,
        device: Device = CPU,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        """`arithmetic`: None for the best that the device has."""
        self.vocab = arch.vocab
        self.buffers = buffers
        self._scratch = config.max_seqs
        self._device = device
        self._model = Model(config, arch, arena, experts, ep, buffers, device, arithmetic)
        pool = torch.cuda.graph_pool_handle() if device.is_gpu else None

        def graph(rows: int) -> StepGraph:
            if device.is_gpu:
                return CudaStepGraph(rows, self._model.step, buffers, pool)
            return CpuStepGraph(rows, self._model.step, buffers)

        self.graphs = StepGraphs(config.capture_sizes, graph)
        """Has the counters: `captures`, `replays`, `address_changes`."""

    def capture(self) -> None:
        """Warm up and capture all sizes; a second call finds them captured and does nothing.

        Called by a joiner before it takes part, all peers masked, or with every rank at the same point. Only padding
        rows run, so no sequence's cache is touched. Raises ElasticError when a step cannot be captured.
        """
        if self.graphs.complete:
            return
        with torch.inference_mode():
            self._model.warm_up()
            self._load(Batch(), self._model.inputs.shape[1])
            self.graphs.capture()

    def set_placement(self, placement: Placement, live: Collection[int]) -> None:
        """Route by `placement` over the `live` ranks from the next step on; in place, only between steps.

        Raises NeedsReplan, with nothing changed, for a map of other sizes or with an expert that has no live copy.
        """
        with torch.inference_mode():
            self._model.routes.take_over(placement, live)

    def run(self, batch: Batch) -> torch.Tensor:
        """One step. Returns logits [len(batch.samples), vocab], the caller's own.

        An empty batch runs too, as padding: this rank's experts serve the others in every round. The result is worth
        nothing when a mask changed meanwhile; running the batch again is then safe, for it stores the same cells again.
        Raises ElasticError for more rows than the largest graph, or when nothing is captured; AddressMoved.
        """
        size = self.graphs.fit(batch.rows)
        with torch.inference_mode():
            self._load(batch, size)
            self.graphs.replay(size)
            wanted = torch.tensor([sample.row for sample in batch.samples], dtype=torch.int64)
            return self._model.logits.index_select(0, self._device.to(wanted))

    def _load(self, batch: Batch, size: int) -> None:
        rows, padding = batch.rows, size - batch.rows
        fields = array("q", batch.tokens)
        fields.extend([0] * padding)
        fields.extend(batch.seqs)
        fields.extend([self._scratch] * padding)
        fields.extend(batch.positions)
        fields.extend([0] * padding)
        fields.extend(range(rows))
        fields.extend([self._model.routes.padding] * padding)
        self._model.inputs[:, :size].copy_(torch.frombuffer(fields, dtype=torch.int64).view(4, size))
