"""`python -m chaos.vllm_gpu.model FOLDER`: a Qwen3-MoE checkpoint with seeded weights, 840 MiB in bf16.

The greedy answers of a random model are no measure: two logits that nearly tie come out in another order as soon as a batch
has another size, an expert another place or a request another rank. This one is made so that the right next token is far
ahead, and that it is right only if all experts that a step needs took part:

* a token is a random code of +1 and -1, and a mark of the four experts of each layer that it goes to: routing never ties;
* all experts write a projection of the code, and those of odd number add what those of even number take away, 32 times as
  strong. A token goes to two of each, so it cancels; where one is missing, or masked, it drowns the code;
* the head knows the projection of each token as its successor's: a chain through the whole vocabulary.

Attention is random and weak: it costs what it costs, and changes no token.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import argparse
import json
from pathlib import Path
from typing import Any

from chaos.vllm_cpu import model as small

SEED = 1234
FIRST = 2
"""Ids below are special."""
MARK, DISSENT, WEAK = 4.0, 32.0, 0.1
CONFIG: dict[str, Any] = small.CONFIG | {
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 8192,
    "rope_theta": 1000000.0,
}


def weights(config: dict[str, Any], seed: int = SEED, device: str = "cpu") -> dict[str, Any]:
    """By the names of Hugging Face's Qwen3-MoE, on the CPU. Hidden sizes of at least 2 * (layers * experts + inner) fit;
    `num_experts_per_tok` must be even. Raises ValueError for others."""
    import torch

    hidden, vocabulary, head = config["hidden_size"], config["vocab_size"], config["head_dim"]
    experts, inner, layers = config["num_experts"], config["moe_intermediate_size"], config["num_hidden_layers"]
    top = config["num_experts_per_tok"]
    code, marks = hidden // 2, layers * experts
    if code + marks + inner > hidden or top % 2 or experts < 2 * top:
        raise ValueError(f"hidden size {hidden} does not hold {code} + {marks} + {inner}, or top-{top} of {experts}")
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, std: float) -> Any:
        return torch.randn(*shape, generator=generator, device=device) * std

    def signs(*shape: int) -> Any:
        return torch.randint(0, 2, shape, generator=generator, device=device).float() * 2 - 1

    embedding = torch.zeros(vocabulary, hidden, device=device)
    embedding[:, :code] = signs(vocabulary, code)
    half = experts // 2
    for layer in range(layers):
        for odd in (0, 1):
            drawn = torch.rand(vocabulary, half, generator=generator, device=device).topk(top // 2).indices
            embedding.scatter_(1, code + layer * experts + 2 * drawn + odd, MARK)
    projection = signs(inner, code) / code**0.5
    order = torch.randperm(vocabulary - FIRST, generator=generator, device=device) + FIRST
    successor = torch.empty(vocabulary, dtype=torch.long, device=device)
    successor[order] = order.roll(-1)
    successor[:FIRST] = order[:FIRST]
    head_rows = torch.zeros(vocabulary, hidden, device=device)
    head_rows[successor[FIRST:], hidden - inner :] = 0.05 * embedding[FIRST:, :code] @ projection.T

    found = {"model.embed_tokens.weight": embedding, "lm_head.weight": head_rows}
    q_rows, kv_rows = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    up = torch.zeros(inner, hidden, device=device)
    up[:, :code] = projection
    for layer in range(layers):
        at = f"model.layers.{layer}."
        out = normal(hidden, q_rows, std=WEAK * q_rows**-0.5)
        out[code : code + marks] = 0.0  # nothing may change who is routed where
        found |= {
            at + "self_attn.q_proj.weight": normal(q_rows, hidden, std=hidden**-0.5),
            at + "self_attn.k_proj.weight": normal(kv_rows, hidden, std=hidden**-0.5),
            at + "self_attn.v_proj.weight": normal(kv_rows, hidden, std=hidden**-0.5),
            at + "self_attn.o_proj.weight": out,
        }
        gate = torch.zeros(experts, hidden, device=device)
        gate[range(experts), range(code + layer * experts, code + (layer + 1) * experts)] = 4.0
        found[at + "mlp.gate.weight"] = gate
        turn = torch.randperm(inner, generator=generator, device=device)
        for expert in range(experts):
            p = f"{at}mlp.experts.{expert}."
            own = torch.zeros(inner, hidden, device=device)
            own[:, code + layer * experts + expert] = 2.0
            down = torch.zeros(hidden, inner, device=device)
            rows = torch.arange(inner, device=device)
            down[hidden - inner + rows, rows] = 0.125
            down[hidden - inner + rows, turn] += 0.125 * DISSENT * (1 if expert % 2 else -1)
            found |= {p + "gate_proj.weight": own, p + "up_proj.weight": up, p + "down_proj.weight": down}
        for name, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            found[f"{at}{name}.weight"] = torch.ones(size)
        for name in ("q_norm", "k_norm"):
            found[f"{at}self_attn.{name}.weight"] = torch.ones(head)
    found["model.norm.weight"] = torch.ones(hidden)
    return {name: tensor.to(torch.bfloat16).cpu().clone() for name, tensor in found.items()}


def write(folder: Path, config: dict[str, Any] = CONFIG) -> None:
    """Configuration, tokenizer and weights. The weights come last, under another name until they are whole."""
    import torch
    from safetensors.torch import save_file

    small.write(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    known |= {f"<x{number}>": number for number in range(len(known), config["vocab_size"])}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    partial = folder / "weights.part"
    save_file(
        weights(config, device="cuda" if torch.cuda.is_available() else "cpu"), partial, metadata={"format": "pt"}
    )
    partial.rename(folder / "model.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m chaos.vllm_gpu.model", description="Write the model.")
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
