"""A model as wide as the large ones: hidden 7168, experts of 2048, which NIXL EP's kernels take as well."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic.rank.architecture import read_architecture
from elastic.rank.comm.nixl_ep import refuse_shape
from elastic.rank.tier import HostTier, build
from elastic.tools.make_checkpoint import main
from tests.rank.loopback import ask, open_rank

SIZES = {"layers": 1, "experts": 2, "top-k": 1, "hidden": 7168, "expert-intermediate": 2048, "heads": 8, "head-dim": 64}


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "wide"
    arguments = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
    assert main([str(folder), *arguments]) == 0
    yield folder
    # 0.4 GB that nobody needs to look at
    shutil.rmtree(tmp_path)


def test_a_wide_model_is_made_tiered_and_served(wide: Path, tmp_path: Path) -> None:
    arch = read_architecture(wide)
    refuse_shape(capacity=2, experts_per_rank=2, max_tokens=32, hidden=arch.hidden, top_k=arch.top_k)
    built = build(wide, tmp_path / "tier", torch.bfloat16)
    tier = HostTier.map(tmp_path / "tier", arch, torch.bfloat16)
    assert built.bytes > 2 * arch.experts * arch.expert_weights
    rank = open_rank(wide, max_tokens=4, max_seqs=2, max_model_len=16, capture_sizes=(4,))
    for expert in range(arch.experts):
        w13, w2 = tier.expert(0, expert)
        assert torch.equal(w13, rank.experts.w13[0, expert].bfloat16())
        assert torch.equal(w2, rank.experts.w2[0, expert].bfloat16())
    answers = rank.serve(ask("a", [1, 2, 3], 4), ask("b", [5, 6], 4))
    assert [len(tokens) for tokens in answers.values()] == [4, 4]
