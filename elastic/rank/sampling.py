"""From logits to tokens, as a pure function: any rank that continues a request draws what the first would have drawn."""

import hashlib
from collections.abc import Sequence

import torch

from elastic.protocol import Sampling
from elastic.rank.scheduler import Sample


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the request's seed and the answer index only (53 bits)."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def choose(greedy: Sequence[int], logits: torch.Tensor, samples: Sequence[Sample]) -> list[int]:
    """One token for each of `samples`, from its row of `logits` [rows, vocab], float32. `greedy` [rows]: the token with the
    largest one, of equals the lowest id."""
    return [
        sample(logits[wanted.row], wanted.sampling, wanted.position)
        if wanted.sampling.temperature > 0
        else greedy[wanted.row]
        for wanted in samples
    ]


def sample(row: torch.Tensor, sampling: Sampling, position: int) -> int:
    """One token from the logits `row` [vocab] for the answer index `position`.

    Temperature 0 is greedy. Otherwise nucleus sampling: the fewest most likely tokens that hold `top_p` of the mass, in
    proportion; in float64, because the sum over a large vocabulary decides where the draw falls.
    """
    if sampling.temperature <= 0:
        return int(row.argmax())
    probs = torch.softmax(row.double() / sampling.temperature, -1)
    ordered, ids = torch.sort(probs, descending=True, stable=True)
    mass = torch.cumsum(ordered, -1)
    kept = max(1, int((mass - ordered < sampling.top_p).sum()))
    at = torch.searchsorted(mass[:kept], uniform(sampling.seed, position) * mass[kept - 1], right=True)
    return int(ids[min(int(at), kept - 1)])
