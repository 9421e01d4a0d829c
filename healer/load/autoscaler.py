"""The load rules at work: reads the signals in the background, and decides when the supervisor asks.

`run` does all that waits (endpoints, forecasts) in a task of its own; `tick` is pure but for the state that it keeps, and
takes a millisecond. Whoever calls `tick` acts on the decision, and says so if the executor refused it.
"""

import asyncio
import math
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from elastic.controller.records import GroupStatus, SlotStatus
from healer.clock import Clock
from healer.load.decision import ScaleDecision
from healer.load.engine import Group, ScalerState, Seen, evaluate, refused
from healer.load.exposition import Kind, Query
from healer.load.forecast import Forecast, Forecaster, History
from healer.load.plan import compile_rules, query_of, router_metric
from healer.load.readings import Known, Level, Reading, Readings
from healer.load.scraper import Place, Scraper, SourceState
from healer.policy.schedules import Calendar
from healer.policy.schema import Policy, Predictive, Signal, Target

QUEUED = Query("elastic_gateway_queued", "elastic_gateway_queued", Kind.GAUGE)
"""Requests that are on no rank: the ranks cannot tell of them."""

BY_RANK: dict[str, Callable[[SlotStatus, int], float]] = {
    "waiting": lambda slot, _: float(slot.waiting),
    "running": lambda slot, _: float(slot.running),
    # the embedded runtime's KV cache holds a fixed number of sequences
    "kvUse": lambda slot, max_seqs: slot.running / max_seqs,
}
"""What the ranks of the embedded executor tell of themselves with each beat."""


class RankHours:
    """What was spent since midnight UTC. Begins at 0 with the daemon."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._last: tuple[float, int] | None = None

    def add(self, now: float, wall: float, ranks: int) -> float:
        day = datetime.fromtimestamp(wall, UTC).toordinal()
        if self._last is not None:
            before, known = self._last
            self.spent = 0.0 if day != known else self.spent + max(0.0, now - before) * ranks / 3600
        self._last = now, day
        return self.spent


class Autoscaler:
    """Owned by the supervisor. `observe` and `address` are those of its target; `held` says why load may change nothing
    now (`healer.policy.guards.scaling`), empty when it may."""

    def __init__(
        self,
        policy: Policy,
        clock: Clock,
        observe: Callable[[], GroupStatus],
        address: Callable[[], str],
        held: Callable[[], str],
        *,
        scraper: Scraper | None = None,
        forecaster: Forecaster | None = None,
    ) -> None:
        load = policy.spec.load
        self._policy, self._clock, self._rules = policy, clock, compile_rules(policy)
        self._observe, self._address, self._held = observe, address, held
        self._scraper, self._forecaster = scraper, forecaster or Forecaster(clock)
        self._state, self.readings = ScalerState(), Readings()
        self._calendar, self._rank_hours = Calendar(policy.spec.schedules), RankHours()
        self._predictive = tuple(rule for rule in load.rules if isinstance(rule, Predictive))
        self._histories = {rule.name: History(rule.season_s) for rule in self._predictive}
        self._forecasts: dict[str, Forecast] = {}
        self._next = -math.inf
        self.last: ScaleDecision | None = None
        self.levels: dict[str, Level] = {}

    def adopt(self, policy: Policy) -> None:
        """One that differs in anything but its load rules and schedules; windows, rates and histories go on."""
        self._policy, self._rules = policy, compile_rules(policy)

    @property
    def idle(self) -> bool:
        """Whether the policy asks nothing of it: no load rules and no schedules."""
        spec = self._policy.spec
        return not spec.load.rules and not spec.schedules

    @property
    def sources(self) -> tuple[SourceState, ...]:
        """How the last look at each endpoint went."""
        return tuple(self._scraper.states.values()) if self._scraper else ()

    # --- deciding -------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> ScaleDecision | None:
        """The decision that is due; None between two intervals, or where the policy asks nothing. Never blocks."""
        if self.idle or now < self._next:
            return None
        self._next = now + self._policy.spec.load.interval_s
        group, wall = self._observe(), self._clock.wall()
        self._beats(group, now)
        self.levels = self._levels(group, now)
        self._remember(group, now)
        seen = Seen(
            group=self._group(group),
            levels=self.levels,
            forecasts=self._forecasts,
            calendar=self._calendar.at(wall),
            rank_hours=self._rank_hours.add(now, wall, len(group.live)),
        )
        self.last, self._state = evaluate(self._rules, self._state, seen, now)
        return self.last

    def refused(self, why: str) -> None:
        """The executor refused the last decision: it is not asked again before a cool-down has passed."""
        self._state = refused(self._state, why, self._clock.monotonic())

    def _group(self, group: GroupStatus) -> Group:
        live, floor = len(group.live), self._policy.spec.bounds.redundancy_floor
        # fewer ranks than could be left by the losses that are survivable now have no slot for some expert
        least = max(1, live - group.losses_survivable + floor)
        return Group(len(group.target), live, self._held(), least)

    def _beats(self, group: GroupStatus, now: float) -> None:
        live = [slot for slot in group.slots if slot.state == "live" and slot.member is not None]
        self.readings.forget({slot.slot for slot in live})
        if not live:
            return
        target = self._policy.spec.target
        max_seqs = target.max_seqs if isinstance(target, Target) else 1
        for name, signal in self._policy.spec.load.signals.items():
            if signal.source != "gateway" or signal.metric not in BY_RANK:
                continue
            tell = BY_RANK[signal.metric]
            values = {
                slot.slot: tell(slot, max_seqs)
                for slot in live
                if slot.last_beat_age_s is not None and slot.last_beat_age_s <= signal.stale_after_s
            }
            self.readings.add([Reading(name, now, values)])

    def _levels(self, group: GroupStatus, now: float) -> dict[str, Level]:
        levels, live = {}, frozenset(group.live)
        for name, signal in self._policy.spec.load.signals.items():
            level = self.readings.level(name, signal.aggregate, live, now, signal.stale_after_s)
            if signal.source == "gateway" and signal.metric == "waiting" and signal.scope == "group":
                level = self._with_queued(level, signal, now)
            levels[name] = level
        return levels

    def _with_queued(self, level: Level, signal: Signal, now: float) -> Level:
        queued = self.readings.level(QUEUED.signal, "sum", frozenset(), now, signal.stale_after_s)
        if level.known is not Known.VALUE or queued.known is not Known.VALUE or signal.aggregate != "sum":
            return level
        return msgspec.structs.replace(level, value=level.value + queued.value)

    # --- reading --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read the endpoints each interval, and make forecasts, until cancelled."""
        if self.idle:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._scrape_on(), name="load signals")
            for rule in self._predictive:
                tasks.create_task(self._forecast_on(rule), name=f"forecast {rule.name}")

    async def scrape(self) -> None:
        """One look at every endpoint that a signal names; ends within an interval, never raises for what they do."""
        places = self._places()
        if not places:
            return
        if self._scraper is None:
            self._scraper = Scraper(self._clock, max(0.1, self._policy.spec.load.interval_s))
        self.readings.add(await self._scraper.read(places))

    def _places(self) -> dict[Place, tuple[Query, ...]]:
        """By endpoint, what is to be read there."""
        wanted: dict[Place, tuple[Query, ...]] = {}
        gateway, router = self._address(), not isinstance(self._policy.spec.target, Target)
        queued = Query(QUEUED.signal, router_metric(QUEUED.metric), Kind.GAUGE) if router else QUEUED
        for name, signal in self._policy.spec.load.signals.items():
            if signal.source == "prometheus":
                place = Place(signal.url)
            elif gateway:
                place = Place(f"{gateway}/metrics")
            else:
                continue
            waits = signal.source == "gateway" and signal.metric == "waiting"
            query = queued if waits else query_of(name, signal, router=router)
            if query is not None and query not in wanted.get(place, ()):
                wanted[place] = (*wanted.get(place, ()), query)
        return wanted

    async def _scrape_on(self) -> None:
        interval_s = self._policy.spec.load.interval_s
        loop = asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                await self.scrape()
                await asyncio.sleep(max(0.01, interval_s - (loop.time() - began)))
        finally:
            if self._scraper is not None:
                await self._scraper.close()

    # --- forecasts ------------------------------------------------------------------------------------------------

    def _remember(self, group: GroupStatus, now: float) -> None:
        for rule in self._predictive:
            level = self.levels[rule.signal]
            if level.known is Known.VALUE:
                shared = rule.signal in self._rules.extensive
                self._histories[rule.name].add(now, level.value if shared else level.value * len(group.live))

    async def _forecast_on(self, rule: Predictive) -> None:
        history = self._histories[rule.name]
        made_at: float | None = None
        while True:
            if history.end is not None and history.end != made_at:
                made_at = history.end
                self._forecasts[rule.name] = await self._forecaster.make(history, rule.horizon_s)
            await asyncio.sleep(min(history.step_s / 4, 10.0))
