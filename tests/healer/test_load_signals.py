"""Signals: what endpoints show, as values; missing is not zero, and a restart is not a drop."""

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from healer.clock import SystemClock
from healer.load import series
from healer.load.exposition import BadText, Endpoint, Kind, Query
from healer.load.readings import GROUP, Known, Reading, Readings
from healer.load.scraper import Place, Scraper

WAITING = Query("waiting", "vllm:num_requests_waiting", Kind.GAUGE, slot_label="engine")
TTFT = Query("ttft", "vllm:time_to_first_token_seconds", Kind.QUANTILE, q=0.95)
TOKENS = Query("tokens", "vllm:generation_tokens_total", Kind.RATE)

TEXT = """\
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 7.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} %d
"""


def test_each_engine_of_one_endpoint_is_a_rank_of_its_own() -> None:
    (reading,) = Endpoint([WAITING]).read(TEXT % 1, 10.0)
    assert reading == Reading("waiting", 10.0, {0: 3.0, 1: 5.0})


def test_a_metric_that_the_endpoint_does_not_show_gives_no_value_and_not_zero() -> None:
    assert Endpoint([Query("kv", "vllm:kv_cache_usage_perc", Kind.GAUGE)]).read(TEXT % 1, 10.0) == ()


def test_only_series_with_the_asked_labels_count() -> None:
    query = Query("waiting", "vllm:num_requests_waiting", Kind.GAUGE, labels=(("engine", "1"),))
    (reading,) = Endpoint([query]).read(TEXT % 1, 1.0)
    assert reading.values == {GROUP: 5.0}


def test_a_rate_goes_on_over_a_restart_of_the_engine() -> None:
    endpoint, rates = Endpoint([TOKENS]), []
    # 100 a second; the engine restarts after t=3 and has counted 50 by t=4
    for at, total in enumerate((1000, 1100, 1200, 1300, 50, 150, 250)):
        rates += [r.values[GROUP] for r in endpoint.read(TEXT % total, float(at))]
    assert rates == pytest.approx([100, 100, 100, 350 / 4, 450 / 5, 550 / 6])
    assert min(rates) > 0


def test_the_first_sight_of_an_old_counter_is_no_burst() -> None:
    endpoint = Endpoint([TOKENS])
    assert endpoint.read(TEXT % 9_000_000, 0.0) == ()
    (reading,) = endpoint.read(TEXT % 9_000_010, 1.0)
    assert reading.values[GROUP] == pytest.approx(10.0)


def test_latency_is_of_the_window_and_not_of_the_whole_life_and_idle_is_not_missing() -> None:
    registry = CollectorRegistry()
    buckets = (0.1, 0.2, 0.4, 0.8, 1.6)
    histogram = Histogram("vllm:time_to_first_token_seconds", "t", buckets=buckets, registry=registry)
    endpoint, found = Endpoint([TTFT]), {}
    for at in range(0, 121):
        if at < 60:
            histogram.observe(1.5)
        elif at < 80:
            histogram.observe(0.15)
        for reading in endpoint.read(generate_latest(registry).decode(), float(at)):
            found[at] = reading.values[GROUP]
    assert found[50] > 0.8
    assert 0.1 < found[95] <= 0.2
    assert math.isnan(found[120])
    readings = Readings()
    readings.add([Reading("ttft", 120.0, {GROUP: found[120]})])
    assert readings.level("ttft", "max", frozenset(), 120.0, 10.0).known is Known.IDLE
    assert readings.level("ttft", "max", frozenset(), 140.0, 10.0).known is Known.MISSING


def test_the_window_of_a_counter_stays_small_however_often_it_is_read() -> None:
    counter = series.Counter(30.0)
    for step in range(10_000):
        counter.add(step * 0.1, {0.0: step * 5.0})
        assert counter.span_s <= 30.0 * (1 + 1 / series.STEPS) + 0.11
    assert len(counter._marks) <= series.STEPS + 2
    assert series.rate(counter) == pytest.approx(50.0)


def test_quantiles_lie_within_the_bucket_that_holds_them() -> None:
    draw = random.Random(1)
    registry = CollectorRegistry()
    histogram = Histogram("x", "x", buckets=(0.1, 0.2, 0.5, 1.0, 2.0), registry=registry)
    values = [draw.lognormvariate(-1.5, 0.5) for _ in range(5000)]
    for value in values:
        histogram.observe(value)
    counts: dict[float, float] = {}
    for metric in registry.collect():
        for sample in metric.samples:
            if sample.name == "x_bucket":
                counts[float(sample.labels["le"])] = sample.value
    for q in (0.5, 0.95, 0.99):
        exact, got = sorted(values)[int(q * len(values))], series.histogram_quantile(counts, q)
        bounds = [0.0, *counts]
        bucket = next(i for i in range(len(bounds)) if bounds[i] < exact <= bounds[i + 1])
        assert bounds[bucket] <= got <= bounds[bucket + 1]
    assert math.isnan(series.histogram_quantile({1.0: 0.0, math.inf: 0.0}, 0.5))
    assert series.histogram_quantile({1.0: 0.0, math.inf: 4.0}, 0.5) == 1.0


def test_a_labelled_counter_is_summed_over_its_labels() -> None:
    registry = CollectorRegistry()
    requests = Counter("elastic_gateway_requests", "r", ["outcome"], registry=registry)
    endpoint = Endpoint([Query("requests", "elastic_gateway_requests_total", Kind.RATE)])
    rates = []
    for at in range(4):
        requests.labels("completed").inc(3)
        requests.labels("busy").inc(1)
        rates += [r.values[GROUP] for r in endpoint.read(generate_latest(registry).decode(), float(at))]
    assert rates == pytest.approx([4, 4, 4])


@pytest.mark.parametrize("text", ["vllm:num_requests_waiting{engine=", "vllm:num_requests_waiting x", "\x00", "{}"])
def test_garbage_is_an_error_or_nothing_but_never_a_value(text: str) -> None:
    with contextlib.suppress(BadText):
        assert Endpoint([WAITING]).read(text, 0.0) == ()


# --- the newest values --------------------------------------------------------------------------------------------------


def test_values_age_out_one_rank_at_a_time() -> None:
    readings = Readings()
    readings.add([Reading("waiting", 0.0, {0: 4.0}), Reading("waiting", 8.0, {1: 6.0, 2: 8.0})])
    assert readings.level("waiting", "mean", {0, 1, 2}, 9.0, 10.0).value == 6.0
    later = readings.level("waiting", "mean", {0, 1, 2}, 12.0, 10.0)
    assert (later.known, later.value, later.ranks) == (Known.VALUE, 7.0, 2)
    assert readings.level("waiting", "mean", {0, 1, 2}, 30.0, 10.0).known is Known.MISSING


def test_a_rank_that_no_longer_exists_does_not_count_though_it_still_reports() -> None:
    readings = Readings()
    readings.add([Reading("waiting", 0.0, {0: 4.0, 7: 900.0})])
    assert readings.level("waiting", "sum", {0}, 1.0, 10.0).value == 4.0
    readings.forget({0})
    assert (
        readings.level("waiting", "sum", {0, 7}, 1.0, 10.0).value == 8.0
    )  # one of two known, the other taken as alike


def test_a_minority_of_ranks_is_not_taken_for_the_group() -> None:
    readings = Readings()
    readings.add([Reading("waiting", 0.0, {0: 0.0})])
    assert readings.level("waiting", "sum", {0, 1, 2, 3}, 1.0, 10.0).known is Known.MISSING


def test_a_value_from_the_future_does_not_count() -> None:
    readings = Readings()
    readings.add([Reading("queued", 100.0, {GROUP: 1.0})])
    assert readings.level("queued", "sum", frozenset(), 50.0, 1000.0).known is Known.MISSING


# --- fetching -----------------------------------------------------------------------------------------------------------


class Servers(httpx.AsyncBaseTransport):
    """By host: an answer, a refusal, or silence."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        match request.url.host:
            case "hangs":
                await asyncio.sleep(3600)
            case "refuses":
                raise httpx.ConnectError("connection refused")
            case "fails":
                return httpx.Response(503)
            case "floods":
                return httpx.Response(200, content=_flood())
        return httpx.Response(200, text=TEXT % 1)


async def _flood() -> AsyncIterator[bytes]:
    while True:
        yield b"x" * (1 << 20)


async def test_a_hanging_endpoint_delays_no_other_and_its_error_is_told() -> None:
    places = [Place(f"http://{host}/metrics") for host in ("hangs", "good", "refuses", "fails", "floods")]
    began = asyncio.get_running_loop().time()
    async with Scraper(SystemClock(), 0.2, httpx.AsyncClient(transport=Servers())) as scraper:
        readings = await scraper.read(dict.fromkeys(places, (WAITING,)))
        assert asyncio.get_running_loop().time() - began < 2.0
        assert [r.values for r in readings] == [{0: 3.0, 1: 5.0}]
        errors = [scraper.states[place].error for place in places]
    assert "no answer within 0.2 s" in errors[0]
    assert errors[1] == ""
    assert errors[2] == "connection refused"
    assert errors[3] == "answered 503"
    assert "longer than" in errors[4]


async def test_endpoints_that_are_not_asked_any_more_are_forgotten() -> None:
    async with Scraper(SystemClock(), 1.0, httpx.AsyncClient(transport=Servers())) as scraper:
        await scraper.read({Place("http://good/a"): (WAITING,), Place("http://good/b"): (WAITING,)})
        await scraper.read({Place("http://good/b"): (WAITING,)})
        assert [state.url for state in scraper.states.values()] == ["http://good/b"]
