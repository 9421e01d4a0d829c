"""The Qwen3-MoE architecture as read from config.json, and the shapes that follow from it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic.config import read_model_shape
from elastic.errors import ElasticError
from elastic.rank.device import CPU, Device


@dataclass(frozen=True)
class Architecture:
    """Fields as in the Hugging Face config of the same meaning."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dense_intermediate: int
    """Width of the MLP in layers that are not MoE."""
    expert_intermediate: int
    experts: int
    top_k: int
    norm_topk_prob: bool
    moe_layers: tuple[int, ...]
    """Model layers that are MoE; position here = layer index in placements and expert buffers."""
    rms_eps: float
    rope_theta: float
    tied: bool
    eos_ids: tuple[int, ...]

    @property
    def expert_weights(self) -> int:
        """Numbers in one expert: w13 and w2."""
        return 3 * self.expert_intermediate * self.hidden

    def dense_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that is not an expert's, by its checkpoint name, in model order."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, h)}
        for i in range(self.layers):
            p = f"model.layers.{i}."
            shapes |= {
                p + "input_layernorm.weight": (h,),
                p + "self_attn.q_proj.weight": (q, h),
                p + "self_attn.k_proj.weight": (kv, h),
                p + "self_attn.v_proj.weight": (kv, h),
                p + "self_attn.o_proj.weight": (h, q),
                p + "self_attn.q_norm.weight": (self.head_dim,),
                p + "self_attn.k_norm.weight": (self.head_dim,),
                p + "post_attention_layernorm.weight": (h,),
            }
            if i in self.moe_layers:
                shapes[p + "mlp.gate.weight"] = (self.experts, h)
            else:
                shapes[p + "mlp.gate_proj.weight"] = (self.dense_intermediate, h)
                shapes[p + "mlp.up_proj.weight"] = (self.dense_intermediate, h)
                shapes[p + "mlp.down_proj.weight"] = (h, self.dense_intermediate)
        shapes["model.norm.weight"] = (h,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, h)
        return shapes

    def expert_names(self, moe_layer: int, expert: int) -> tuple[str, str, str]:
        """Checkpoint names of gate, up ([expert_intermediate, hidden]) and down ([hidden, expert_intermediate])."""
        p = f"model.layers.{self.moe_layers[moe_layer]}.mlp.experts.{expert}."
        return p + "gate_proj.weight", p + "up_proj.weight", p + "down_proj.weight"


def read_architecture(checkpoint: str | Path) -> Architecture:
    """Raises ElasticError naming the file and what in it is not supported."""
    read_model_shape(checkpoint)
    path = Path(checkpoint) / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for key, want in (("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)):
        if config.get(key, want) != want:
            raise ElasticError(f"{path}: {key} = {config[key]!r} is not supported, only {want!r}")
    if (rope.get("rope_type") or rope.get("type") or "default") != "default":
        raise ElasticError(f"{path}: rope scaling {rope} is not supported")
    layers, step = int(config["num_hidden_layers"]), int(config.get("decoder_sparse_step", 1))
    only_dense = config.get("mlp_only_layers") or []
    eos = config.get("eos_token_id")
    try:
        return Architecture(
            vocab=int(config["vocab_size"]),
            hidden=int(config["hidden_size"]),
            layers=layers,
            heads=int(config["num_attention_heads"]),
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]),
            dense_intermediate=int(config.get("intermediate_size") or 0),
            expert_intermediate=int(config["moe_intermediate_size"]),
            experts=int(config["num_experts"]),
            top_k=int(config["num_experts_per_tok"]),
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
            moe_layers=tuple(i for i in range(layers) if i not in only_dense and (i + 1) % step == 0),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            tied=bool(config.get("tie_word_embeddings", False)),
            eos_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),)),
        )
    except KeyError as error:
        raise ElasticError(f"{path}: key {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise ElasticError(f"{path}: {error}") from error


class Arena:
    """Named tensors in one flat allocation, so that all of them move in one transfer and none ever moves."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: Device = CPU) -> None:
        sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        self.flat = device.zeros(sum(sizes.values()))
        self.views: dict[str, torch.Tensor] = {}
        at = 0
        for name, shape in shapes.items():
            self.views[name] = self.flat[at : at + sizes[name]].view(shape)
            at += sizes[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.views[name]


class ExpertBuffers:
    """The expert weights of one rank at fixed addresses, and what they hold.

    `w13[layer, index]` is gate over up, [2 * expert_intermediate, hidden]; `w2[layer, index]` is down,
    [hidden, expert_intermediate]. `contents[layer][index]` is the logical expert, or HOLE while empty or being written.
    """

    def __init__(self, arch: Architecture, slots_per_rank: int, device: Device = CPU) -> None:
        lead = (len(arch.moe_layers), slots_per_rank)
        self.w13 = device.zeros(*lead, 2 * arch.expert_intermediate, arch.hidden)
        self.w2 = device.zeros(*lead, arch.hidden, arch.expert_intermediate)
        self.contents: list[list[int]] = [[-1] * slots_per_rank for _ in arch.moe_layers]
