"""Whether anything is held longer than it is used: memory, threads and files, over deaths and refills."""

import statistics
from collections.abc import Sequence
from typing import Any

from chaos.inplace_gpu.records import Case

SETTLED = 3
"""Cycles that come first: what is allocated once is allocated by then."""
MOST_GROWTH = 0.02
"""Of what is held, over all cycles that count: what is flat."""


def held(cases: Sequence[Case], slot: int) -> tuple[dict[str, Any], str]:
    """Of the rank in `slot`, which lived through all of them, and of each GPU: figures, and what grows; empty: nothing does.
    Too few cycles give neither. Shared pages are told and not judged: there are no more of them than the host copy has."""
    ranks = [one for case in cases for one in case.survivors if one.slot == slot]
    kinds: dict[str, tuple[str, list[float]]] = {
        f"memory of slot {slot}": ("mb", [one.memory_mb for one in ranks]),
        f"shared memory of slot {slot}": ("mb", [one.shared_mb for one in ranks]),
        f"threads of slot {slot}": ("count", [one.threads for one in ranks]),
        f"open files of slot {slot}": ("count", [one.files for one in ranks]),
    }
    for number in range(min((len(case.gpu_memory_mb) for case in cases), default=0)):
        kinds[f"memory of GPU {number}"] = ("mb", [case.gpu_memory_mb[number] for case in cases])
    figures: dict[str, Any] = {}
    grown = []
    for kind, (unit, values) in kinds.items():
        settled = values[SETTLED:]
        if len(settled) < 2:
            continue
        slope = statistics.linear_regression(range(len(settled)), settled).slope
        figures |= {f"{kind}_{unit}": [settled[0], settled[-1]], f"growth, {kind}_{unit}_a_cycle": slope}
        if not kind.startswith("shared") and slope * len(settled) > MOST_GROWTH * settled[0]:
            grown.append(f"{kind}: {slope:+.1f} a cycle ({unit})")
    return figures, "; ".join(grown)
