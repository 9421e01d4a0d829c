"""Relations within `spec.load`: signals, thresholds that keep apart, windows."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from healer.policy.conflict import Contradiction, repeated
from healer.policy.expressions import ExpressionError, check
from healer.policy.schema import (
    Direction,
    KeyPath,
    Load,
    Policy,
    Signal,
    Threshold,
    is_url,
    show_duration,
)
from healer.policy.schema.scaling import GATEWAY_METRICS

LOAD: KeyPath = ("spec", "load")
RULES: KeyPath = (*LOAD, "rules")
MAX_PERIOD_S = 3600.0
_COMPARISON = re.compile(r"\s*([a-z]\w*)\s*(>=?|<=?)\s*(\d+(?:\.\d+)?)\s*")


def load_relations(policy: Policy) -> Iterator[Contradiction]:
    load = policy.spec.load
    for name, signal in load.signals.items():
        yield from _signal(load, signal, (*LOAD, "signals", name))
    yield from repeated([rule.name for rule in load.rules], RULES)
    for index, rule in enumerate(load.rules):
        place = (*RULES, index)
        if isinstance(rule, Threshold):
            yield from _threshold(load, rule, place)
        elif rule.signal not in load.signals:
            known = ", ".join(load.signals) or "none there yet"
            text = f"{rule.signal!r} is not in load.signals, expected one of: {known}"
            yield Contradiction((*place, "signal"), (*LOAD, "signals"), text)
    yield from _hysteresis(load)
    yield from _direction(load, load.behavior.scale_up, "scaleUp")
    yield from _direction(load, load.behavior.scale_down, "scaleDown")


def _signal(load: Load, signal: Signal, place: KeyPath) -> Iterator[Contradiction]:
    if signal.source == "gateway":
        if signal.metric not in GATEWAY_METRICS:
            text = f"{signal.metric!r} is not known to the gateway, expected one of {', '.join(GATEWAY_METRICS)}"
            yield Contradiction((*place, "metric"), (*place, "source"), text)
        for key, given in (("url", signal.url), ("labels", signal.labels), ("rankLabel", signal.rank_label)):
            if given:
                text = "is for source prometheus, expected it away"
                yield Contradiction((*place, key), (*place, "source"), text)
    else:
        if not is_url(signal.url):
            text = f"{signal.url!r} is no address, expected one that begins with http:// or https://"
            yield Contradiction((*place, "url"), (*place, "source"), text)
        if signal.scope == "rank" and not signal.rank_label:
            text = "is missing, which scope rank of a Prometheus metric needs"
            yield Contradiction((*place, "rankLabel"), (*place, "scope"), text)
    if signal.fallback.mode == "value" and signal.fallback.value is None:
        text = "is missing, which mode value needs, expected {value: NUMBER}"
        yield Contradiction((*place, "fallback"), (*place, "fallback", "mode"), text)
    if signal.fallback.mode != "value" and signal.fallback.value is not None:
        text = f"goes with mode value, not with {signal.fallback.mode}"
        yield Contradiction((*place, "fallback", "value"), (*place, "fallback", "mode"), text)
    for key, seconds in (("staleAfter", signal.stale_after_s), ("window", signal.window_s)):
        if seconds < 2 * load.interval_s:
            least = show_duration(2 * load.interval_s)
            text = f"{show_duration(seconds)} is too short, expected at least 2 x load.interval = {least}"
            yield Contradiction((*place, key), (*LOAD, "interval"), text)


def _threshold(load: Load, rule: Threshold, place: KeyPath) -> Iterator[Contradiction]:
    try:
        condition = check(rule.when, {**dict.fromkeys(load.signals, 1.0), "ranks": 4.0})
    except ExpressionError as error:
        yield Contradiction((*place, "when"), (*LOAD, "signals"), str(error), error.at)
    else:
        if not condition.names & load.signals.keys():
            text = "names no signal, expected one of load.signals"
            yield Contradiction((*place, "when"), (*LOAD, "signals"), text)
    if rule.step is not None and rule.percent is not None:
        yield Contradiction((*place, "percent"), (*place, "step"), "stands beside step, expected one of the two")
    if rule.scale == "down" and rule.percent is not None and rule.percent > 99:
        yield Contradiction(
            (*place, "percent"), (*place, "scale"), f"{rule.percent} leaves no rank, expected at most 99"
        )
    if 0 < rule.for_s < load.interval_s:
        text = f"{show_duration(rule.for_s)} is below load.interval, expected at least {show_duration(load.interval_s)}"
        yield Contradiction((*place, "for"), (*LOAD, "interval"), text)


class _Edge(NamedTuple):
    """A signal's value at which a rule begins to change the size."""

    signal: str
    value: float
    place: KeyPath
    name: str


def _edges(load: Load, scale: str) -> Iterator[_Edge]:
    """Of rules that compare one signal with one number; what else a condition may say is not looked into."""
    for index, rule in enumerate(load.rules):
        if isinstance(rule, Threshold):
            match = _COMPARISON.fullmatch(rule.when)
            # "up when low" is for signals that fall with the load; it has no such edge
            if rule.scale == scale and match and match[2][0] == (">" if scale == "up" else "<"):
                yield _Edge(match[1], float(match[3]), (*RULES, index, "when"), rule.name)


def _hysteresis(load: Load) -> Iterator[Contradiction]:
    ups = tuple(_edges(load, "up"))
    for down in _edges(load, "down"):
        for up in ups:
            if up.signal == down.signal and down.value >= up.value:
                text = f"{down.value:g} is not below the {up.value:g} at which {up.name} scales up, expected less"
                yield Contradiction(down.place, up.place, f"{text}: the size would swing")


def _direction(load: Load, direction: Direction, key: str) -> Iterator[Contradiction]:
    place = (*LOAD, "behavior", key)
    if 0 < direction.stabilization_window_s < load.interval_s:
        text = f"{show_duration(direction.stabilization_window_s)} is below load.interval"
        text += f", expected 0s or at least {show_duration(load.interval_s)}"
        yield Contradiction((*place, "stabilizationWindow"), (*LOAD, "interval"), text)
    for index, rate in enumerate(direction.policies):
        here = (*place, "policies", index)
        if not load.interval_s <= rate.period_s <= MAX_PERIOD_S:
            limits = f"from load.interval {show_duration(load.interval_s)} to {show_duration(MAX_PERIOD_S)}"
            text = f"{show_duration(rate.period_s)} is out of range, expected {limits}"
            yield Contradiction((*here, "period"), (*LOAD, "interval"), text)
        if key == "scaleDown" and rate.type == "percent" and rate.value > 100:
            yield Contradiction((*here, "value"), (*here, "type"), f"{rate.value} is above 100 percent of the ranks")
