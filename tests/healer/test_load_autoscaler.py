"""The autoscaler as the supervisor uses it: beats, the gateway's page and endpoints of vLLM in, decisions out."""

import asyncio
import math
from typing import Any

import httpx
import pytest

from elastic.controller.records import GroupStatus, SlotStatus
from elastic.gateway.metrics import GatewayMetrics
from elastic.protocol import Counters
from elastic.view import Member
from healer.load.autoscaler import Autoscaler, RankHours
from healer.load.forecast import POINTS, Forecaster, History, fit
from healer.load.readings import Known
from healer.load.scraper import Scraper
from healer.policy.reasons import Reason
from tests.healer.load_timeline import policy_of


class HandClock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_780_000_000.0 + self.now


class World:
    """A group by script, and the endpoints that an HTTP client would find."""

    def __init__(self, spec: dict[str, Any], ranks: int = 2) -> None:
        self.clock, self.held, self.pages = HandClock(), "", dict[str, Any]()
        self.waiting = dict.fromkeys(range(ranks), 0)
        self.target = tuple(range(ranks))
        self.age_s = 0.1
        transport = httpx.MockTransport(self._answer)
        self.scaler = Autoscaler(
            policy_of(spec),
            self.clock,
            self.observe,
            lambda: "http://gateway",
            lambda: self.held,
            scraper=Scraper(self.clock, 1.0, httpx.AsyncClient(transport=transport)),
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        page = self.pages.get(request.url.host)
        return httpx.Response(503) if page is None else httpx.Response(200, text=page)

    def observe(self) -> GroupStatus:
        slots = tuple(
            SlotStatus(s, "live", Member(s, 0, 1, 1, ""), self.age_s, 7, n, 2, Counters(), 8)
            for s, n in self.waiting.items()
        )
        live = tuple(self.waiting)
        return GroupStatus("g", 1, live, self.target, 8, None, "", 0, len(live) - 1, slots)

    async def second(self) -> Any:
        self.clock.now += 1.0
        await self.scaler.scrape()
        return self.scaler.tick(self.clock.now)


QUEUE = {"kind": "targetTracking", "name": "queue", "signal": "waiting", "target": 4}


async def test_ranks_beats_and_the_gateways_queue_together_are_what_waits() -> None:
    world = World({"load": {"cooldown": "0s", "signals": {"waiting": {"metric": "waiting"}}, "rules": [QUEUE]}})
    world.pages["gateway"] = "elastic_gateway_queued 6.0\n"
    world.waiting = {0: 5, 1: 5}
    decision = await world.second()
    assert world.scaler.levels["waiting"].value == 16.0
    assert (decision.current, decision.size, decision.rule) == (2, 4, "queue")


async def test_ranks_that_fall_silent_are_missing_and_the_group_keeps_its_size() -> None:
    world = World({"load": {"cooldown": "0s", "signals": {"waiting": {"metric": "waiting"}}, "rules": [QUEUE]}})
    world.waiting = {0: 0, 1: 0}
    await world.second()
    world.age_s = 60.0
    for _ in range(400):
        decision = await world.second()
        assert not decision.acts
    assert decision.reason is Reason.SIGNAL_MISSING


async def test_latency_and_throughput_come_from_the_gateways_own_page() -> None:
    from prometheus_client import generate_latest

    signals = {
        "ttft": {"metric": "ttft", "window": "30s"},
        "tokens": {"metric": "tokensPerSecond"},
        "itl": {"metric": "itl"},
        "queue": {"metric": "queueTime"},
    }
    rules = [{"kind": "targetTracking", "name": "latency", "signal": "ttft", "target": 0.5}]
    world, metrics = World({"load": {"cooldown": "0s", "signals": signals, "rules": rules}}), GatewayMetrics()
    for _ in range(10):
        metrics.tokens.inc(20)
        metrics.ttft.observe(0.9)
        metrics.queue.observe(0.4)
        world.pages["gateway"] = generate_latest(metrics.registry).decode()
        decision = await world.second()
    assert 0.5 < world.scaler.levels["ttft"].value <= 1.0
    assert 0.25 < world.scaler.levels["queue"].value <= 0.5
    assert world.scaler.levels["tokens"].value == pytest.approx(20.0)
    assert world.scaler.levels["itl"].known is Known.IDLE
    assert decision.size > 2


async def test_one_endpoint_of_vllm_tells_of_every_rank_and_a_dead_one_is_told_of() -> None:
    signals = {
        "waiting": {
            "source": "prometheus",
            "url": "http://vllm:8000/metrics",
            "metric": "vllm:num_requests_waiting",
            "scope": "rank",
            "rankLabel": "engine",
        },
        "kv": {
            "source": "prometheus",
            "url": "http://other/metrics",
            "metric": "vllm:kv_cache_usage_perc",
            "aggregate": "max",
        },
    }
    world = World({"load": {"cooldown": "0s", "signals": signals, "rules": [QUEUE]}})
    world.pages["vllm"] = 'vllm:num_requests_waiting{engine="0"} 9\nvllm:num_requests_waiting{engine="1"} 15\n'
    decision = await world.second()
    assert decision.size == 6
    errors = {state.url: state.error for state in world.scaler.sources}
    assert errors == {"http://vllm:8000/metrics": "", "http://other/metrics": "answered 503"}
    assert world.scaler.levels["kv"].known is Known.MISSING


async def test_decisions_come_once_an_interval_and_none_without_rules() -> None:
    world = World({"load": {"signals": {"waiting": {"metric": "waiting"}}, "rules": [QUEUE]}})
    assert world.scaler.tick(world.clock.now) is not None
    assert world.scaler.tick(world.clock.now + 0.5) is None
    assert world.scaler.tick(world.clock.now + 1.0) is not None
    assert World({}).scaler.tick(0.0) is None


async def test_what_holds_the_group_is_said_and_nothing_is_done() -> None:
    world = World({"load": {"cooldown": "0s", "signals": {"waiting": {"metric": "waiting"}}, "rules": [QUEUE]}})
    world.waiting = {0: 20, 1: 20}
    world.pages["gateway"] = "elastic_gateway_queued 0\n"
    world.held = "slot 1 is being healed"
    decision = await world.second()
    assert not decision.acts
    assert decision.sentence.endswith("held: slot 1 is being healed")


async def test_the_reading_task_ends_with_the_daemon_and_survives_every_answer() -> None:
    world = World(
        {"load": {"interval": "100ms", "signals": {"ttft": {"metric": "ttft"}}, "rules": [dict(QUEUE, signal="ttft")]}}
    )
    task = asyncio.create_task(world.scaler.run())
    async with asyncio.timeout(5):
        while not world.scaler.sources:  # noqa: ASYNC110 (nothing tells when)
            await asyncio.sleep(0.01)
    assert world.scaler.sources[0].error == "answered 503"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_rank_hours_begin_anew_at_midnight_utc() -> None:
    hours, midnight = RankHours(), 1_780_012_800.0 - 1_780_012_800.0 % 86400
    hours.add(0.0, midnight - 3600, 4)
    assert hours.add(1800.0, midnight - 1800, 4) == pytest.approx(2.0)
    assert hours.add(3600.0, midnight, 4) == 0.0
    assert hours.add(3600.0 + 900, midnight + 900, 8) == pytest.approx(2.0)


# --- forecasts ----------------------------------------------------------------------------------------------------------


def day(step: int) -> float:
    return 50 + 40 * math.sin(2 * math.pi * step / POINTS)


def history(steps: int) -> History:
    found = History(season_s=960.0)
    for second in range(0, steps * 10 + 1, 5):
        found.add(float(second), day(second // 10))
    return found


async def test_a_forecast_made_in_its_own_process_finds_the_next_peak() -> None:
    known = history(3 * POINTS)
    found = await Forecaster(HandClock()).make(known, horizon_s=480.0)
    assert found.error == ""
    peak = found.peak(found.made_at, 480.0)
    assert peak == pytest.approx(90.0, rel=0.1)
    assert found.peak(found.made_at + 960.0, 480.0) is None


async def test_before_two_seasons_are_known_nothing_is_said() -> None:
    found = await Forecaster(HandClock()).make(history(POINTS), horizon_s=60.0)
    assert "1.0 seasons are known" in found.error
    assert found.peak(found.made_at, 60.0) is None


async def test_a_fit_that_takes_too_long_is_ended_and_told() -> None:
    found = await Forecaster(HandClock(), deadline_s=0.05).make(history(3 * POINTS), horizon_s=60.0)
    assert "more than 0.05 s" in found.error


def test_flat_load_is_forecast_flat() -> None:
    assert fit([3.0] * (2 * POINTS), POINTS, 4) == [3.0] * 4


def test_after_a_long_gap_the_past_is_dropped() -> None:
    known = history(2 * POINTS)
    assert known.enough
    known.add(known.season_s * 10, 1.0)
    assert not known.points
