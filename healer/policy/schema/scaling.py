"""`spec.load`: how the size follows the load."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field

from healer.policy.schema.base import Duration, Listed, Model, Name, OneOf, Positive, Window

GATEWAY_METRICS = (
    "waiting",
    "running",
    "kvUse",
    "ttft",
    "itl",
    "queueTime",
    "tokensPerSecond",
    "requestsPerSecond",
    "preemptions",
)
SIGNAL_NAME = r"^[a-z][A-Za-z0-9]{0,62}$"
SignalName = Annotated[str, Field(pattern=SIGNAL_NAME)]
GatewayMetric = Annotated[str, OneOf(GATEWAY_METRICS)]


class Fallback(Model):
    """In a file also just `hold` or `block`, or `{value: 3}`."""

    mode: Literal["hold", "value", "block"] = "hold"
    """`block` lets no rule that needs the signal change the size; `hold` as well, but for 10 x staleAfter a growth that a
    targetTracking rule wanted last may still be finished; `value` uses a fixed value."""
    value: float | None = None
    """What to use with mode `value`."""


def _fallback(value: Any) -> Any:
    if isinstance(value, str):
        return {"mode": value}
    if isinstance(value, dict) and "value" in value and "mode" not in value:
        return {"mode": "value", **value}
    return value


class Signal(Model):
    """One number about the load, read each load.interval."""

    source: Literal["gateway", "prometheus"] = "gateway"
    """The embedded gateway, or a Prometheus text endpoint such as vLLM's."""
    metric: Annotated[str, Field(min_length=1, max_length=200)]
    """From the gateway one of waiting, running, kvUse (0 to 1), ttft, itl, queueTime (seconds), tokensPerSecond,
    requestsPerSecond, preemptions (a second); from Prometheus the name of a metric, of a histogram without `_bucket`."""
    url: str = ""
    """Of a Prometheus endpoint, http or https."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Only Prometheus samples that have these labels count."""
    rank_label: str = ""
    """The label that tells the ranks of a Prometheus metric apart, with scope `rank`."""
    scope: Literal["rank", "group"] = "group"
    """`rank`: one value for each rank, put together by `aggregate`; `group`: one for all."""
    aggregate: Literal["sum", "mean", "max", "min"] = "sum"
    """How values become one number, over ranks or samples."""
    reduce: Literal["value", "rate", "quantile"] = "value"
    """What is read of a Prometheus metric: a gauge's value, a counter's rate per second, or a quantile of a histogram."""
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Of a histogram, and of the gateway's times."""
    window_s: Duration = 60.0
    """Over which rates and quantiles are taken."""
    stale_after_s: Duration = 10.0
    """A sample older than this is missing. Missing is not zero: see fallback."""
    fallback: Annotated[
        Fallback, BeforeValidator(_fallback, json_schema_input_type=Literal["hold", "block"] | Fallback)
    ] = Field(default_factory=Fallback)
    """What counts while the signal is missing."""


class TargetTracking(Model):
    """Keeps a signal per rank near a target: wanted = ranks x (value per rank / target)."""

    kind: Literal["targetTracking"]
    """Keeps a signal near a target."""
    name: Name
    """Named in decisions; unique."""
    signal: SignalName
    """A key of load.signals."""
    target: Positive
    """Per rank, for a signal that grows with the load; for times (ttft, itl, queueTime) the time itself."""
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """No change while the value is within this share of the target."""


class Threshold(Model):
    """Grows or shrinks by a step while a condition holds."""

    kind: Literal["threshold"]
    """Changes the size while a condition holds."""
    name: Name
    """Named in decisions; unique."""
    when: Annotated[str, Field(min_length=1, max_length=2000)]
    """A condition in CEL over the names of load.signals and `ranks`, all of them numbers with a decimal point."""
    for_s: Window = 30.0
    """How long it must have held. 0s: at once."""
    scale: Literal["up", "down"]
    """The direction."""
    step: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Ranks to add or remove; 1 where percent is absent too."""
    percent: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Of the present ranks, rounded up."""


class Predictive(Model):
    """Forecasts a signal; may only raise the least size, never lower anything."""

    kind: Literal["predictive"]
    """Forecasts a signal."""
    name: Name
    """Named in decisions; unique."""
    signal: SignalName
    """A key of load.signals."""
    target: Positive
    """Per rank: the least size is the forecast / target."""
    method: Literal["holt-winters"] = "holt-winters"
    """Exponential smoothing with trend and season."""
    season_s: Duration = 86400.0
    """After which the load repeats itself. Two of them must have been seen before the rule says anything."""
    horizon_s: Duration = 600.0
    """How far ahead; at least the time that a replacement takes to serve."""


LoadRule = Annotated[TargetTracking | Threshold | Predictive, Discriminator("kind")]


class Rate(Model):
    """A limit of change, as in the `behavior` of a Kubernetes HorizontalPodAutoscaler."""

    type: Literal["ranks", "percent"]
    """What `value` counts: ranks, or percent of the ranks at the start of the period."""
    value: Annotated[int, Field(ge=1, le=100_000)]
    """The most that may be changed within a period."""
    period_s: Duration
    """The period, at most 1h."""


class Direction(Model):
    """How fast the size may change in one direction."""

    stabilization_window_s: Window = 0.0
    """Scaling up takes the lowest, scaling down the highest size wanted within it: longer is calmer."""
    policies: Annotated[tuple[Rate, ...], Listed, Field(min_length=1)]
    """Limits of change."""
    select_policy: Literal["max", "min", "disabled"] = "max"
    """Of several limits the widest or the narrowest; `disabled`: no change in this direction."""


def _up() -> Direction:
    rates = ({"type": "percent", "value": 100, "period": "15s"}, {"type": "ranks", "value": 4, "period": "15s"})
    return Direction.model_validate({"policies": rates})


def _down() -> Direction:
    rates = ({"type": "ranks", "value": 1, "period": "60s"},)
    return Direction.model_validate({"stabilizationWindow": "5m", "policies": rates})


class Behavior(Model):
    """How fast the size may change."""

    scale_up: Direction = Field(default_factory=_up)
    """Absent: at once, by 100 percent or 4 ranks in 15s, whichever is more (those of Kubernetes)."""
    scale_down: Direction = Field(default_factory=_down)
    """Absent: the highest size wanted within 300s, and one rank in 60s."""


class Load(Model):
    """How the size follows the load. Without rules it does not."""

    interval_s: Duration = 1.0
    """Between two readings of the signals, and two decisions."""
    signals: dict[SignalName, Signal] = Field(default_factory=dict)
    """What is read, by name; rules use the names."""
    rules: Annotated[tuple[LoadRule, ...], Listed, Field(max_length=1000)] = ()
    """Each wants a size; the largest is taken."""
    behavior: Behavior = Field(default_factory=Behavior)
    cooldown_s: Window = 60.0
    """After a change of size, by load or by healing, none by load for this long."""
    fit_margin: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Smaller only if the load fits the remaining ranks with this share to spare. Larger: calmer and dearer."""
