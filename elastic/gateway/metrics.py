"""What the gateway counts, in Prometheus form. One registry a gateway, so that several can live in one process."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "elastic_gateway_requests",
            "Requests by outcome: completed, failed, cancelled, invalid (4xx), busy (429), unavailable (503)",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in ("completed", "failed", "cancelled", "invalid", "busy", "unavailable"):
            self.requests.labels(outcome)
        self.replays = Counter(
            "elastic_gateway_replays",
            "Requests moved to another rank, by cause: lost, handover, broken",
            ["cause"],
            registry=self.registry,
        )
        for cause in ("lost", "handover", "broken"):
            self.replays.labels(cause)
        self.in_flight = Gauge("elastic_gateway_in_flight", "Requests admitted and not ended", registry=self.registry)
        self.queued = Gauge("elastic_gateway_queued", "Requests in flight that are on no rank", registry=self.registry)
        self.routes = Gauge("elastic_gateway_routes", "Ranks connected and admitting", registry=self.registry)
        self.tokens = Counter("elastic_gateway_tokens", "Tokens accepted", registry=self.registry)
        self.dropped = Counter(
            "elastic_gateway_dropped_tokens",
            "Tokens not accepted: of attempts that are over, doubled or out of order",
            registry=self.registry,
        )
        self.ttft = Histogram(
            "elastic_gateway_ttft_seconds",
            "From admission to the first token",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.queue = Histogram(
            "elastic_gateway_queue_seconds",
            "From admission until a rank has a KV sequence for the request, told with its first token",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.itl = Histogram(
            "elastic_gateway_itl_seconds",
            "Between the tokens of one request, replays included",
            buckets=SECONDS,
            registry=self.registry,
        )
