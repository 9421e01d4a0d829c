"""Runs batches on the model through its step graphs: the seam between the round loop and the device."""

from array import array
from collections.abc import Collection

import torch

from elastic.config import GroupConfig
from elastic.placement.maps import Placement
from elastic.protocol import Sampling
from elastic.rank.architecture import Architecture, Arena, ExpertBuffers
from elastic.rank.arithmetic import Arithmetic
from elastic.rank.buffers import Buffers
from elastic.rank.comm.base import EpBackend
from elastic.rank.cuda_graph import CudaStepGraph
from elastic.rank.device import CPU, Device
from elastic.rank.graphs import CpuStepGraph, StepGraph, StepGraphs
from elastic.rank.model import Model
from elastic.rank.sampling import choose
from elastic.rank.scheduler import Batch, Sample


class Runner:
    """One rank's model. Built once; every tensor that a step uses is allocated here or handed in, and registered.

    Weights may be filled before or after: they are read in place. All methods but `stage_placement` belong to one thread at
    a time.
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
        self._ep = ep
        self._scratch = config.max_seqs
        self._device = device
        # pinned: a copy from other memory waits for all that was queued before it, the step included
        self._fields = device.host(4 * config.max_tokens, dtype=torch.int64)
        self._greedy = device.host(config.max_tokens, dtype=torch.int64)
        self._model = Model(config, arch, arena, experts, ep, buffers, device, arithmetic)
        pool = torch.cuda.graph_pool_handle() if device.is_gpu else None

        def graph(rows: int) -> StepGraph:
            if device.is_gpu:
                return CudaStepGraph(rows, self._model.step, buffers, pool)
            return CpuStepGraph(rows, self._model.step, buffers)

        self.graphs = StepGraphs(config.capture_sizes, graph)
        """Has the counters: `captures`, `replays`, `address_changes`."""

    def capture(self) -> None:
        """Warm up and capture all sizes, and do once all that a step is; a second call finds them captured and does nothing.

        Called by a joiner before it takes part, all peers masked, or with every rank at the same point. Only padding
        rows run, so no sequence's cache is touched. Raises ElasticError when a step cannot be captured.
        """
        if self.graphs.complete:
            return
        with torch.inference_mode():
            self._model.warm_up()
            self._load(Batch(), self._model.inputs.shape[1])
            self.graphs.capture()
        if self._device.is_gpu:
            self._rehearse()

    def _rehearse(self) -> None:
        """A kernel is loaded by its first use, which takes 10 ms on an H200, while all others wait for this rank."""
        greedy, drawn = Sample(0, 0, Sampling()), Sample(0, 0, Sampling(temperature=1.0, top_p=0.9))
        batch = Batch((0,), (self._scratch,), (0,), (greedy, drawn))
        self._ep.begin_step()
        self.run(batch)
        self._ep.end_step()
        self.choose(batch)

    def stage_placement(self, placement: Placement, live: Collection[int]) -> None:
        """Make ready to route by `placement` over the `live` ranks; beside the steps, by one thread at a time.

        Raises NeedsReplan, with nothing changed, for a map of other sizes or with an expert that has no live copy.
        """
        with torch.inference_mode():
            self._model.routes.stage(placement, live)

    def switch_placement(self) -> None:
        """Route by what was staged from the next step on; in place, only between steps."""
        with torch.inference_mode():
            self._model.routes.switch()

    @property
    def runs_behind(self) -> bool:
        """Whether a step runs on when `run` has returned."""
        return self._device.is_gpu

    def run(self, batch: Batch) -> None:
        """Launch one step; on a GPU it has not ended when this returns, and no other may be launched before it has.

        An empty batch runs too, as padding: this rank's experts serve the others in every round. The result is worth
        nothing when a mask changed meanwhile; running the batch again is then safe, for it stores the same cells again.
        Raises ElasticError for more rows than the largest graph, or when nothing is captured; AddressMoved.
        """
        size = self.graphs.fit(batch.rows)
        with torch.inference_mode():
            self._load(batch, size)
            self.graphs.replay(size)
            self._greedy[:size].copy_(self._model.greedy[:size], non_blocking=True)

    def choose(self, batch: Batch) -> list[int]:
        """The tokens of `batch.samples`. The step of `batch` has ended, and is the last that was run; as for `logits`."""
        with torch.inference_mode():
            return choose(self._greedy[: batch.rows].tolist(), self._model.logits, batch.samples)

    def logits(self, batch: Batch) -> torch.Tensor:
        """[len(batch.samples), vocab] float32, the caller's own."""
        with torch.inference_mode():
            return self._model.logits[[sample.row for sample in batch.samples]]

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
        here = self._fields[: len(fields)]
        here.copy_(torch.frombuffer(fields, dtype=torch.int64))
        self._model.inputs[:, :size].copy_(here.view(4, size), non_blocking=True)
