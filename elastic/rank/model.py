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
from elastic.rank.layers import LayerWeights, Rows, attention, mlp, rms_norm, rope_tables, route
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
        self._math = arithmetic or open_arithmetic(device, arch.hidden, arch.expert_intermediate)

        buffers.add("dense", arena.flat)
        buffers.add("experts.w13", experts.w13)
        buffers.add("experts.w2", experts.w2)
        self.inputs = buffers.add("inputs", device.zeros(4, rows, dtype=torch.int64))
        self.logits = buffers.add("logits", device.zeros(rows, arch.vocab, dtype=torch.float32))
        self.routes = RouteTable(ep.rank, len(arch.moe_layers), arch.experts, rows, buffers, device)
        cache_shape = (arch.layers, 2, sequences, kv, length, arch.head_dim)
        self._cache = buffers.add("kv", device.zeros(*cache_shape))
        self._out = buffers.add("ep.out", device.zeros(rows, arch.hidden))
        self._y = buffers.add("ep.y", device.zeros(ep.experts_per_rank, ep.capacity * ep.max_tokens, arch.hidden))
        cos, sin = (device.to(table.to(device.dtype)) for table in rope_tables(arch, length))
        self._cos, self._sin = buffers.add("rope.cos", cos), buffers.add("rope.sin", sin)
        self._steps = buffers.add("kv.positions", device.to(torch.arange(length)))
        heads = torch.arange(2)[:, None] * (sequences * kv) + torch.arange(kv)[None]
        self._heads = buffers.add("kv.heads", device.to((heads * length).view(1, -1)))
        self._seq_stride = kv * length

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
        arch, inputs = self._arch, self.inputs[:, :rows]
        tokens, seqs, positions, routes = inputs[0], inputs[1], inputs[2], inputs[3, :, None]
        place = torch.add(positions, seqs, alpha=self._seq_stride)
        bias = self._cos.new_zeros(rows, len(self._steps)).masked_fill_(self._steps > positions[:, None], float("-inf"))
        shared = Rows(
            seqs=seqs,
            cos=self._cos.index_select(0, positions),
            sin=self._sin.index_select(0, positions),
            bias=bias[:, None, None],
            cells=(place[:, None] + self._heads).view(-1),
        )
        x = self._embed.index_select(0, tokens)
        for i, w in enumerate(self._layers):
            x = x + attention(rms_norm(x, w.input_norm, arch.rms_eps), w, arch, shared, self._cache[i], self._math)
            hidden = rms_norm(x, w.post_norm, arch.rms_eps)
            if w.dense13 is not None and w.dense2 is not None:
                x = x + mlp(hidden, w.dense13, w.dense2, self._math)
            elif w.gate is not None:
                x = x + self._moe(hidden, w.gate, self._moe_index[i], routes, nodes)
        self._math.logits(rms_norm(x, self._norm, arch.rms_eps), self._head, self.logits[:rows])

    def _moe(self, x: torch.Tensor, gate: torch.Tensor, layer: int, routes: torch.Tensor, nodes: Nodes) -> torch.Tensor:
        weights, chosen = route(x, gate, self._arch, self._math)
        physical = self.routes.physical(layer, chosen, routes)
        received = nodes.external(self._ep.dispatch, x, physical)
        w13, w2 = self._experts[layer]
        self._math.experts(received.x, received.counts, w13, w2, self._y, nodes)
        out = self._out[: x.shape[0]]
        nodes.external(self._ep.combine, self._y, physical, weights, out)
        return out
