"""Asking all ranks, again and again: what comes of it goes to the group's picture, to the owner as events, and to the router."""

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

from elastic.controller.records import Event
from healer.targets.vllm import signals
from healer.targets.vllm.group import BUSY, Group
from healer.targets.vllm.log_lines import Said
from healer.targets.vllm.machine import State
from healer.targets.vllm.processes import Processes, log_name
from healer.targets.vllm.records import Look, Role
from healer.targets.vllm.router import RouterLink
from healer.targets.vllm.watch import RankWatch

log = structlog.get_logger("healer.vllm")

ASK_S = 5.0
"""For each question to a rank; a server in trouble answers late or never."""
LOOK_AFTER_LOGS = 30
"""Polls between two looks at the sizes of logs."""


class Poller:
    """One task of the target, in its loop."""

    def __init__(
        self, group: Group, processes: Processes, router: RouterLink, idle: Callable[[], bool], wake: Callable[[], None]
    ) -> None:
        """`idle`: whether nothing may be changed now. `wake` is called after each time that all were asked."""
        self._group, self._processes, self._router = group, processes, router
        self._idle, self._wake, self._emit_one = idle, wake, group.emit
        self._polls = 0
        self.serves = False
        """The start is over: from then on the router is told, and canaries are sent."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._poll_once()
            except Exception as error:
                log.error("poll.failed", exc_info=error)
            await asyncio.sleep(max(0.05, self._group.poll_s - (loop.time() - began)))

    async def _poll_once(self) -> None:
        group, self._polls = self._group, self._polls + 1
        ranks = list(group.ranks.values())
        busy = group.machine.state in BUSY
        found = group.starter.processes([r.held for r in ranks])
        for rank in ranks:
            rank.see_processes(found.get(rank.held.slot, []), group.on_gone)
        signs = await asyncio.gather(*(self._ask(rank, busy) for rank in ranks))
        now = time.monotonic()
        live = group.live()
        slots = {r.held.dp_rank: r.held.slot for r in live}
        for rank, said in zip(ranks, signs, strict=True):
            if said:
                log.warning("rank.log", slot=rank.held.slot, said=[s.text for s in said][-3:])
                self._emit(signals.reports(rank, said, slots, group.tensor, now))
            self._notice(rank, now)
        self._emit(signals.beats(live, epoch=group.epoch, phase=group.machine.state.value, now=now, scaling=busy))
        self._ask_canaries(live, now)
        self._router.keep(start=not self._idle())
        if self.serves and not self._idle():
            group.publish()
        if self._polls % LOOK_AFTER_LOGS == 0 and group.config.mode == "launch" and not self._idle():
            for rank in ranks:
                self._processes.cut_log(log_name(rank.held.slot, rank.held.incarnation), group.config.log_bytes)
        async with group.polled:
            group.polled.notify_all()
        self._wake()

    @staticmethod
    async def _ask(rank: RankWatch, busy: bool) -> list[Said]:
        """What nobody has foreseen in one rank's answers must not silence the others."""
        try:
            return await rank.poll(deadline_s=ASK_S, scaling=busy)
        except Exception as error:
            log.error("poll.failed", slot=rank.held.slot, exc_info=error)
            rank.look = Look(at=time.monotonic(), why=f"its answers cannot be read: {error}")
            return []

    def _emit(self, events: Iterable[Event]) -> None:
        for event in events:
            self._emit_one(event)

    def _notice(self, rank: RankWatch, now: float) -> None:
        """A live rank whose server has closed, or that says itself that its engine is dead."""
        look = rank.look
        closed = look is not None and look.closed
        dead = look is not None and look.dead
        if rank.held.role == Role.LIVE and rank.gone is None and (closed or dead) and not rank.refused:
            rank.refused = True
            self._emit_one(signals.silent(rank, now))
        elif rank.refused and look is not None and look.answers and not look.dead:
            rank.refused = False

    def _ask_canaries(self, live: list[RankWatch], now: float) -> None:
        """A rank that serves nobody may be dead without anybody noticing: idle engines exchange nothing."""
        group, canary = self._group, self._group.config.canary
        if group.machine.state not in (State.SERVING, State.FILLING) or not self.serves:
            return
        busy = any(r.canary_task is not None and not r.canary_task.done() for r in live)
        for rank in sorted(live, key=lambda r: r.canary.at if r.canary else 0.0):
            due = rank.canary is None or now - rank.canary.at >= canary.interval_s
            failed = rank.canary is not None and not rank.canary.ok
            # one at a time, so that each is answered for by its own rank; a failed one is repeated soon
            if busy or not (due or failed) or not (rank.idle or failed):
                continue
            rank.canary_task = asyncio.create_task(self._canary(rank), name=f"canary {rank.held.slot}")
            busy = True

    async def _canary(self, rank: RankWatch) -> None:
        group, canary = self._group, self._group.config.canary
        since = rank.canary
        reference = group.reference if canary.compare else ()
        found = await rank.sing(
            group.model, canary.prompt, canary.tokens, deadline_s=canary.deadline_s, reference=reference
        )
        if not found.ok:
            if since is not None and not since.ok:
                # still the same trouble: it counts from its beginning
                rank.canary = type(found)(since.at, False, (), found.why)
            log.warning("canary.failed", slot=rank.held.slot, why=found.why)
