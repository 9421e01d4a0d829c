"""Owns the ledger and the connections to the ranks: places requests, replays those of a lost rank, hands over those of
a draining one, ends those that nobody serves in time.

Runs in one event loop; every method but `run` returns at once. What a rank's death costs a request is one placement: the
kernel closes the connection, and in the same turn of the loop its requests are on other ranks.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from elastic.channel import Channel
from elastic.errors import NeedsReplan, Retryable
from elastic.gateway.ledger import Entry, Failure, Ledger, Order, RankId, Reason, State, Verdict
from elastic.gateway.metrics import GatewayMetrics
from elastic.gateway.router import Candidate, choose, compare, to_hand_over
from elastic.protocol import AnyMessage, Cancel, Emitted, GatewayStatus, Hello, Load, Rejected, Route

log = structlog.get_logger("elastic.gateway")

CONNECT_DEADLINE_S = 5.0
RECONNECT_FIRST_S = 0.02
RECONNECT_MAX_S = 1.0


class Busy(Exception):
    """As many requests are in flight as the gateway is to hold."""


class Unavailable(Exception):
    """The gateway takes nothing: it ends, or was never told of a rank."""


class Link:
    """The connection to one incarnation of a rank, for as long as the routes name it."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.rank = RankId(route.slot, route.incarnation)
        self.channel: Channel | None = None
        self.load = Load(waiting=0, running=0, max_seqs=0)
        self.heard = False
        """Whether this connection ever brought a message."""
        self.task: asyncio.Task[None] | None = None


class Dispatcher:
    """`admit` and `cancel` are called by the answers, `set_routes` by the control socket, `run` once by the server.

    `notify` of a request is called after each change of its entry, in the loop; it must not raise or block.
    """

    def __init__(
        self,
        group: str,
        *,
        max_queued: int,
        request_timeout_s: float,
        metrics: GatewayMetrics,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = Ledger()
        self.epoch = -1
        self.closing = False
        self._group, self._max_queued, self._timeout_s = group, max_queued, request_timeout_s
        self._metrics, self._now = metrics, now
        self._links: dict[int, Link] = {}
        self._notify: dict[str, Callable[[], None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._seen_routes = False
        self._empty = asyncio.Event()

    # --- requests ---------------------------------------------------------------------------------------------------

    def admit(self, order: Order, notify: Callable[[], None]) -> Entry:
        """Take a request and place it if a rank admits. Raises Busy or Unavailable, with the reason."""
        if self.closing:
            raise Unavailable("the gateway is shutting down")
        if not self._seen_routes:
            raise Unavailable("no rank serves yet")
        if len(self.ledger) >= self._max_queued:
            raise Busy(f"{len(self.ledger)} requests are in flight, the limit is {self._max_queued}")
        entry = self.ledger.admit(order, self._now())
        self._notify[order.request] = notify
        self._place(order.request)
        return entry

    def cancel(self, request: str) -> None:
        """The client is gone; nothing happens when the request has ended."""
        self._end(request, self.ledger.cancel)

    def finish(self, request: str, finish: str) -> None:
        """The answer is whole by the text (stop string); nothing happens when the request has ended."""
        self._end(request, partial(self.ledger.finish, finish=finish))

    def fail(self, request: str, failure: Failure) -> None:
        self._end(request, partial(self.ledger.fail, failure=failure))

    def _end(self, request: str, close: Callable[[str], RankId | None]) -> None:
        entry = self.ledger.get(request)
        if entry is None:
            return
        self._forget_at(close(request), entry)
        self._ended(entry)

    def _ended(self, entry: Entry) -> None:
        """Tell whoever waits for the entry; it is out of the ledger."""
        self._metrics.requests.labels(entry.state.value).inc()
        if entry.failure is not None:
            log.warning("request_failed", request=entry.order.request, why=entry.failure.message)
        self._notify.pop(entry.order.request)()
        if not len(self.ledger):
            self._empty.set()

    def _forget_at(self, rank: RankId | None, entry: Entry) -> None:
        link = self._links.get(rank.slot) if rank else None
        if link is not None and link.rank == rank and link.channel is not None:
            link.channel.send(Cancel(request=entry.order.request, attempt=entry.attempt))

    # --- placing ----------------------------------------------------------------------------------------------------

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(
                rank=link.rank,
                connected=link.channel is not None,
                admit=link.route.admit,
                in_flight=self.ledger.in_flight(link.rank),
                waiting=link.load.waiting,
                running=link.load.running,
            )
            for link in self._links.values()
        ]

    @property
    def admitting(self) -> int:
        """Ranks that would take a request now."""
        return sum(candidate.open for candidate in self._candidates())

    def _place(self, request: str, avoid: RankId | None = None) -> bool:
        rank = choose(self._candidates(), avoid)
        channel = self._links[rank.slot].channel if rank else None
        if rank is None or channel is None:
            return False
        channel.send(self.ledger.assign(request, rank, self._now()))
        return True

    def _place_waiting(self) -> None:
        for request in self.ledger.waiting():
            if not self._place(request):
                return

    def _move(self, requests: Sequence[str], cause: str, *, lost: bool) -> None:
        """Take requests off their rank, and place them again."""
        for request in requests:
            entry = self.ledger.get(request)
            if entry is None or (rank := entry.rank) is None:
                continue
            self._forget_at(rank, entry)
            self.ledger.release(request, lost=lost)
            if entry.state is State.FAILED:
                self._ended(entry)
                continue
            self._metrics.replays.labels(cause).inc()
            self._place(request, avoid=rank)

    def _hand_over(self) -> None:
        for rank in to_hand_over(self._candidates()):
            requests = self.ledger.held_by(rank)
            log.info("handover", slot=rank.slot, incarnation=rank.incarnation, requests=len(requests))
            self._move(requests, "handover", lost=False)

    # --- routes -----------------------------------------------------------------------------------------------------

    def set_routes(self, epoch: int, routes: Sequence[Route]) -> None:
        """Take over the controller's list. Raises NeedsReplan for an epoch older than the last one."""
        if self._tasks is None:
            raise RuntimeError("the dispatcher does not run")
        if epoch < self.epoch:
            raise NeedsReplan(f"routes of epoch {epoch} are older than those of epoch {self.epoch} in force")
        change = compare({slot: link.route for slot, link in self._links.items()}, routes)
        gone = [self._links.pop(rank.slot) for rank in change.dropped]
        for route in change.updated:
            link = self._links[route.slot]
            if link.route.address != route.address:
                log.warning("address_of_known_rank_changed", slot=route.slot, incarnation=route.incarnation)
            link.route = route
        for route in change.opened:
            link = self._links[route.slot] = Link(route)
            link.task = self._tasks.create_task(self._hold(link), name=f"link to {link.rank}")
        self.epoch = epoch
        self._seen_routes = self._seen_routes or bool(routes)
        if change.opened or gone:
            names = {"opened": [r.slot for r in change.opened], "dropped": [link.rank.slot for link in gone]}
            log.info("routes", epoch=epoch, slots=sorted(self._links), **names)
        for link in gone:
            self._retire(link)
        self._hand_over()
        self._place_waiting()

    def _retire(self, link: Link) -> None:
        """A rank is out of the routes: its requests move, its connection ends."""
        for request in self.ledger.held_by(link.rank):
            if link.channel is not None and (entry := self.ledger.get(request)) is not None:
                link.channel.send(Cancel(request=request, attempt=entry.attempt))
        # a rank that leaves by plan is asked to drain first; one that vanishes was lost, and this news was faster than its
        # socket
        lost = link.route.admit
        self._move(self.ledger.held_by(link.rank), "lost" if lost else "handover", lost=lost)
        if link.task is not None:
            link.task.cancel()

    async def _hold(self, link: Link) -> None:
        """Keep the connection up until the task is cancelled. A rank that closed it is lost for its requests at once;
        should the process live after all, it is used again when it answers."""
        delay_s = RECONNECT_FIRST_S
        while True:
            name = str(link.rank)
            hello = Hello(role="gateway", group=self._group)
            try:
                channel = await Channel.open(link.route.address, hello, name, deadline_s=CONNECT_DEADLINE_S)
            except Retryable as error:
                if delay_s == RECONNECT_FIRST_S:
                    log.warning("rank_unreachable", slot=link.rank.slot, why=str(error))
            else:
                closed = asyncio.Event()
                link.channel, link.heard = channel, False
                channel.start(partial(self._on_event, link), partial(self._on_close, link, closed))
                log.info("rank_connected", slot=link.rank.slot, incarnation=link.rank.incarnation)
                try:
                    self._hand_over()
                    self._place_waiting()
                    await closed.wait()
                finally:
                    link.channel = None
                    await channel.aclose()
                if link.heard:
                    delay_s = RECONNECT_FIRST_S
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RECONNECT_MAX_S)

    def _on_close(self, link: Link, closed: asyncio.Event, why: str) -> None:
        requests = self.ledger.held_by(link.rank)
        log.warning(
            "rank_gone", slot=link.rank.slot, incarnation=link.rank.incarnation, why=why, requests=len(requests)
        )
        link.channel = None
        link.load = Load(waiting=0, running=0, max_seqs=0)
        self._move(requests, "lost", lost=True)
        closed.set()

    # --- what ranks say ---------------------------------------------------------------------------------------------

    def _on_event(self, link: Link, message: AnyMessage) -> None:
        link.heard = True
        match message:
            case Emitted():
                self._on_emitted(link, message)
            case Load():
                link.load = message
            case Rejected():
                entry = self.ledger.get(message.request)
                if entry is not None and entry.rank == link.rank and entry.attempt == message.attempt:
                    self.fail(message.request, Failure(Reason.REJECTED, message.why))
            case _:
                log.warning("unexpected_message", slot=link.rank.slot, message=type(message).__name__)

    def _on_emitted(self, link: Link, emitted: Emitted) -> None:
        entry = self.ledger.get(emitted.request)
        now = self._now()
        had, since = (len(entry.accepted), entry.progress_at) if entry is not None else (0, now)
        verdict = self.ledger.emit(link.rank, emitted, now)
        if verdict is Verdict.BROKEN:
            log.warning("emission_out_of_order", slot=link.rank.slot, request=emitted.request, start=emitted.start)
            self._move([emitted.request], "broken", lost=True)
        if verdict is not Verdict.ACCEPTED or entry is None:
            self._metrics.dropped.inc(len(emitted.tokens))
            return
        if fresh := len(entry.accepted) - had:
            self._metrics.tokens.inc(fresh)
            (self._metrics.itl if had else self._metrics.ttft).observe(now - since)
            if not had:
                self._metrics.queue.observe(max(0.0, entry.placed_at - since) + emitted.queued_s)
        if entry.open:
            if fresh:
                self._notify[emitted.request]()
        else:
            if emitted.finish is None:
                # the ledger ended it by its tokens; the rank may not know
                self._forget_at(link.rank, entry)
            self._ended(entry)

    # --- life -------------------------------------------------------------------------------------------------------

    def status(self, id_: int) -> GatewayStatus:
        totals = self.ledger.totals()
        return GatewayStatus(
            id=id_,
            accepted=totals.accepted,
            completed=totals.completed,
            failed=totals.failed,
            replayed=totals.replayed,
            in_flight=len(self.ledger),
            queued=len(self.ledger.waiting()),
            per_slot={slot: self.ledger.in_flight(link.rank) for slot, link in sorted(self._links.items())},
            epoch=self.epoch,
        )

    def update_gauges(self) -> None:
        """Before a scrape."""
        self._metrics.in_flight.set(len(self.ledger))
        self._metrics.queued.set(len(self.ledger.waiting()))
        self._metrics.routes.set(self.admitting)

    async def run(self) -> None:
        """Hold the connections and watch the deadlines until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                await asyncio.sleep(min(0.5, self._timeout_s / 4))
                for request, failure in self.ledger.overdue(self._now(), self._timeout_s):
                    self.fail(request, failure)

    async def drain(self, grace_s: float) -> None:
        """Admit nothing any more; wait for what is in flight, then end the rest with an explicit error."""
        self.closing = True
        try:
            if len(self.ledger):
                self._empty.clear()
                async with asyncio.timeout(grace_s):
                    await self._empty.wait()
        except TimeoutError:
            for request in self.ledger.requests():
                self.fail(
                    request, Failure(Reason.SHUTDOWN, f"the gateway shut down {grace_s:g} s after it was told to")
                )
