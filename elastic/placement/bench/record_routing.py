"""Record which experts a Qwen3-MoE model chooses on real text, for the benchmark.

    python -m elastic.placement.bench.record_routing OUT.npz

A random checkpoint of 58 layers and 256 experts, made with the project's tool, reads text that ships with Python: the first
half of the samples is documentation of one kind, the second of another, so that the load of the second differs from that
of the first. Needs torch and transformers; about a minute.
"""

import argparse
import pydoc_data.topics
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from elastic.tools.make_checkpoint import Options, make_checkpoint

OPTIONS = Options(
    layers=58, experts=256, hidden=64, heads=2, kv_heads=1, head_dim=32, expert_intermediate=8, top_k=8, max_position=512
)
TOKENS = 512
"""Of one sample."""
SAMPLES = 24
"""Of each half."""


def texts() -> tuple[str, str]:
    """Python's manual of the language, and the source of its standard library's argument parser."""
    manual = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    return manual, Path(argparse.__file__).read_text()


def record() -> npt.NDArray[np.int32]:
    """Tokens routed to each expert; [2 halves, layers, experts]."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    counts = np.zeros((2, OPTIONS.layers, OPTIONS.experts), dtype=np.int32)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder, "model"), OPTIONS)
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
        model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        for half, text in enumerate(texts()):
            ids = tokenizer(text)["input_ids"]
            for sample in range(SAMPLES):
                piece = ids[sample * TOKENS : (sample + 1) * TOKENS]
                with torch.no_grad():
                    out = model(torch.tensor([piece]), output_router_logits=True, use_cache=False)
                for layer, logits in enumerate(out.router_logits):
                    chosen = logits.topk(OPTIONS.top_k, dim=-1).indices
                    counts[half, layer] += torch.bincount(chosen.flatten(), minlength=OPTIONS.experts).numpy()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="record the routing of the embedded model on real text")
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    np.savez_compressed(out, counts=record())
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
