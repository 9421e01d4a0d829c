"""A policy's load rules, made ready: what the loop would otherwise work out again each second."""

from collections.abc import Mapping

import msgspec

from healer.load.exposition import Kind, Query
from healer.policy.expressions import Condition, compiled
from healer.policy.schema import Policy, Signal, Threshold

INTENSIVE = frozenset({"kvUse", "ttft", "itl", "queueTime"})
"""Metrics of the gateway that do not grow with the number of ranks that they are summed over."""

HOLD_FACTOR = 10.0
"""`fallback: hold` lets an old wish stand for so many times `staleAfter`."""

GATEWAY_QUERIES: Mapping[str, tuple[str, Kind]] = {
    "ttft": ("elastic_gateway_ttft_seconds", Kind.QUANTILE),
    "itl": ("elastic_gateway_itl_seconds", Kind.QUANTILE),
    "queueTime": ("elastic_gateway_queue_seconds", Kind.QUANTILE),
    "tokensPerSecond": ("elastic_gateway_tokens_total", Kind.RATE),
    "requestsPerSecond": ("elastic_gateway_requests_total", Kind.RATE),
    "preemptions": ("elastic_gateway_replays_total", Kind.RATE),
}
"""Where the embedded gateway shows a metric. `waiting`, `running` and `kvUse` come with the ranks' beats instead."""


def router_metric(metric: str) -> str:
    """What the router before vLLM calls a metric of the gateway."""
    return metric.replace("elastic_gateway_queue_", "elastic_gateway_hold_").replace(
        "elastic_gateway_", "healer_router_"
    )


_KINDS = {"value": Kind.GAUGE, "rate": Kind.RATE, "quantile": Kind.QUANTILE}


class Rules(msgspec.Struct, frozen=True):
    """`spec.load`, compiled."""

    policy: Policy
    extensive: frozenset[str]
    """Signals that are shared out over the ranks: twice the ranks, half of it each."""
    conditions: Mapping[str, Condition]
    """By name of the threshold rule."""
    names: Mapping[str, tuple[str, ...]]
    """By name of the threshold rule, the signals in its condition, sorted."""
    longest_window_s: float
    """Of stabilisation."""


def compile_rules(policy: Policy) -> Rules:
    """Raises ExpressionError; a policy that was loaded has none left."""
    load = policy.spec.load
    conditions = {rule.name: compiled(rule.when) for rule in load.rules if isinstance(rule, Threshold)}
    return Rules(
        policy=policy,
        extensive=frozenset(name for name, signal in load.signals.items() if is_extensive(signal)),
        conditions=conditions,
        names={name: tuple(sorted(one.names & load.signals.keys())) for name, one in conditions.items()},
        longest_window_s=max(
            load.behavior.scale_up.stabilization_window_s, load.behavior.scale_down.stabilization_window_s
        ),
    )


def is_extensive(signal: Signal) -> bool:
    """Whether the signal's number is a total that the ranks share, so that per rank it is divided by their number."""
    intensive = signal.metric in INTENSIVE if signal.source == "gateway" else signal.reduce == "quantile"
    return signal.aggregate == "sum" and not intensive


def query_of(name: str, signal: Signal, *, router: bool = False) -> Query | None:
    """How the signal is read from its endpoint, which is vLLM's router or else the gateway; None where the ranks tell it
    themselves."""
    if signal.source == "gateway":
        if signal.metric not in GATEWAY_QUERIES:
            return None
        metric, kind = GATEWAY_QUERIES[signal.metric]
        metric = router_metric(metric) if router else metric
        return Query(name, metric, kind, q=signal.quantile, window_s=signal.window_s)
    return Query(
        name,
        signal.metric,
        _KINDS[signal.reduce],
        q=signal.quantile,
        labels=tuple(sorted(signal.labels.items())),
        slot_label=signal.rank_label if signal.scope == "rank" else "",
        window_s=signal.window_s,
        aggregate=signal.aggregate,
    )
