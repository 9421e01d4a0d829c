"""What a decoder layer does beside its products, in torch: on a CPU, where a GPU's kernels cannot be used, and to compare
those kernels with (`layer_kernels`)."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812

from elastic.rank.architecture import Architecture
from elastic.rank.device import Device


@dataclass(frozen=True)
class Tables:
    """What is computed once for all steps."""

    cos: torch.Tensor
    """[max_model_len, 1, head_dim]"""
    sin: torch.Tensor
    """Signed: rotated x is x * cos + (halves of x swapped) * sin; of the shape of `cos`."""
    steps: torch.Tensor
    """[max_model_len] 0, 1, 2, …"""
    heads: torch.Tensor
    """[1, 2 * kv_heads]: where a row's keys and values are in a layer's cache, counted in head vectors from its cell."""
    sequence: int
    """Head vectors of one sequence in one half of the cache."""

    @classmethod
    def of(cls, arch: Architecture, sequences: int, length: int, device: Device) -> "Tables":
        """For caches [2, sequences, kv_heads, length, head_dim]."""
        kv = arch.kv_heads
        cos, sin = rope_tables(arch, length)
        heads = torch.arange(2)[:, None] * (sequences * kv) + torch.arange(kv)[None]
        return cls(
            cos=device.to(cos.to(device.dtype)),
            sin=device.to(sin.to(device.dtype)),
            steps=device.to(torch.arange(length)),
            heads=device.to((heads * length).view(1, -1)),
            sequence=kv * length,
        )


@dataclass(frozen=True)
class Rows:
    """What all layers of a step share about its rows. What is derived is computed when first asked for, once a step: the
    kernels need none of it."""

    seqs: torch.Tensor
    """[rows] int64 KV sequences."""
    positions: torch.Tensor
    """[rows] int64"""
    tables: Tables

    @cached_property
    def cos(self) -> torch.Tensor:
        """[rows, 1, head_dim]"""
        return self.tables.cos.index_select(0, self.positions)

    @cached_property
    def sin(self) -> torch.Tensor:
        return self.tables.sin.index_select(0, self.positions)

    @cached_property
    def bias(self) -> torch.Tensor:
        """[rows, 1, 1, max_model_len]: 0 up to the row's position, then -inf."""
        steps, cos = self.tables.steps, self.tables.cos
        bias = cos.new_zeros(len(self.positions), len(steps))
        return bias.masked_fill_(steps > self.positions[:, None], float("-inf"))[:, None, None]

    @cached_property
    def cells(self) -> torch.Tensor:
        """[rows * 2 * kv_heads]: where the row's keys and values go in a layer's cache, counted in head vectors."""
        place = torch.add(self.positions, self.seqs, alpha=self.tables.sequence)
        return (place[:, None] + self.tables.heads).view(-1)


def rope_tables(arch: Architecture, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine, each [positions, 1, head_dim] float32; see `Tables`."""
    exponent = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), 1.0 / arch.rope_theta**exponent)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def norm(x: torch.Tensor, delta: torch.Tensor | None, w: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Arithmetic.norm`."""
    if delta is not None:
        x.add_(delta)
    return F.rms_norm(x, w.shape, w, eps)


def attend(
    qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, rows: Rows, cache: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `Arithmetic.attend`. The sums always span `max_model_len` positions, masked, so that their order is fixed."""
    n, kv, d = qkv.shape[0], cache.shape[2], cache.shape[4]
    heads = qkv.shape[1] // d - 2 * kv
    qkv = qkv.view(n, heads + 2 * kv, d)
    normed = F.rms_norm(qkv[:, : heads + kv], (d,), None, eps)
    normed[:, :heads].mul_(q_norm)
    normed[:, heads:].mul_(k_norm)
    turned = (normed * rows.cos).addcmul_(normed.roll(d // 2, -1), rows.sin)
    stored = torch.cat((turned[:, heads:], qkv[:, heads + kv :]), 1).view(-1, d)
    # A discarded step may have computed on rows that never came. What it left beyond a sequence's end is masked, but
    # zero times infinity is not zero.
    cache.view(-1, d).index_copy_(0, rows.cells, stored.nan_to_num_(0.0, 0.0, 0.0))
    mixed = F.scaled_dot_product_attention(
        turned[:, :heads].view(n, kv, heads // kv, d),
        cache[0].index_select(0, rows.seqs),
        cache[1].index_select(0, rows.seqs),
        attn_mask=rows.bias,
    )
    return mixed.reshape(n, heads * d)


def route(
    logits: torch.Tensor, table: torch.Tensor, routes: torch.Tensor, top_k: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Arithmetic.route`."""
    weights, chosen = torch.softmax(logits, -1, dtype=torch.float32).topk(top_k, -1)
    if renormalise:
        weights = weights.div_(weights.sum(-1, keepdim=True))
    return weights, table.view(-1).take(torch.add(routes[:, None], chosen, alpha=table.shape[1]))


def padded_experts(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, y: torch.Tensor, rows: int) -> None:
    """SwiGLU of all local experts at once: y[:, :rows] from x[:, :rows]; the reference for the kernels.

    Rows beyond an expert's count are computed too and ignored: one product of a fixed kind is cheaper, for small
    experts, than one for each expert, and a row's result is the same wherever it stands.
    """
    gate, up = torch.bmm(x[:, :rows], w13.transpose(1, 2)).chunk(2, -1)
    y[:, :rows] = torch.bmm(F.silu(gate).mul_(up), w2.transpose(1, 2))
