"""The forward pass of a step, bound to its buffers: decode, prefill and replay are the same rows of tokens."""

import torch

from elastic.config import GroupConfig
from elastic.placement.maps import HOLE
from elastic.rank.architecture import Architecture, Arena, ExpertBuffers
from elastic.rank.arithmetic import Arithmetic, open_arithmetic
from elastic.rank.buffers import Buffers
from elastic.rank.comm.base import EpBackend
from elastic.rank.device import CPU, Device
from elastic.rank.graphs import Nodes
from elastic.rank.layers import LayerWeights, attention, mlp
from elastic.rank.reference import Rows, Tables
from elastic.rank.routing import RouteTable


class Model:
    """Qwen3-MoE, data-parallel but for its experts.

    Inputs are the rows of `inputs` [4, max_tokens] int64: token id, KV sequence, position, row for the route table.
    The output is `logits` [max_tokens, vocab]. Sequence `max_seqs` of the cache is scratch, for padding rows.
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
        rows, length, kv = config.max_tokens, config.max_model_len, arch.kv_heads
        sequences = config.max_seqs + 1
        self._arch, self._ep, self._buffers, self._device = arch, ep, buffers, device
        self._min_rows = config.min_rows
        self._math = arithmetic or open_arithmetic(device, arch)

        buffers.add("dense", arena.flat)
        buffers.add("experts.w13", experts.w13)
        buffers.add("experts.w2", experts.w2)
        self.inputs = buffers.add("inputs", device.zeros(4, rows, dtype=torch.int64))
        self.logits = buffers.add("logits", device.zeros(rows, arch.vocab, dtype=torch.float32))
        self.routes = RouteTable(ep.rank, len(arch.moe_layers), arch.experts, rows, buffers, device)
        self._route_tables = buffers["route.table"].unbind()
        cache_shape = (arch.layers, 2, sequences, kv, length, arch.head_dim)
        self.greedy = buffers.add("greedy", device.zeros(rows, dtype=torch.int64))
        self._cache = buffers.add("kv", device.zeros(*cache_shape))
        self._out = buffers.add("ep.out", device.zeros(rows, arch.hidden))
        self._y = buffers.add("ep.y", device.zeros(ep.experts_per_rank, ep.capacity * ep.max_tokens, arch.hidden))
        self._tables = tables = Tables.of(arch, sequences, length, device)
        buffers.add("rope.cos", tables.cos)
        buffers.add("rope.sin", tables.sin)
        buffers.add("kv.positions", tables.steps)
        buffers.add("kv.heads", tables.heads)

        self._layers = [LayerWeights.of(arch, arena, i) for i in range(arch.layers)]
        self._experts = [(experts.w13[i], experts.w2[i]) for i in range(len(arch.moe_layers))]
        self._moe_index = {layer: i for i, layer in enumerate(arch.moe_layers)}
        self._embed = arena["model.embed_tokens.weight"]
        self._norm = arena["model.norm.weight"]
        self._head = self._embed if arch.tied else arena["lm_head.weight"]

    def warm_up(self) -> None:
        """One empty exchange, by which the backend's receive buffers become known and registered."""
        x = self._device.zeros(self._min_rows, self._arch.hidden)
        nowhere = self._device.zeros(self._min_rows, self._arch.top_k, dtype=torch.int64).fill_(HOLE)
        received = self._ep.dispatch(x, nowhere)
        self._ep.combine(
            self._y, nowhere, self._device.zeros(*nowhere.shape, dtype=torch.float32), self._out[: self._min_rows]
        )
        if not self._device.is_gpu:
            # on a GPU they belong to the graph that captures them
            self._buffers.add("ep.x", received.x)
            self._buffers.add("ep.counts", received.counts)

    def step(self, rows: int, nodes: Nodes) -> None:
        """Run rows `[:rows]` of the inputs; at least as many as the device's arithmetic needs."""
        arch, math = self._arch, self._math
        tokens, seqs, positions, routes = self.inputs[:, :rows].unbind()
        shared = Rows(seqs, positions, self._tables)
        x = self._embed.index_select(0, tokens)
        delta: torch.Tensor | None = None
        for i, w in enumerate(self._layers):
            hidden = math.norm(x, delta, w.input_norm, arch.rms_eps)
            delta = attention(hidden, w, arch, shared, self._cache[i], math)
            hidden = math.norm(x, delta, w.post_norm, arch.rms_eps)
            if w.dense13 is not None and w.dense2 is not None:
                delta = mlp(hidden, w.dense13, w.dense2, math)
            elif w.gate is not None:
                delta = self._moe(hidden, w.gate, self._moe_index[i], routes, nodes)
        math.logits(math.norm(x, delta, self._norm, arch.rms_eps), self._head, self.logits[:rows])
        torch.argmax(self.logits[:rows], -1, out=self.greedy[:rows])

    def _moe(self, x: torch.Tensor, gate: torch.Tensor, layer: int, routes: torch.Tensor, nodes: Nodes) -> torch.Tensor:
        arch, table = self._arch, self._route_tables[layer]
        logits = self._math.linear(x, gate)
        weights, physical = self._math.route(logits, table, routes, arch.top_k, arch.norm_topk_prob)
        received = nodes.external(self._ep.dispatch, x, physical)
        w13, w2 = self._experts[layer]
        self._math.experts(received.x, received.counts, w13, w2, self._y, nodes)
        out = self._out[: x.shape[0]]
        nodes.external(self._ep.combine, self._y, physical, weights, out)
        return out
