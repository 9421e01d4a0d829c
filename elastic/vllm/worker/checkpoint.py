"""Experts read from the checkpoint, the last resort: where vLLM keeps their weights as the checkpoint has them.

Quantized, packed or padded rows are not what the checkpoint holds. So a reader first proves itself on rows that are in use: only if they
are equal, bit by bit, rows that are lost may come from it.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from elastic.errors import ElasticError

_NAME = re.compile(r"\.layers\.(\d+)\.(?:.*\.)?experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_PART = {"gate_proj": "w1", "w1": "w1", "up_proj": "w3", "w3": "w3", "down_proj": "w2", "w2": "w2"}
PARTS = ("w1", "w3", "w2")


class Checkpoint:
    """A folder of safetensors whose experts are stored one by one, as gate, up and down projection."""

    def __init__(self, folder: Path) -> None:
        """Reads the names only. Raises ElasticError, naming the folder, where there are no such experts."""
        self._where: dict[tuple[int, int, str], tuple[Path, str]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a dictionary
                    if (found := _NAME.search(name)) is not None:
                        key = int(found[1]), int(found[2]), _PART[found[3]]
                        self._where[key] = path, name
        self._layers = sorted({layer for layer, _, _ in self._where})
        if not self._layers:
            raise ElasticError(f"{folder}: no safetensors with experts stored one by one")

    @property
    def layers(self) -> int:
        """Layers that have experts; they are counted from 0 in what follows, as vLLM counts them."""
        return len(self._layers)

    def row(self, layer: int, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up projection in one piece, and the down projection, flat. Raises ElasticError for one that is not there."""
        parts = []
        for part in PARTS:
            at = self._where.get((self._layers[layer], expert, part))
            if at is None:
                raise ElasticError(f"the checkpoint has no {part} of expert {expert} in layer {self._layers[layer]}")
            with safe_open(at[0], framework="pt") as file:
                parts.append(file.get_tensor(at[1]).to(dtype).reshape(-1))
        return torch.cat(parts[:2]), parts[2]

    def proves_itself(self, weights: Sequence[Sequence[torch.Tensor]], held: Sequence[Sequence[int]]) -> bool:
        """Whether a row in each of the first and last layer is what the checkpoint says.

        `weights[layer][tensor]` are vLLM's rows [rows, numbers], `held[layer]` the expert of each row, negative for none.
        """
        if len(weights) != self.layers:
            return False
        for layer in {0, self.layers - 1}:
            row = next((at for at, expert in enumerate(held[layer]) if expert >= 0), None)
            if row is None or len(weights[layer]) != 2:
                return False
            mine = [tensor[row] for tensor in weights[layer]]
            try:
                theirs = self.row(layer, held[layer][row], mine[0].dtype)
            except ElasticError:
                return False
            if not all(
                a.shape == b.shape and torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
                for a, b in zip(mine, theirs, strict=True)
            ):
                return False
        return True
