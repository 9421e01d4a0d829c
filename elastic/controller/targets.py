"""Which slots a wish means, and whether a group can have them."""

from collections.abc import Collection, Sequence

from elastic.config import GroupConfig
from elastic.errors import Infeasible


def choose(config: GroupConfig, target: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The slots for a number of ranks, from those of `target`: keep the lowest, take the lowest empty ones. Raises Infeasible
    outside 1 to max_ranks."""
    if not 1 <= ranks <= config.max_ranks:
        raise Infeasible(f"{ranks} ranks are outside 1..{config.max_ranks} (max_ranks)")
    kept = list(target)[:ranks]
    free = [s for s in range(config.max_ranks) if s not in kept]
    return tuple(sorted([*kept, *free[: ranks - len(kept)]]))


def refuse_infeasible(config: GroupConfig, experts: int, slots: Collection[int]) -> None:
    """Raises Infeasible with the numbers where a group of these slots cannot be. `experts`: of one layer."""
    outside = [s for s in slots if not 0 <= s < config.max_ranks]
    if outside:
        raise Infeasible(f"slots {outside} are outside 0..{config.max_ranks - 1}")
    if not slots:
        raise Infeasible("a group needs at least 1 rank")
    if len(slots) * config.slots_per_rank < experts:
        raise Infeasible(
            f"{len(slots)} ranks x {config.slots_per_rank} slots hold fewer than {experts} experts; "
            f"at least {-(-experts // config.slots_per_rank)} ranks are needed"
        )
