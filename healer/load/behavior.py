"""How fast the size may follow what the rules want: stabilisation windows and rates, as in the `behavior` of a Kubernetes
HorizontalPodAutoscaler (autoscaling/v2; the arithmetic is that of its documentation).
"""

import math
from collections.abc import Sequence

import msgspec

from healer.load.decision import Change
from healer.policy.schema import Behavior, Direction, Rate


class Wish(msgspec.Struct, frozen=True):
    """The rules wanted the same size from `first` to `last`."""

    first: float
    last: float
    size: int


def remember(wishes: Sequence[Wish], size: int, now: float, keep_s: float) -> tuple[Wish, ...]:
    """`wishes` with one more; what ended before `keep_s` ago is dropped."""
    kept = tuple(wish for wish in wishes if wish.last >= now - keep_s)
    if kept and kept[-1].size == size:
        return (*kept[:-1], Wish(kept[-1].first, now, size))
    return (*kept, Wish(now, now, size))


def stabilised(wishes: Sequence[Wish], current: int, wanted: int, behavior: Behavior, now: float) -> tuple[int, float]:
    """The size that the windows allow, and for how many seconds they hold back what is wanted, if nothing else is wanted
    meanwhile. Growing takes the least size wanted within its window, shrinking the greatest."""
    up, down = behavior.scale_up.stabilization_window_s, behavior.scale_down.stabilization_window_s
    if wanted > current:
        recent = [w for w in wishes if w.last > now - up] if up else []
        size = max(current, min((w.size for w in recent), default=wanted))
        size = min(size, wanted)
        held = max((w.last + up - now for w in recent if w.size < wanted), default=0.0)
    elif wanted < current:
        recent = [w for w in wishes if w.last > now - down] if down else []
        size = min(current, max((w.size for w in recent), default=wanted))
        size = max(size, wanted)
        held = max((w.last + down - now for w in recent if w.size > wanted), default=0.0)
    else:
        return current, 0.0
    return size, max(0.0, held)


def limited(changes: Sequence[Change], current: int, size: int, direction: Direction, now: float) -> tuple[int, float]:
    """`size`, or as near to it as the rates allow, and the seconds until they allow more. `direction` is the one from
    `current` to `size`."""
    sign = 1 if size > current else -1
    allowed = [_reach(rate, changes, current, sign, now) for rate in direction.policies]
    # the widest limit reaches the furthest in the direction of travel
    widest = direction.select_policy == "max"
    reach, wait_s = (max if widest == (sign > 0) else min)(allowed)
    if sign * reach >= sign * size:
        return size, 0.0
    return (reach if sign * (reach - current) > 0 else current), wait_s


def _reach(rate: Rate, changes: Sequence[Change], current: int, sign: int, now: float) -> tuple[int, float]:
    """The furthest size that one rate allows, and the seconds until the oldest change that counts is forgotten."""
    lately = [c for c in changes if c.at > now - rate.period_s]
    start = current - sum(c.after - c.before for c in lately)
    if rate.type == "ranks":
        reach = start + sign * rate.value
    elif sign > 0:
        reach = math.ceil(start * (1 + rate.value / 100) - 1e-9)
    else:
        reach = math.floor(start * (1 - rate.value / 100) + 1e-9)
    wait_s = min((c.at + rate.period_s - now for c in lately), default=0.0)
    return max(reach, 0), wait_s


def memory_s(behavior: Behavior) -> float:
    """How long changes matter to some rate."""
    return max(rate.period_s for side in (behavior.scale_up, behavior.scale_down) for rate in side.policies)
