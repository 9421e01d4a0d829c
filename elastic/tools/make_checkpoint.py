"""Make a small random checkpoint of the Qwen3-MoE architecture, as published ones are laid out.

    python -m elastic.tools.make_checkpoint OUT --layers 4 --experts 16 --hidden 64

The same options give the same bytes. Weights are scaled so that every layer counts, attention looks at few positions and
the most probable token stands out: greedy text varies, and rounding does not change it.
"""

import argparse
import itertools
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from elastic.errors import ElasticError
from elastic.rank.architecture import Architecture, read_architecture

LOGIT_STD = 3.0
"""Of the output logits: far apart compared to float32 rounding."""
QK_GAIN = 1.3
"""Of the query and key norms: attention scores with a deviation of about its square."""
ROUTER_STD = 1.5
"""Of the router logits: some experts are clearly preferred, none always."""

SAMPLE_TEXT = """
A rank is the process that holds a slot. When a rank dies, the others release every wait for it, stop at the boundary of
the round, and give its experts to the slots that have room. The weights come from a live peer, from the memory of the
host, or from the checkpoint on disk, in this order. Then all take over the new map at once and go on, and the requests
of the dead rank continue on a survivor from the prompt and the tokens that were already sent. Nobody notices. In the
background a replacement starts, loads what it needs, captures its graphs and joins the group at the next boundary.
What is the capital of this country? Who wrote the first letter, and when will the last one arrive? There are seven
bridges over the river, and no one has ever walked across each of them exactly once. The quick brown fox jumps over
the lazy dog. Please write a short story about a lighthouse keeper who finds a message in a bottle.
"""


@dataclass(frozen=True)
class Options:
    """Sizes of the checkpoint; the names are those of the command line."""

    layers: int = 4
    experts: int = 16
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    expert_intermediate: int = 32
    dense_intermediate: int = 128
    top_k: int = 2
    vocab: int = 512
    max_position: int = 1024
    dense_layers: int = 0
    """This many layers from the first on have a dense MLP."""
    sparse_step: int = 1
    """Every n-th layer is MoE."""
    tied: bool = False
    """Output and input embeddings are one matrix."""
    eos: int = -1
    """Token that ends an answer; -1: none, answers run to their length."""
    seed: int = 0
    shards: int = 2

    def check(self) -> None:
        """Raises ElasticError with every contradiction."""
        may_be_zero = {"dense_layers", "seed", "eos"}
        problems = [
            f"{f.name}: {getattr(self, f.name)} is not positive"
            for f in fields(self)
            if f.name not in may_be_zero and f.name != "tied" and getattr(self, f.name) < 1
        ]
        if self.vocab < 256:
            problems.append(f"vocab: {self.vocab} does not hold the 256 byte tokens")
        if self.top_k > self.experts:
            problems.append(f"top_k: {self.top_k} is above experts {self.experts}")
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            problems.append(f"heads: {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            problems.append(f"head_dim: {self.head_dim} is odd")
        if not 0 <= self.dense_layers < self.layers or self.sparse_step > self.layers:
            problems.append("dense_layers, sparse_step: no layer is left for experts")
        if not -1 <= self.eos < self.vocab:
            problems.append(f"eos: {self.eos} is outside the vocabulary")
        if problems:
            raise ElasticError("make_checkpoint: " + "; ".join(problems))


def make_checkpoint(out: str | Path, options: Options) -> Path:
    """Write the folder `out`, whole or not at all, and return it.

    Raises ElasticError for contradictory options, a folder that is not empty, or when it cannot be written.
    """
    options.check()
    folder = Path(out)
    part = folder.with_name(folder.name + ".part")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ElasticError(f"{folder} exists and is not empty; remove it or choose another folder")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write_configs(part, options)
        _tokenizer(options.vocab).save(str(part / "tokenizer.json"))
        _write_weights(part, read_architecture(part), options)
        part.replace(folder)
    except OSError as error:
        raise ElasticError(f"{folder}: cannot be written: {error}") from error
    return folder


def _write_configs(folder: Path, o: Options) -> None:
    eos = None if o.eos < 0 else o.eos
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": o.sparse_step,
        "eos_token_id": eos,
        "head_dim": o.head_dim,
        "hidden_act": "silu",
        "hidden_size": o.hidden,
        "intermediate_size": o.dense_intermediate,
        "max_position_embeddings": o.max_position,
        "mlp_only_layers": list(range(o.dense_layers)),
        "moe_intermediate_size": o.expert_intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": o.heads,
        "num_experts": o.experts,
        "num_experts_per_tok": o.top_k,
        "num_hidden_layers": o.layers,
        "num_key_value_heads": o.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": o.tied,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": o.vocab,
    }
    _dump(folder / "config.json", config)
    _dump(folder / "generation_config.json", {"do_sample": False, "eos_token_id": eos})
    _dump(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": o.max_position,
        },
    )


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _tokenizer(vocab: int) -> Tokenizer:
    """Byte-level BPE with exactly `vocab` tokens: merges learned from the sample text, then pairs and triples of letters,
    so that every id is text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, min_frequency=2, show_progress=False)
    learner.train_from_iterator([SAMPLE_TEXT], trainer)
    learned = json.loads(learner.to_str())["model"]
    ids: dict[str, int] = learned["vocab"]
    merges = [(a, b) for a, b in learned["merges"]]
    letters = [c for c in alphabet if c.isalnum()]
    pairs = (a + b for a, b in itertools.product(letters, repeat=2))
    for head, tail in itertools.chain(itertools.product(letters, letters), itertools.product(pairs, letters)):
        if len(ids) >= vocab:
            break
        if head in ids and head + tail not in ids:
            ids[head + tail] = len(ids)
            merges.append((head, tail))
    if len(ids) != vocab:
        raise ElasticError(f"make_checkpoint: vocab: {vocab} is above the {len(ids)} tokens that can be made")
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _shapes(arch: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from arch.dense_shapes().items()
    wide, narrow = (arch.expert_intermediate, arch.hidden), (arch.hidden, arch.expert_intermediate)
    for layer in range(len(arch.moe_layers)):
        for expert in range(arch.experts):
            yield from zip(arch.expert_names(layer, expert), (wide, wide, narrow), strict=True)


def _random(name: str, shape: tuple[int, ...], arch: Architecture, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        gain = QK_GAIN if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        return gain * (1.0 + 0.1 * torch.randn(shape, generator=generator))
    std = 1.0 / math.sqrt(shape[1])
    if name == "model.embed_tokens.weight":
        std = LOGIT_STD / math.sqrt(arch.hidden) if arch.tied else 1.0
    elif name == "lm_head.weight":
        std *= LOGIT_STD
    elif name.endswith("mlp.gate.weight"):
        std *= ROUTER_STD
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        # attention averages and the gate halves what they pass on; without this the embedding would outweigh the layers
        std *= 2.0
    return std * torch.randn(shape, generator=generator)


def _write_weights(folder: Path, arch: Architecture, options: Options) -> None:
    names = list(_shapes(arch))
    shards = min(options.shards, len(names))
    generator = torch.Generator().manual_seed(options.seed)
    where: dict[str, str] = {}
    total = 0
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        tensors = {name: _random(name, shape, arch, generator) for name, shape in part}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        where |= dict.fromkeys(tensors, file)
        total += sum(t.numel() * 4 for t in tensors.values())
    if shards > 1:
        _dump(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m elastic.tools.make_checkpoint", description="Make a small random Qwen3-MoE checkpoint."
    )
    parser.add_argument("out", metavar="OUT", help="folder to make; must not exist or be empty")
    for option in fields(Options):
        flag = "--" + option.name.replace("_", "-")
        if isinstance(option.default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=int, default=option.default, metavar="N", help="default: %(default)s")
    given = vars(parser.parse_args(argv))
    out = given.pop("out")
    try:
        print(make_checkpoint(out, Options(**given)))
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
