"""The registry of graph-facing tensors: allocated once, for capacity, and changed in place only.

A captured step reads and writes memory by address. A tensor that moved would leave the step with the old memory, and
nothing would fail loudly; so every such tensor is registered by name, and its address is compared before each replay.
"""

from collections.abc import Iterator

import torch

from elastic.errors import ElasticError


class AddressMoved(ElasticError):
    """A graph-facing tensor is not where it was registered. The rank cannot go on: end it and let it be refilled."""


class Buffers:
    """Tensors by name, with the address and the shape that each had when it was added. One owner, one thread."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._places: dict[str, tuple[int, torch.Size]] = {}
        self._names: dict[int, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Register and return `tensor`, which from now on may only be changed in place.

        Adding the same tensor again changes nothing. Raises AddressMoved when `name` is taken by another one: nothing
        is ever replaced.
        """
        place = (tensor.data_ptr(), tensor.shape)
        known = self._places.get(name)
        if known is not None and known != place:
            raise AddressMoved(
                f"buffer {name}: registered at {known[0]:#x} with shape {list(known[1])}, now offered at "
                f"{place[0]:#x} with shape {list(place[1])}; change buffers in place"
            )
        if known is None:
            self._tensors[name], self._places[name] = tensor, place
            self._names.setdefault(tensor.untyped_storage().data_ptr(), name)
        return tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def address(self, name: str) -> int:
        """Where `name` was when it was added."""
        return self._places[name][0]

    def owner(self, tensor: torch.Tensor) -> str | None:
        """The registered buffer in whose memory `tensor` lies, or None."""
        return self._names.get(tensor.untyped_storage().data_ptr())

    def check(self) -> tuple[str, ...]:
        """The names of all buffers whose address or shape is not what it was."""
        return tuple(n for n, t in self._tensors.items() if (t.data_ptr(), t.shape) != self._places[n])
