"""One rank under watch: what it said when it was last asked, since when it does so, and which of its processes live."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection

from elastic.errors import ElasticError
from healer.targets.vllm.endpoints import BadAnswer, Closed, Endpoints, Gate, Phase
from healer.targets.vllm.log_lines import LogTail, Said, Sign
from healer.targets.vllm.meters import Meter
from healer.targets.vllm.plan import RankFacts
from healer.targets.vllm.processes import alive
from healer.targets.vllm.records import Canaried, Held, Load, Look, Part, Process

WATCHED = frozenset({Part.API, Part.ENGINE, Part.WORKER, Part.COORDINATOR})
"""Parts that a rank cannot do without."""
STOPPED = frozenset("Tt")


class RankWatch:
    """Of one incarnation, in the target's loop. `aclose` it."""

    def __init__(self, held: Held, endpoints: Endpoints, tail: LogTail | None, *, stall_after_s: float) -> None:
        self.held, self.endpoints = held, endpoints
        self.look: Look | None = None
        self.canary: Canaried | None = None
        self.wrong = 0
        self.gone: Process | None = None
        """A watched process that has ended."""
        self.gone_at = 0.0
        self.refused = False
        """The server that answered before does not take connections any more."""
        self.eplb_stopped = self.sticky = False
        self.faulted = False
        """Its log has told of a fault since this was last set to False."""
        self.canary_task: asyncio.Task[None] | None = None
        self.processes: list[Process] = []
        """Of its session, as last seen."""
        self._tail, self._meter, self._stall_after_s = tail, Meter(), stall_after_s
        self._has_faults = True
        self._known: dict[int, Process] = {}
        self._pidfds: dict[int, int] = {}
        self._shut_since: float | None = None
        self._unhealthy_since: float | None = None
        self._quiet_since: float | None = None
        self._generated = 0.0
        self._idle_since: float | None = None

    async def aclose(self) -> None:
        self.unwatch()
        if self.canary_task is not None:
            self.canary_task.cancel()
            await asyncio.gather(self.canary_task, return_exceptions=True)
        await self.endpoints.aclose()

    # --- processes ------------------------------------------------------------------------------------------------

    def watch_processes(self, found: Collection[Process], on_gone: Callable[["RankWatch"], None]) -> None:
        """These are the processes of the rank while it is sound; `on_gone` is called once, in the loop, when one ends. Where
        the kernel gives no pidfd, `see_processes` notices it."""
        self.unwatch()
        self._known = {one.pid: one for one in found if one.part in WATCHED and alive(one)}
        for one in self._known.values():
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(one.pid)
                self._pidfds[one.pid] = fd
                asyncio.get_running_loop().add_reader(fd, self._ended, one, on_gone)

    def unwatch(self) -> None:
        for fd in self._pidfds.values():
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        self._pidfds, self._known = {}, {}

    def _ended(self, one: Process, on_gone: Callable[["RankWatch"], None]) -> None:
        self.unwatch()
        if self.gone is None:
            self.gone, self.gone_at = one, time.monotonic()
            on_gone(self)

    def see_processes(self, found: list[Process], on_gone: Callable[["RankWatch"], None]) -> None:
        """`found`: of its session, now."""
        self.processes = found
        now = {(one.pid, one.pid_start): one for one in found}
        for one in list(self._known.values()):
            seen = now.get((one.pid, one.pid_start))
            if seen is None or not alive(seen):
                self._ended(one, on_gone)
                return

    @property
    def stopped(self) -> Process | None:
        """A process of the rank that somebody has stopped."""
        return next((one for one in self.processes if one.part in WATCHED and one.state in STOPPED), None)

    @property
    def alive(self) -> bool:
        return self.gone is None and not self.refused and self.stopped is None

    # --- what it says ---------------------------------------------------------------------------------------------

    async def poll(self, *, deadline_s: float, scaling: bool) -> list[Said]:
        """Ask everything once. `scaling`: healer itself has asked for a scaling, so shut gates are no fault. Returns the
        signs that are new in its log. Never raises for what the server does."""
        self.look = look = await self._ask(deadline_s)
        now = look.at
        shut = look.gate in (Gate.SCALING, Gate.SHUT) and not scaling
        if shut and look.scaling is not None and look.scaling.phase in (Phase.PREPARING, Phase.COMMITTING):
            shut = False
        self._shut_since = (self._shut_since or now) if shut else None
        self._unhealthy_since = (self._unhealthy_since or now) if look.unhealthy else None
        if look.load is not None:
            self._progress(look.load, now)
        signs = list(self._tail.new()) if self._tail is not None else []
        self.eplb_stopped |= any(said.sign == Sign.EPLB_STOPPED for said in signs)
        self.faulted |= any(said.sign == Sign.FAULT for said in signs)
        self.sticky |= any(said.sign == Sign.STICKY for said in signs)
        return signs

    async def _ask(self, deadline_s: float) -> Look:
        server, health = self.endpoints, None
        try:
            health = await server.health(deadline_s=deadline_s)
            scaling = await server.scaling(deadline_s=deadline_s)
            try:
                text = await server.metrics(deadline_s=deadline_s)
            except BadAnswer:
                gate = await server.gate(deadline_s=deadline_s)
                return Look(at=time.monotonic(), health=health, gate=gate, scaling=scaling)
            load = self._meter.read(text, str(self.held.dp_rank))
            fault = await server.fault_status(deadline_s=deadline_s) if self._has_faults else None
            self._has_faults = fault is not None
        except ElasticError as error:
            closed = isinstance(error, Closed)
            return Look(at=time.monotonic(), health=health, why=str(error), closed=closed)
        return Look(at=time.monotonic(), health=health, gate=Gate.OPEN, scaling=scaling, fault=fault, load=load)

    def _progress(self, load: Load, now: float) -> None:
        if load.running <= 0 and load.waiting <= 0:
            self._idle_since = self._idle_since or now
        elif self.canary_task is None or self.canary_task.done():
            self._idle_since = None
        moved = load.generated != self._generated
        self._generated = load.generated
        if load.running <= 0 or moved or self._quiet_since is None:
            self._quiet_since = now if load.running > 0 else None

    @property
    def idle(self) -> bool:
        load = self.look.load if self.look else None
        return load is not None and load.running <= 0 and load.waiting <= 0

    @property
    def generated(self) -> int:
        return int(self._generated)

    def still_since(self, now: float) -> float | None:
        """Since when it generates nothing although it should; None: it does, or that is not long enough."""
        marks = [self._quiet_since] if self._quiet_since is not None else []
        if self.canary is not None and not self.canary.ok:
            marks.append(self.canary.at)
        since = min(marks, default=now)
        return since if marks and now - since >= self._stall_after_s else None

    # --- canaries -------------------------------------------------------------------------------------------------

    async def sing(
        self, model: str, prompt: tuple[int, ...], tokens: int, *, deadline_s: float, reference: tuple[int, ...]
    ) -> Canaried:
        """One canary. `reference`: the tokens that it must give; empty: any."""
        began = time.monotonic()
        try:
            found = await self.endpoints.canary(model, prompt, tokens, deadline_s=deadline_s)
        except ElasticError as error:
            self.canary = Canaried(began, False, (), str(error))
            return self.canary
        right = not reference or found.tokens == reference
        if right or found.tokens:  # an answer that does not show its tokens is no wrong one
            self.wrong = 0 if right else self.wrong + 1
        why = "" if right else f"tokens {list(found.tokens)} instead of {list(reference)}"
        self.canary = Canaried(time.monotonic(), right, found.tokens, why)
        return self.canary

    def trusted_again(self, held: Held) -> None:
        """After a retry: the same processes, another incarnation."""
        self.held, self.wrong = held, 0
        self._unhealthy_since = self._quiet_since = None

    def facts(self, now: float) -> RankFacts:
        return RankFacts(
            held=self.held,
            look=self.look,
            alive=self.alive,
            unhealthy_since=self._unhealthy_since,
            shut_since=self._shut_since,
            still_since=self.still_since(now),
            canary=self.canary,
            wrong=self.wrong,
            eplb_stopped=self.eplb_stopped,
            idle_since=self._idle_since,
            sticky=self.sticky,
        )
