"""What the router counts, in Prometheus form. One registry a router, so that several can live in one process."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests",
            "Requests by outcome: completed, refused (the rank's own 4xx), failed, cancelled, invalid, busy (429), "
            "unavailable (503)",
            "outcome",
        )
        for outcome in ("completed", "refused", "failed", "cancelled", "invalid", "busy", "unavailable"):
            self.requests.labels(outcome)
        self.attempts_lost = self._counter(
            "attempts_lost",
            "Attempts on a rank that gave no whole answer, by cause",
            "cause",
        )
        self.replays = self._counter(
            "replays",
            "Requests taken up by another rank: continued behind the tokens that were there, or restarted with none",
            "how",
        )
        for how in ("continued", "restarted"):
            self.replays.labels(how)
        self.tokens = self._counter("tokens", "Tokens of answers that can be continued")
        self.reloads = self._counter("reloads", "Readings of the file, by result: taken, refused", "result")
        for result in ("taken", "refused"):
            self.reloads.labels(result)
        self.in_flight = self._gauge("in_flight", "Requests admitted and not ended")
        self.queued = self._gauge("queued", "Requests in flight that wait for a rank")
        self.ranks_open = self._gauge("ranks_open", "Ranks that take requests")
        self.epoch = self._gauge("epoch", "Epoch of the file in force")
        self.rank_in_flight = self._gauge("rank_in_flight", "The router's requests on a rank", "slot")
        self.rank_open = self._gauge("rank_open", "Whether a rank takes requests", "slot")
        self.ttft = self._histogram("ttft_seconds", "From admission to the first token")
        self.itl = self._histogram("itl_seconds", "Between two arrivals of tokens of one request, replays included")
        self.hold = self._histogram("hold_seconds", "Waits for a rank that takes a request")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"healer_router_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"healer_router_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"healer_router_{name}", text, buckets=SECONDS, registry=self.registry)
