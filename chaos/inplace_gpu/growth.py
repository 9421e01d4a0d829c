"""Whether memory grows with each death and refill."""

import statistics
from collections.abc import Sequence
from typing import Any

from chaos.inplace_gpu.records import Case

SETTLED = 3
"""Cycles that come first: what is allocated once is allocated by then."""
MOST_GROWTH = 0.02
"""Of the memory in use, over all cycles that count: what is flat."""


def memory(cases: Sequence[Case], slot: int) -> tuple[dict[str, Any], str]:
    """Of the rank in `slot`, which lived through all of them, and of each GPU: figures, and what grows; empty: nothing does.
    Too few cycles give neither."""
    ranks = [one.memory_mb for case in cases for one in case.survivors if one.slot == slot]
    kinds = {f"of slot {slot}": ranks} | {
        f"of GPU {number}": [float(case.gpu_memory_mb[number]) for case in cases]
        for number in range(min((len(case.gpu_memory_mb) for case in cases), default=0))
    }
    figures: dict[str, Any] = {}
    grown = []
    for kind, values in kinds.items():
        settled = values[SETTLED:]
        if len(settled) < 2:
            continue
        slope = statistics.linear_regression(range(len(settled)), settled).slope
        figures |= {f"memory {kind}_mb": [settled[0], settled[-1]], f"growth {kind}_mb_a_cycle": slope}
        if slope * len(settled) > MOST_GROWTH * settled[0]:
            grown.append(f"memory {kind} grows by {slope:.1f} MB a cycle")
    return figures, "; ".join(grown)
