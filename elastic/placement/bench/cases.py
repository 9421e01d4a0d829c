"""The inputs: loads, groups and what happens to them."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from elastic.placement.problem import Floats

LAYERS, EXPERTS = 58, 256
"""Of the 671 B model."""
CORRELATION = 0.5
"""Of an expert's log load in one layer and the next."""
DRIFT = 0.3
"""Standard deviation of the change of the log load between the first plan and the second."""


@dataclass(frozen=True)
class Case:
    """A group of `ranks` x `slots`, planned for `before`; then `event`: some ranks are lost or join, and the load is `after`."""

    name: str
    loads: str
    ranks: int
    slots: int
    event: str
    lost: tuple[int, ...]
    joined: int
    before: Floats
    after: Floats

    @property
    def survivors(self) -> tuple[int, ...]:
        return tuple(r for r in range(self.ranks) if r not in self.lost)

    @property
    def live(self) -> tuple[int, ...]:
        return (*self.survivors, *range(self.ranks, self.ranks + self.joined))


GROUPS = ((16, 18), (24, 12), (32, 10), (32, 16), (144, 2), (320, 2))


def cases(seeds: int) -> Iterator[Case]:
    """Every group with every load and event; one of each per seed."""
    for seed in range(seeds):
        for loads in ("log-normal", "zipf-1.2", "recorded"):
            for ranks, slots in GROUPS:
                rng = np.random.default_rng([seed, ranks, slots, len(loads)])
                before, drifted = _loads(loads, rng)
                lost = int(rng.integers(ranks))
                yield Case(f"{ranks}x{slots} new", loads, ranks, slots, "new", (), 0, before, before)
                yield Case(f"{ranks}→{ranks - 1} x{slots}", loads, ranks, slots, "loss", (lost,), 0, before, before)
                yield Case(f"{ranks}x{slots} drift", loads, ranks, slots, "drift", (), 0, before, drifted)
                if (ranks, slots) == (16, 18):
                    yield Case("16→24 x18", loads, 16, 18, "growth", (), 8, before, before)


def _loads(kind: str, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Loads of two times; [layers, experts] each."""
    if kind == "recorded":
        counts = np.load(str(files("elastic.placement.bench") / "routing.npz"))["counts"].astype(np.float64)
        return counts[0], counts[1]
    latent, later = _latent(rng), _latent(rng)
    if kind == "log-normal":
        return np.exp(latent), np.exp(latent + DRIFT * later)
    return _zipf(latent), _zipf(latent + DRIFT * later)


def _latent(rng: np.random.Generator) -> Floats:
    rows = [rng.normal(size=EXPERTS)]
    for _ in range(LAYERS - 1):
        rows.append(CORRELATION * rows[-1] + np.sqrt(1 - CORRELATION**2) * rng.normal(size=EXPERTS))
    return np.stack(rows)


def _zipf(latent: Floats) -> Floats:
    position = np.argsort(np.argsort(-latent, axis=1), axis=1)
    return 1000.0 * (1.0 + position) ** -1.2
