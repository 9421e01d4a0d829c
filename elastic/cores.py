"""Each rank on cores of its own, the controller and what it starts on the rest.

The kernel tears a killed process down on the core where it ran, and does not let go of it for each other task that is woken
there; processes that start beside a rank take its time too. On two H200 with 32 cores the slowest of 21 survivors of a SIGKILL
came back after 24 ms with cores of their own and after 44 ms without (docs/architecture.md; `make bench-gpu`, ``--no-pin-cores``).
"""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from elastic.config import GroupConfig

FEWEST = 4
"""Cores of a rank (its loop, agent, NIXL's and CUDA's threads) below which sharing out would cost more than it saves."""


def shares(cores: Sequence[int], slots: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """A quarter for the controller, its children and spares, and equal parts for the slots; both empty where there are
    too few."""
    kept = max(2, len(cores) // 4)
    each = (len(cores) - kept) // slots
    if each < FEWEST:
        return (), ()
    parts = (cores[kept + slot * each : kept + (slot + 1) * each] for slot in range(slots))
    return tuple(cores[:kept]), tuple(tuple(part) for part in parts)


def confine_rank(config: GroupConfig, slot: int) -> tuple[int, ...]:
    """Move this process to the cores of its slot. Returns them; empty: it may run anywhere."""
    _, parts = shares(_all(), config.max_ranks) if _wanted(config) else ((), ())
    return confine(parts[slot]) if parts else ()


def confine_controller(config: GroupConfig) -> tuple[int, ...]:
    """Move this process, and with it all that it will start, away from the ranks' cores."""
    kept, _ = shares(_all(), config.max_ranks) if _wanted(config) else ((), ())
    return confine(kept) if kept else ()


def confine(cores: Collection[int]) -> tuple[int, ...]:
    """All threads of this process; later ones inherit it. Returns the cores, none where the kernel refused."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue
        except OSError:
            return ()
    return tuple(cores)


def _wanted(config: GroupConfig) -> bool:
    return config.on_gpu and config.pin_cores


def _all() -> list[int]:
    """Of the control group, whatever part of them this process was confined to by whoever started it."""
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        return sorted(os.sched_getaffinity(0))
    except OSError:
        return sorted(mine)
    finally:
        os.sched_setaffinity(0, mine)
