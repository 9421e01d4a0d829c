"""The arithmetic of one decoder layer, and views of its weights.

Results of a row must not depend on the other rows: a replayed request shares its steps with others, yet has to continue
token for token. So matrix products are those of `arithmetic`, sums have fixed lengths (attention always spans `max_model_len`
positions, masked), and nothing chooses a kernel by the load. Weights are views into the arena, never copies: a load in
place is seen at once. Neighbours in the arena are seen as one matrix (q, k, v; gate, up).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from elastic.rank.architecture import Architecture, Arena
from elastic.rank.arithmetic import Arithmetic


def joined(arena: Arena, *names: str) -> torch.Tensor:
    """Matrices that lie one after the other in the arena, as one matrix of all their rows. Raises ValueError if not so."""
    parts = [arena[name] for name in names]
    at = parts[0].storage_offset()
    for name, part in zip(names, parts, strict=True):
        if part.storage_offset() != at:
            raise ValueError(f"{name} does not follow {names[0]} in the arena")
        at += part.numel()
    return arena.flat[parts[0].storage_offset() : at].view(-1, *parts[0].shape[1:])


@dataclass(frozen=True)
class LayerWeights:
    """Views of one layer's weights that are not an expert's."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    """[(heads + 2 * kv_heads) * head_dim, hidden]"""
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    out: torch.Tensor
    """[hidden, heads * head_dim]"""
    post_norm: torch.Tensor
    gate: torch.Tensor | None
    """Router of an MoE layer, [experts, hidden]; None in a dense layer."""
    dense13: torch.Tensor | None
    """Gate over up of a dense layer, [2 * dense_intermediate, hidden]; None in an MoE layer."""
    dense2: torch.Tensor | None

    @classmethod
    def of(cls, arch: Architecture, arena: Arena, layer: int) -> "LayerWeights":
        p = f"model.layers.{layer}."
        attn, moe = p + "self_attn.", layer in arch.moe_layers
        return cls(
            input_norm=arena[p + "input_layernorm.weight"],
            qkv=joined(arena, attn + "q_proj.weight", attn + "k_proj.weight", attn + "v_proj.weight"),
            q_norm=arena[attn + "q_norm.weight"],
            k_norm=arena[attn + "k_norm.weight"],
            out=arena[attn + "o_proj.weight"],
            post_norm=arena[p + "post_attention_layernorm.weight"],
            gate=arena[p + "mlp.gate.weight"] if moe else None,
            dense13=None if moe else joined(arena, p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight"),
            dense2=None if moe else arena[p + "mlp.down_proj.weight"],
        )


def rope_tables(arch: Architecture, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine, each [positions, 1, head_dim]: rotated x is x * cos + (halves of x swapped) * sin."""
    exponent = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), 1.0 / arch.rope_theta**exponent)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


@dataclass(frozen=True)
class Rows:
    """What all layers of a step share about its rows."""

    seqs: torch.Tensor
    """[rows] KV sequences."""
    cos: torch.Tensor
    """[rows, 1, head_dim]"""
    sin: torch.Tensor
    bias: torch.Tensor
    """[rows, 1, 1, max_model_len]: 0 up to the row's position, then -inf."""
    cells: torch.Tensor
    """[rows * 2 * kv_heads]: where the row's keys and values go in a layer's cache, counted in head vectors."""


def attention(
    x: torch.Tensor, w: LayerWeights, arch: Architecture, rows: Rows, cache: torch.Tensor, arithmetic: Arithmetic
) -> torch.Tensor:
    """Store keys and values of all rows in `cache`, then attend from each row over its own sequence up to its position.

    x [rows, hidden], normalised; cache [2, sequences, kv_heads, max_model_len, head_dim] of this layer. Rows of one
    sequence may be of one step: each sees those before it, for they are stored first.
    """
    n, (heads, kv, d) = x.shape[0], (arch.heads, arch.kv_heads, arch.head_dim)
    qkv = arithmetic.linear(x, w.qkv).view(n, heads + 2 * kv, d)
    normed = F.rms_norm(qkv[:, : heads + kv], (d,), None, arch.rms_eps)
    normed[:, :heads].mul_(w.q_norm)
    normed[:, heads:].mul_(w.k_norm)
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
    return arithmetic.linear(mixed.reshape(n, heads * d), w.out)


def mlp(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """SwiGLU. x [rows, hidden], w13 [2 * width, hidden] gate over up, w2 [hidden, width]."""
    gate, up = arithmetic.linear(x, w13).chunk(2, -1)
    return arithmetic.linear(F.silu(gate).mul_(up), w2)


def route(
    x: torch.Tensor, gate: torch.Tensor, arch: Architecture, arithmetic: Arithmetic
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [rows, top_k] float32 and logical experts [rows, top_k] int64, the most probable first."""
    weights, chosen = torch.softmax(arithmetic.linear(x, gate), -1, dtype=torch.float32).topk(arch.top_k, -1)
    if arch.norm_topk_prob:
        weights = weights.div_(weights.sum(-1, keepdim=True))
    return weights, chosen
