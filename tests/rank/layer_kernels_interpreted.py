"""Run by `test_layer_kernels` in a process of its own, in Triton's interpreter; prints what it found as JSON.

python -m tests.rank.layer_kernels_interpreted CHECKPOINT
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

from elastic.rank.architecture import read_architecture
from elastic.rank.arithmetic import Arithmetic, CpuArithmetic, TritonArithmetic
from elastic.rank.arithmetic_check import check_layers
from elastic.rank.device import CPU
from tests.rank.loopback import Rank, ask, open_rank
from tests.rank.test_model import prompt, trace

SHAPES = (
    {"hidden": 160, "heads": 4, "kv_heads": 2, "head_dim": 16, "experts": 6, "top_k": 3},
    {"hidden": 44, "heads": 3, "kv_heads": 1, "head_dim": 10, "experts": 5, "top_k": 3, "norm_topk_prob": False},
    {"hidden": 200, "heads": 8, "kv_heads": 1, "head_dim": 64, "experts": 130, "top_k": 8},
    {"hidden": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "experts": 8, "top_k": 1},
)


def rank(checkpoint: Path, arithmetic: Arithmetic) -> Rank:
    return open_rank(checkpoint, max_tokens=4, max_seqs=3, capture_sizes=(4,), arithmetic=arithmetic)


def main(checkpoint: Path) -> None:
    arch = read_architecture(checkpoint)
    found = [
        (each.name, each.problem, each.error)
        for shape in SHAPES
        for each in check_layers(TritonArithmetic(), CPU, replace(arch, **shape))
    ]
    # a prompt in chunks beside another request, on sequences that steps of the same process used before
    requests = [ask("one", prompt(5), 2), ask("two", prompt(2, 1), 3)]
    tokens, logits = trace(rank(checkpoint, TritonArithmetic()), *requests, discard=2)
    alone = trace(rank(checkpoint, TritonArithmetic()), requests[0])[1]["one"]
    wanted, wanted_logits = trace(rank(checkpoint, CpuArithmetic()), *requests)
    worst = max(float((logits[name] - wanted_logits[name]).abs().max()) for name in logits)
    report = {
        "found": found,
        "tokens": tokens == wanted,
        "logits": worst,
        "same bits": torch.equal(logits["one"], alone),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
