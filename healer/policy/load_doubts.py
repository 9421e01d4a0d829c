"""Load rules that never change the size, or that add up what should not be added."""

import math
from collections.abc import Iterator, Sequence

from healer.policy.conflict import Doubt
from healer.policy.expressions import compiled
from healer.policy.load_relations import LOAD, RULES
from healer.policy.never import around, never_holds, numbers_in
from healer.policy.schema import Policy, Signal, TargetTracking, Threshold
from healer.policy.schema.scaling import Predictive

FEW_RANKS = 16
LARGE = 1e12


def load_doubts(policy: Policy) -> Iterator[Doubt]:
    load = policy.spec.load
    for index, rule in enumerate(load.rules):
        if isinstance(rule, Threshold):
            condition = compiled(rule.when)
            if never_holds(condition, _domains(policy, rule.when)):
                yield Doubt((*RULES, index, "when"), "holds for no values that these signals can have")
        elif isinstance(rule, TargetTracking):
            most = _range(load.signals[rule.signal])[1]
            if most <= rule.target * (1 + rule.tolerance):
                text = f"{rule.target:g} with tolerance {rule.tolerance:g} is never exceeded: {rule.signal} is at most "
                yield Doubt((*RULES, index, "target"), f"{text}{most:g}, so the rule only shrinks the group")
    for name, signal in load.signals.items():
        if signal.source == "gateway" and signal.metric == "kvUse" and signal.aggregate == "sum":
            text = "sum adds up shares of kvUse: 4 half-full ranks give 2.0, expected mean, max or min"
            yield Doubt((*LOAD, "signals", name, "aggregate"), text)
    if load.rules and all(isinstance(rule, Predictive) for rule in load.rules) and not policy.spec.schedules:
        yield Doubt(RULES, "are forecasts only, which raise the least size and never lower it: nothing shrinks")


def _domains(policy: Policy, condition: str) -> dict[str, Sequence[object]]:
    numbers = numbers_in(condition)
    found: dict[str, Sequence[object]] = {}
    for name, signal in policy.spec.load.signals.items():
        low, high = _range(signal)
        step = 1e-3 * max([1.0, *map(abs, numbers)])
        found[name] = around(numbers, max(low, -LARGE), min(high, LARGE), step)
    least, most = policy.spec.bounds.min_ranks, policy.max_ranks
    few = most - least <= FEW_RANKS
    ranks = map(float, range(least, most + 1)) if few else around(numbers, float(least), float(most), 1.0)
    return found | {"ranks": tuple(ranks)}


def _range(signal: Signal) -> tuple[float, float]:
    """The values that a signal can have."""
    if signal.source == "gateway":
        return 0.0, 1.0 if signal.metric == "kvUse" and signal.aggregate != "sum" else math.inf
    return (0.0 if signal.reduce == "rate" else -math.inf), math.inf
