"""A group of one rank: the EP backend without peers, and a rank's model loaded from a checkpoint."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from elastic.config import GroupConfig
from elastic.placement.maps import HOLE, Placement
from elastic.protocol import Emitted, Sampling, Submit
from elastic.rank.architecture import Architecture, Arena, ExpertBuffers, read_architecture
from elastic.rank.arithmetic import Arithmetic
from elastic.rank.buffers import Buffers
from elastic.rank.comm.base import LIVE, PeerFault, Received, never
from elastic.rank.runner import Runner
from elastic.rank.scheduler import Scheduler

GREEDY = Sampling()


class LoopbackEp:
    """All experts on the own rank. Receive rows start as NaN: what a step reads beyond the counts shows."""

    def __init__(self, experts_per_rank: int, max_tokens: int, hidden: int) -> None:
        self.rank, self.capacity = 0, 1
        self.experts_per_rank, self.max_tokens, self.hidden = experts_per_rank, max_tokens, hidden
        self.mask_generation = 0
        self.routed_rows: list[int] = []
        self._x = torch.full((experts_per_rank, max_tokens, hidden), float("nan"))
        self._counts = torch.zeros(experts_per_rank, dtype=torch.int32)
        self._places: list[list[int]] = []

    def endpoint(self) -> bytes:
        return b"loopback"

    def connect(
        self, peers: Mapping[int, bytes], *, deadline_s: float, give_up: Callable[[], bool] = never
    ) -> None: ...

    def disconnect(self, ranks: Collection[int]) -> None: ...

    def take_over(self, live: Collection[int], base: int) -> int:
        return self.mask_generation

    def masks(self) -> tuple[int, ...]:
        return (LIVE,)

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor) -> Received:
        counts = [0] * self.experts_per_rank
        self._places = [[0] * topk_idx.shape[1] for _ in range(x.shape[0])]
        for i, chosen in enumerate(topk_idx.tolist()):
            for k, expert in enumerate(chosen):
                if expert != HOLE:
                    self._places[i][k] = counts[expert]
                    self._x[expert, counts[expert]] = x[i]
                    counts[expert] += 1
        self._counts.copy_(torch.tensor(counts))
        self.routed_rows.append(sum(any(e != HOLE for e in chosen) for chosen in topk_idx.tolist()))
        return Received(self._x, self._counts)

    def combine(self, y: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()
        for i, chosen in enumerate(topk_idx.tolist()):
            for k, expert in enumerate(chosen):
                if expert != HOLE:
                    out[i] += topk_weights[i, k] * y[expert, self._places[i][k]]

    def release(self, ranks: Collection[int]) -> None: ...

    def clean(self, base: int) -> None: ...

    def waiting_on(self) -> tuple[int, ...]:
        return ()

    def poll_faults(self) -> list[PeerFault]:
        return []

    def close(self) -> None: ...


@dataclass
class Rank:
    """One rank with everything loaded and captured."""

    config: GroupConfig
    arch: Architecture
    arena: Arena
    experts: ExpertBuffers
    ep: LoopbackEp
    buffers: Buffers
    runner: Runner

    def scheduler(self) -> Scheduler:
        c = self.config
        return Scheduler(c.max_tokens, c.max_seqs, c.max_model_len, self.arch.vocab)

    def serve(self, *requests: Submit, scheduler: Scheduler | None = None) -> dict[str, list[int]]:
        """Run all requests together to their end; tokens by request."""
        scheduler = scheduler or self.scheduler()
        answers: dict[str, list[int]] = {r.request: [] for r in requests}
        for request in requests:
            assert scheduler.submit(request) is None
        while scheduler.has_work:
            for emitted in step(self.runner, scheduler):
                assert emitted.start == len(answers[emitted.request])
                answers[emitted.request] += emitted.tokens
        return answers


def place(runner: Runner, placement: Placement) -> None:
    """Route by it, on the only rank."""
    runner.stage_placement(placement, [0])
    runner.switch_placement()


def step(runner: Runner, scheduler: Scheduler) -> list[Emitted]:
    batch = scheduler.build()
    runner.run(batch)
    return scheduler.commit(batch, runner.choose(batch))


def load(checkpoint: Path, arch: Architecture, arena: Arena, experts: ExpertBuffers, order: list[int]) -> None:
    """Fill the buffers; expert `order[index]` of every layer goes to `index`."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(file)
    for name, view in arena.views.items():
        view.copy_(tensors[name])
    for layer in range(len(arch.moe_layers)):
        for index, expert in enumerate(order):
            gate, up, down = (tensors[name] for name in arch.expert_names(layer, expert))
            experts.w13[layer, index].copy_(torch.cat((gate, up)))
            experts.w2[layer, index].copy_(down)
            experts.contents[layer][index] = expert


def open_rank(
    checkpoint: Path,
    *,
    max_tokens: int = 32,
    max_seqs: int = 8,
    max_model_len: int = 128,
    capture_sizes: tuple[int, ...] = (4, 8, 16, 32),
    order: list[int] | None = None,
    backend: type[LoopbackEp] = LoopbackEp,
    arithmetic: Arithmetic | None = None,
) -> Rank:
    arch = read_architecture(checkpoint)
    config = GroupConfig(
        name="test",
        run_dir="run",
        checkpoint=str(checkpoint),
        ranks=1,
        max_ranks=1,
        slots_per_rank=arch.experts,
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        max_model_len=max_model_len,
        capture_sizes=capture_sizes,
    )
    order = order or list(range(arch.experts))
    arena, experts = Arena(arch.dense_shapes()), ExpertBuffers(arch, arch.experts)
    load(checkpoint, arch, arena, experts, order)
    ep, buffers = backend(arch.experts, max_tokens, arch.hidden), Buffers()
    runner = Runner(config, arch, arena, experts, ep, buffers, arithmetic=arithmetic)
    runner.capture()
    place(runner, Placement(arch.experts, 1, arch.experts, (tuple(order),) * len(arch.moe_layers)))
    return Rank(config, arch, arena, experts, ep, buffers, runner)


def ask(
    name: str, prompt: list[int], max_tokens: int, *, answer: list[int] | None = None, sampling: Sampling = GREEDY
) -> Submit:
    """A request; `answer`: what was sent to the client already."""
    return Submit(
        request=name,
        attempt=1 if answer else 0,
        tokens=(*prompt, *(answer or [])),
        prompt_len=len(prompt),
        max_tokens=max_tokens,
        sampling=sampling,
        stop_ids=(),
    )
