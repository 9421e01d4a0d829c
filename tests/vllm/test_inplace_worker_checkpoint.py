"""Lost experts may come from the checkpoint only where the kernels use its rows as they are."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from elastic.errors import ElasticError
from elastic.vllm.worker.checkpoint import Checkpoint

HIDDEN, INNER, EXPERTS, LAYERS = 8, 4, 3, (1, 2)
"""The first layer of the model is a dense one."""


def parts(layer: int, expert: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(100 * layer + expert)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return {name: torch.randn(*shape, generator=random).bfloat16() for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, layer in enumerate(LAYERS):
        found = {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)} if number == 0 else {}
        for expert in range(EXPERTS):
            for name, tensor in parts(layer, expert).items():
                found[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] = tensor
        save_file(found, tmp_path / f"model-{number}.safetensors")
    return tmp_path


def rows(layer: int, experts: list[int]) -> list[torch.Tensor]:
    """A layer's weights as vLLM keeps unquantized ones: [rows, numbers] of gate and up, and of down."""
    found = [parts(layer, expert) for expert in experts]
    both = [torch.cat([p["gate_proj"], p["up_proj"]]).reshape(-1) for p in found]
    return [torch.stack(both), torch.stack([p["down_proj"].reshape(-1) for p in found])]


def test_a_row_is_gate_and_up_and_then_down_of_the_right_layer(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    assert checkpoint.layers == 2
    both, down = checkpoint.row(1, 2, torch.bfloat16)
    wanted = rows(2, [2])
    assert torch.equal(both, wanted[0][0])
    assert torch.equal(down, wanted[1][0])


def test_rows_that_are_as_in_the_checkpoint_prove_it(folder: Path) -> None:
    held = [[-1, 2], [0, 1]]
    assert Checkpoint(folder).proves_itself([rows(1, [0, 2]), rows(2, [0, 1])], held)


def test_packed_or_quantized_rows_and_another_order_are_found_out(folder: Path) -> None:
    checkpoint, held = Checkpoint(folder), [[0, 2], [0, 1]]
    first, last = rows(1, [0, 2]), rows(2, [0, 1])
    swapped = [torch.roll(last[0], INNER * HIDDEN, dims=1), last[1]]
    assert not checkpoint.proves_itself([first, swapped], held)
    assert not checkpoint.proves_itself([first, [last[0].float(), last[1].float()[:, :-1]]], held)
    assert not checkpoint.proves_itself([first, [*last, torch.ones(2, 1)]], held), "scales beside the weights"
    assert not checkpoint.proves_itself([first], held[:1])
    assert not checkpoint.proves_itself([first, rows(2, [1, 1])], held), "a map that does not tell the truth"


def test_a_checkpoint_without_single_experts_is_refused_with_its_name(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ElasticError, match=str(tmp_path)):
        Checkpoint(tmp_path)


def test_an_expert_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ElasticError, match="w1 of expert 7 in layer 2"):
        Checkpoint(folder).row(1, 7, torch.bfloat16)
