"""`python model.py DEST`: a tiny Qwen3-MoE's configuration and byte-level tokenizer, without weights."""

# mypy: disable-error-code="import-not-found, import-untyped"
import json
import sys
from pathlib import Path

EXPERTS, LAYERS, VOCABULARY = 8, 2, 384
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "model_max_length": 2048,
    "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}


def write(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet]
    words += [f"<x{number}>" for number in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", CONFIG),
        ("generation_config.json", {"bos_token_id": 0, "eos_token_id": 1}),
        ("tokenizer_config.json", TOKENIZER),
    ):
        (folder / name).write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
