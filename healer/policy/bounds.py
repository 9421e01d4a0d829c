"""The bounds of a policy, applied last and always. Pure; each says which bound forbids a size, or None."""

from collections.abc import Collection

import msgspec

from healer.policy.reasons import Reason
from healer.policy.records import State
from healer.policy.schema import Policy, VllmTarget


class Block(msgspec.Struct, frozen=True):
    """What forbids it."""

    reason: Reason
    text: str
    """As an end of the sentence "not done, since ..."."""


def smaller(policy: Policy, *, size: int, healthy: int, removed: int) -> Block | None:
    """May the target shrink from `size` slots by `removed`, which are lost already? `healthy`: live ranks that are left."""
    least = policy.spec.bounds.min_ranks
    left = min(size - removed, healthy)
    if left < least:
        return Block(Reason.BELOW_MIN_RANKS, f"{left} ranks are below bounds.minRanks {least}")
    return None


def fewer_serving(policy: Policy, state: State, *, removed: int) -> Block | None:
    """May `removed` ranks that still serve be taken away by choice?"""
    floor, survivable = policy.spec.bounds.redundancy_floor, state.losses_survivable
    if floor and survivable is not None and survivable - removed < floor:
        text = f"{max(0, survivable - removed)} survivable losses are below bounds.redundancyFloor {floor}"
        return Block(Reason.BELOW_REDUNDANCY, text)
    return None


def larger(policy: Policy, state: State, slots: Collection[int]) -> Block | None:
    """May the target be these slots, as far as room goes?"""
    bounds, most = policy.spec.bounds, policy.max_ranks
    if len(slots) > most:
        return Block(Reason.ABOVE_MAX_RANKS, f"{len(slots)} ranks are above the maximum of {most}")
    used = gpus_used(policy, slots)
    if bounds.max_gpus is not None and used > bounds.max_gpus:
        return Block(Reason.ABOVE_GPUS, f"{used} GPUs are above bounds.maxGpus {bounds.max_gpus}")
    if state.gpus is not None and used > state.gpus:
        return Block(Reason.ABOVE_GPUS, f"{used} GPUs are more than the {state.gpus} that there are")
    return None


def wanted(policy: Policy, state: State, slots: Collection[int]) -> Block | None:
    """May the target be set to these slots, as an operator or a load rule wants? `state` is as before the change."""
    bounds, size = policy.spec.bounds, len(slots)
    if size < bounds.min_ranks:
        return Block(Reason.BELOW_MIN_RANKS, f"a target of {size} is below spec.bounds.minRanks {bounds.min_ranks}")
    if size % bounds.divisibility:
        return Block(
            Reason.NOT_DIVISIBLE, f"{size} is not a multiple of spec.bounds.divisibility {bounds.divisibility}"
        )
    leaving = sum(rank.slot not in slots for rank in state.live)
    staying = sum(rank.slot in slots for rank in state.live)
    joining = size - staying
    # what joins may fail to start, so it is not counted on
    blocked = fewer_serving(policy, state, removed=leaving) if leaving > joining else None
    return blocked or (larger(policy, state, slots) if size > len(state.target) or joining else None)


def gpus_used(policy: Policy, slots: Collection[int]) -> int:
    """GPUs of these slots and of the spares; 0 for a group without GPUs. Several slots may share a GPU."""
    target = policy.spec.target
    if isinstance(target, VllmTarget):
        return len({gpu for slot in slots for gpu in target.gpus_of(slot)})
    if target.ep_backend != "nixl-ep":
        return 0
    if not target.gpus:
        return len(slots) + (len(set(target.spare_gpus)) if target.spare_gpus else 0)
    used = {target.gpus[slot % len(target.gpus)] for slot in slots}
    spare = target.spare_gpus or target.gpus
    return len(used | {spare[k % len(spare)] for k in range(target.spares)})
