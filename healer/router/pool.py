"""The ranks: who takes a request, the wait for one that does, and the end of attempts on a rank that the file drops.

One event loop owns it. A rank takes requests while the file admits it and its last probe was good; a failed attempt makes
it be probed again before it gets the next request.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import structlog

from elastic.gateway.ledger import RankId
from elastic.gateway.router import Candidate, choose, compare
from elastic.gateway.schema import ApiError
from elastic.protocol import Route
from healer.router.config import Limits, RouterConfig
from healer.router.metrics import RouterMetrics
from healer.router.probe import Reach, Seen, look

log = structlog.get_logger("healer.router")

CONNECT_DEADLINE_S = 5.0
KEEPALIVE_S = 3.0
"""Idle connections are dropped before vLLM's server drops them, which it does after 5 s: a request sent into that close
would be lost."""
REPROBE_FIRST_S = 0.05
REPROBE_MAX_S = 1.0
RETRY_BUSY_S = 1
RETRY_UNAVAILABLE_S = 5


class Rank:
    """One incarnation, for as long as the file names it."""

    def __init__(self, route: Route, client: httpx.AsyncClient) -> None:
        self.route = route
        self.id = RankId(route.slot, route.incarnation)
        self.client = client
        self.seen = Seen(Reach.UNKNOWN)
        self.in_flight = 0
        self.lost = False
        self.doubts = 0
        """How often an attempt said that something is wrong with it."""
        self._at_look = 0
        self._scopes: set[asyncio.Timeout] = set()
        self._kick = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def open(self) -> bool:
        return self.route.admit and self.seen.reach is Reach.OPEN and not self.lost

    def candidate(self) -> Candidate:
        """The reported load is as old as the last look: what the router sent and saw end since then is added."""
        told = self.seen.running + self.seen.waiting
        since = self.in_flight - self._at_look
        return Candidate(
            rank=self.id,
            connected=self.seen.reach is Reach.OPEN,
            admit=self.route.admit,
            in_flight=self.in_flight,
            waiting=0,
            running=max(0, told + since),
        )

    def saw(self, seen: Seen) -> None:
        self.seen, self._at_look = seen, self.in_flight

    def probe_now(self) -> None:
        self._kick.set()

    async def wait_for_kick(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._kick.wait()
        self._kick.clear()

    def abandon(self) -> None:
        """The file dropped it: whoever waits for it stops waiting now."""
        self.lost = True
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            scope.reschedule(now)

    @contextlib.asynccontextmanager
    async def attempt(self, deadline: float) -> AsyncIterator[None]:
        """Count an attempt; it ends with TimeoutError at the deadline (of the loop's clock) or when the rank is lost."""
        self.in_flight += 1
        try:
            async with asyncio.timeout_at(deadline) as scope:
                self._scopes.add(scope)
                if self.lost:
                    scope.reschedule(asyncio.get_running_loop().time())
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
        finally:
            self.in_flight -= 1


class Pool:
    """`acquire` is called by requests, `apply` by whoever reads the file, `run` once by the server. `on_change` is called
    in the loop when another set of ranks takes requests."""

    def __init__(
        self,
        metrics: RouterMetrics,
        *,
        make_client: Callable[[str], httpx.AsyncClient] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self.limits = Limits()
        self.epoch = -1
        self.closing = False
        self.ended = asyncio.Event()
        """Set when requests that are still in flight are to end with an error."""
        self.in_flight = 0
        self.queued = 0
        self.max_model_len: dict[str, int] = {}
        """By model, as a rank told it."""
        self.on_change: Callable[[], None] = lambda: None
        self._poll_s = 1.0
        self._ranks: dict[int, Rank] = {}
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._make_client = make_client or _client
        self._now = now
        self._tasks: asyncio.TaskGroup | None = None

    # --- ranks ------------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[Rank]:
        return [rank for _, rank in sorted(self._ranks.items())]

    def slot(self, slot: int) -> Rank | None:
        return self._ranks.get(slot)

    @property
    def admitting(self) -> int:
        return sum(rank.open for rank in self._ranks.values())

    def apply(self, config: RouterConfig) -> None:
        """Take the file over. It was checked before (`check_update`)."""
        if self._tasks is None:
            raise RuntimeError("the pool does not run")
        routes = [Route(rank.slot, rank.incarnation, rank.url, rank.admit) for rank in config.ranks]
        change = compare({slot: rank.route for slot, rank in self._ranks.items()}, routes)
        moved = [route for route in change.updated if route.address != self._ranks[route.slot].route.address]
        for route in moved:
            log.warning("address_of_known_rank_changed", slot=route.slot, incarnation=route.incarnation)
        for slot in [*(rank.slot for rank in change.dropped), *(route.slot for route in moved)]:
            rank = self._ranks.pop(slot)
            log.info("rank_dropped", slot=slot, incarnation=rank.id.incarnation, in_flight=rank.in_flight)
            rank.abandon()
            if rank.task is not None:
                rank.task.cancel()
        if change.opened or moved:
            self.max_model_len.clear()
        for route in [*change.opened, *moved]:
            rank = self._ranks[route.slot] = Rank(route, self._make_client(route.address))
            rank.task = self._tasks.create_task(self._watch(rank), name=f"probes of {rank.id}")
        for route in change.updated:
            self._ranks[route.slot].route = route
        self.epoch, self.limits, self._poll_s = config.epoch, config.limits, config.poll_s
        log.info("file_taken", epoch=self.epoch, admitted=[rank.id.slot for rank in self.ranks if rank.route.admit])
        self._wake()

    async def run(self, started: asyncio.Event) -> None:
        """Probe the ranks until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            started.set()
            await asyncio.Event().wait()

    async def _watch(self, rank: Rank) -> None:
        delay_s = REPROBE_FIRST_S
        try:
            while True:
                doubts = rank.doubts
                seen = await look(rank.client)
                if rank.doubts != doubts:
                    # an attempt failed meanwhile: what was seen may be older
                    continue
                before = rank.open, rank.seen.reach
                rank.saw(seen)
                if (rank.open, rank.seen.reach) != before:
                    log.info(
                        "rank_seen", slot=rank.id.slot, incarnation=rank.id.incarnation, reach=rank.seen.reach.value
                    )
                    self._wake()
                if rank.seen.reach is Reach.OPEN:
                    delay_s = REPROBE_FIRST_S
                    await rank.wait_for_kick(self._poll_s)
                else:
                    await rank.wait_for_kick(delay_s)
                    delay_s = min(delay_s * 2, REPROBE_MAX_S)
        finally:
            # attempts that were abandoned have left by now, or leave on the closed connection
            await rank.client.aclose()

    def suspect(self, rank: Rank, reach: Reach) -> None:
        """An attempt failed there: nothing new until a probe is good again."""
        rank.doubts += 1
        rank.probe_now()
        if rank.seen.reach is Reach.OPEN:
            rank.saw(Seen(reach))
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self.on_change()

    # --- requests ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Hold a place for one request. Raises ApiError 429 or 503."""
        if self.closing:
            raise ApiError(503, "the router is shutting down", code="shutting_down", retry_after_s=RETRY_UNAVAILABLE_S)
        if self.in_flight >= self.limits.max_in_flight:
            what = f"{self.in_flight} requests are in flight, the limit is {self.limits.max_in_flight}"
            raise ApiError(429, what, code="queue_full", retry_after_s=RETRY_BUSY_S)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def acquire(self, deadline: float, avoid: RankId | None = None) -> Rank:
        """The least loaded rank that takes requests; waits for one up to `hold_s`, or the deadline (of the loop's clock) if
        that is sooner. `avoid` only where there is no other. Raises ApiError 429 when too many wait, 503 at the end of the
        wait."""
        rank = self._choose(avoid)
        if rank is not None:
            return rank
        if self.queued >= self.limits.max_queued:
            what = f"no rank takes requests and {self.queued} wait for one, the limit is {self.limits.max_queued}"
            raise ApiError(429, what, code="queue_full", retry_after_s=RETRY_BUSY_S)
        began, loop = self._now(), asyncio.get_running_loop()
        limit = min(deadline, loop.time() + self.limits.hold_s)
        self.queued += 1
        try:
            async with asyncio.timeout_at(limit):
                while rank is None:
                    await self._changed.wait()
                    rank = self._choose(avoid)
            return rank
        except TimeoutError:
            what = f"no rank took the request within {self._now() - began:.1f} s"
            raise ApiError(503, what, code="no_ranks", retry_after_s=RETRY_UNAVAILABLE_S) from None
        finally:
            self.queued -= 1
            self.metrics.hold.observe(self._now() - began)

    def _choose(self, avoid: RankId | None) -> Rank | None:
        found = choose((rank.candidate() for rank in self._ranks.values()), avoid)
        return self._ranks[found.slot] if found is not None else None

    # --- life -------------------------------------------------------------------------------------------------------

    def update_gauges(self) -> None:
        """Before a scrape."""
        metrics = self.metrics
        metrics.in_flight.set(self.in_flight)
        metrics.queued.set(self.queued)
        metrics.ranks_open.set(self.admitting)
        metrics.epoch.set(self.epoch)
        metrics.rank_in_flight.clear()
        metrics.rank_open.clear()
        for rank in self.ranks:
            metrics.rank_in_flight.labels(rank.id.slot).set(rank.in_flight)
            metrics.rank_open.labels(rank.id.slot).set(rank.open)

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, wait for what is in flight, then end the rest with an explicit error."""
        self.closing = True
        self._wake()
        if self.in_flight:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._idle.wait()
        self.ended.set()


def _client(url: str) -> httpx.AsyncClient:
    # no proxy from the environment: these are our own servers. Silence is bounded for each request, connects here
    return httpx.AsyncClient(
        base_url=url,
        trust_env=False,
        verify=url.startswith("https"),
        timeout=httpx.Timeout(None, connect=CONNECT_DEADLINE_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S),
    )
