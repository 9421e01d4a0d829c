"""One small random checkpoint for the session, and transformers' own greedy answers on it."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.client import Tokens, random_prompts
from healer.deployment import Deployment

VOCAB = 512
REQUESTS, ANSWER = 16, 64


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-moe"
    command = [sys.executable, "-m", "elastic.tools.make_checkpoint", str(folder), "--vocab", str(VOCAB)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def prompts() -> list[Tokens]:
    return random_prompts(REQUESTS, VOCAB, seed=7)


@pytest.fixture(scope="session")
def expected(checkpoint: Path, prompts: list[Tokens]) -> list[Tokens]:
    """Greedy tokens of transformers' Qwen3MoeForCausalLM, float32, one prompt at a time."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    torch.set_num_threads(2)
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            # an explicit mask: otherwise a token that is also the padding id would be hidden
            mask = torch.ones_like(ids)
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False
            )
            answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def whole_group(checkpoint: Path) -> Iterator[Deployment]:
    """One running group for tests that change nothing."""
    made = Deployment(checkpoint)
    try:
        asyncio.run(made.start())
        yield made
    finally:
        made.end()


@pytest.fixture
def deployment(checkpoint: Path) -> Iterator[Deployment]:
    made = Deployment(checkpoint)
    yield made
    made.end()
