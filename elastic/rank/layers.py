"""A decoder layer, and views of its weights.

Results of a row must not depend on the other rows: a replayed request shares its steps with others, yet has to continue
token for token. So all computing is that of `arithmetic`, and nothing chooses a kernel by the load. Weights are views into
the arena, never copies: a load in place is seen at once. Neighbours in the arena are seen as one matrix (q, k, v; gate, up).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from elastic.rank.architecture import Architecture, Arena
from elastic.rank.arithmetic import Arithmetic
from elastic.rank.reference import Rows


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


def attention(
    x: torch.Tensor, w: LayerWeights, arch: Architecture, rows: Rows, cache: torch.Tensor, arithmetic: Arithmetic
) -> torch.Tensor:
    """x [rows, hidden], normalised; cache [2, sequences, kv_heads, max_model_len, head_dim] of this layer."""
    qkv = arithmetic.linear(x, w.qkv)
    return arithmetic.linear(arithmetic.attend(qkv, w.q_norm, w.k_norm, rows, cache, arch.rms_eps), w.out)


def mlp(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """SwiGLU. x [rows, hidden], w13 [2 * width, hidden] gate over up, w2 [hidden, width]."""
    gate, up = arithmetic.linear(x, w13).chunk(2, -1)
    return arithmetic.linear(F.silu(gate).mul_(up), w2)
