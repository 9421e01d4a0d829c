"""The Hugging Face checkpoint on disk: the last source of weights, and the truth that the other sources are copies of."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from elastic.errors import ElasticError
from elastic.rank.architecture import Architecture, Arena

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")


class Checkpoint:
    """An open checkpoint. Tensors of any of the float types above are given in the type of the memory to fill.

    Opening reads the headers of all shards, no weights: it raises ElasticError for the first thing that a later load would
    trip over, a tensor that is missing or has another shape, or a shard that is cut short. The files must not change while
    it is open.
    """

    def __init__(self, path: str | Path, arch: Architecture) -> None:
        self.path = Path(path)
        self.arch = arch
        needed = dict(_needed(arch))
        self._files = self._locate(needed)
        self._shards = {name: self._open(name) for name in sorted(set(self._files.values()))}
        for tensor, (shape, purpose) in needed.items():
            self._check(tensor, shape, purpose)
        self.fingerprint = self._fingerprint()
        """Differs when the files were replaced: of config.json, and of the shards' names, sizes and times."""

    def read(self, tensor: str, into: torch.Tensor) -> None:
        """Copy one needed tensor, by its checkpoint name, in place. Raises ElasticError; `into` then holds rubbish."""
        file = self._files[tensor]
        try:
            into.copy_(self._shards[file].get_tensor(tensor))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ElasticError(
                f"checkpoint {self.path}: tensor {tensor} cannot be read from {file}: {error}"
            ) from error

    def load_dense(self, arena: Arena) -> int:
        """Fill every tensor of the arena, in place; returns the bytes written. Raises ElasticError."""
        for name, view in arena.views.items():
            self.read(name, view)
        return arena.flat.numel() * arena.flat.element_size()

    def load_expert(self, layer: int, expert: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Fill w13 [2 * expert_intermediate, hidden] (gate over up) and w2 [hidden, expert_intermediate], in place, with
        one expert of a MoE layer. Raises ElasticError; the buffers then hold rubbish."""
        gate, up, down = self.arch.expert_names(layer, expert)
        half = self.arch.expert_intermediate
        self.read(gate, w13[:half])
        self.read(up, w13[half:])
        self.read(down, w2)

    def _fingerprint(self) -> str:
        digest = hashlib.blake2b((self.path / "config.json").read_bytes(), digest_size=16)
        for name in self._shards:
            stat = (self.path / name).stat()
            digest.update(f"\n{name} {stat.st_size} {stat.st_mtime_ns}".encode())
        return digest.hexdigest()

    def _locate(self, needed: dict[str, tuple[tuple[int, ...], str]]) -> dict[str, str]:
        """The file of each needed tensor."""
        index = self.path / INDEX
        if not index.exists():
            if not (self.path / SINGLE).exists():
                raise ElasticError(f"checkpoint {self.path}: neither {SINGLE} nor {INDEX} is there")
            return dict.fromkeys(needed, SINGLE)
        try:
            mapped = json.loads(index.read_text())["weight_map"]
            files = {str(tensor): str(file) for tensor, file in mapped.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ElasticError(f"checkpoint {self.path}: {INDEX} has no readable weight_map: {error!r}") from error
        for tensor, (_, purpose) in needed.items():
            if tensor not in files:
                raise ElasticError(self._missing(tensor, purpose, INDEX))
        return {tensor: files[tensor] for tensor in needed}

    def _open(self, name: str) -> Any:
        try:
            return safe_open(str(self.path / name), framework="pt")
        except FileNotFoundError:
            raise ElasticError(f"checkpoint {self.path}: {name} is missing; copy the checkpoint again") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise ElasticError(
                f"checkpoint {self.path}: {name} is torn or not a safetensors file ({error}); copy it again"
            ) from error

    def _check(self, tensor: str, shape: tuple[int, ...], purpose: str) -> None:
        file = self._files[tensor]
        try:
            found = self._shards[file].get_slice(tensor)
        except SafetensorError:
            raise ElasticError(self._missing(tensor, purpose, file)) from None
        if tuple(found.get_shape()) != shape:
            raise ElasticError(
                f"checkpoint {self.path}: tensor {tensor} in {file} has shape {list(found.get_shape())}, "
                f"config.json says {list(shape)} (needed for {purpose})"
            )
        if found.get_dtype() not in _DTYPES:
            raise ElasticError(
                f"checkpoint {self.path}: tensor {tensor} in {file} has type {found.get_dtype()}, "
                f"only {', '.join(_DTYPES)} can be read"
            )

    def _missing(self, tensor: str, purpose: str, file: str) -> str:
        return f"checkpoint {self.path}: tensor {tensor} is missing from {file} (needed for {purpose})"


def _needed(arch: Architecture) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """Every tensor that the model needs: name, shape, and what for."""
    for name, shape in arch.dense_shapes().items():
        yield name, (shape, "every rank")
    inner, outer = (arch.expert_intermediate, arch.hidden), (arch.hidden, arch.expert_intermediate)
    for layer, model_layer in enumerate(arch.moe_layers):
        for expert in range(arch.experts):
            gate, up, down = arch.expert_names(layer, expert)
            purpose = f"expert {expert} of layer {model_layer}"
            yield gate, (inner, purpose)
            yield up, (inner, purpose)
            yield down, (outer, purpose)
