"""Steps as rows of an array: kind, layer, slot, expert, and for an exchange the other slot and expert, else -1."""

from elastic.placement.kernels.jit import compiled
from elastic.placement.kernels.state import Ints

COVER, FILL, BALANCE, PROTECT = 0, 1, 2, 3
"""Why a step is made; the first column of the step arrays."""


@compiled
def record(steps: Ints, at: int, kind: int, layer: int, p: int, expert: int, q: int, other: int) -> int:
    """Write one step: `expert` goes to slot `p`; in an exchange `other` goes to slot `q` at the same time, else -1."""
    steps[at, 0] = kind
    steps[at, 1] = layer
    steps[at, 2] = p
    steps[at, 3] = expert
    steps[at, 4] = q
    steps[at, 5] = other
    return at + 1
