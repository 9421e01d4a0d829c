"""The target: one vLLM server with internal load balancing on Ray. It is watched, and its size changed; nothing else can be done.

What cannot be seen from outside: which engine is dead or hangs (a dead one ends the whole server, a hung one stands among
those that wait for it), the processes and GPUs of the engines (they are Ray's), the prepare phase of a scaling, and why one
failed. So a lost rank is refused to the owner, whose policy then asks for a human.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from pathlib import Path
from typing import Any

import structlog

from elastic.controller.records import (
    Event,
    GroupStatus,
    Outcome,
    Phase,
    PhaseBegan,
    RankBeat,
    RankGone,
    SequenceEnded,
    SequenceKind,
    SequenceReport,
    SlotStatus,
)
from elastic.errors import ElasticError, Infeasible
from elastic.protocol import Counters, Heartbeat
from elastic.view import Member
from healer.authority import Authority
from healer.policy.schema import Policy, VllmTarget
from healer.targets.vllm import commands
from healer.targets.vllm import state as files
from healer.targets.vllm.endpoints import Endpoints, Refused, read_key
from healer.targets.vllm.meters import Meter
from healer.targets.vllm.plan import LEAST_RANKS
from healer.targets.vllm.records import Load

log = structlog.get_logger("healer.vllm")

ASK_S = 5.0
BAD_REQUEST = 400
UNSEEN = (
    "with internal load balancing healer sees no engine's process and cannot end or start one: restart the vLLM server"
)


class RayTarget:
    """`healer.targets.Target` for `loadBalancing: internal`."""

    def __init__(
        self,
        policy: Policy,
        on_event: Callable[[Event], None],
        *,
        observe_only: bool = False,
        authority: Authority | None = None,
    ) -> None:
        target = policy.spec.target
        assert isinstance(target, VllmTarget)
        self._name, self._config, self._on_event = policy.metadata.name, target, on_event
        self._observe_only, self._authority = observe_only, authority or Authority()
        self._detection = policy.spec.detection
        self._server = Endpoints(target.urls[0], api_key=read_key(target.api_key_file))
        self._model = commands.model_name(target)
        self._size = self._wanted = target.ranks
        self._epoch = 0
        self._meters: dict[int, Meter] = {}
        self._loads: dict[int, Load] = {}
        self._moved: dict[int, float] = {}
        self._heard_at: float | None = None
        self._trouble, self._sequence = "", ""
        self._gone = False
        self._broken = ""
        """Why the size is not to be changed any more."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        run_dir = Path(self._config.run_dir)
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = files.load(run_dir, self._name)
        if known is not None:
            self._size, self._wanted, self._epoch = len(known.target), len(known.target), known.epoch
        try:
            version = await self._server.version(deadline_s=ASK_S)
            await self._canary()
        except ElasticError as error:
            await self._server.aclose()
            raise ElasticError(f"no vLLM server serves at {self._server.base}: {error}") from error
        self._begin(self._poll(), "vllm poll")
        return f"watches {self._size} engines of vLLM {version} at {self._server.base}"

    def observe(self) -> GroupStatus:
        now, live = time.monotonic(), tuple(range(self._size))
        age_s = now - self._heard_at if self._heard_at is not None else None
        slots = []
        for slot in range(self._config.max_ranks):
            load = self._loads.get(slot) or Load(0.0, 0.0, 0.0)
            slots.append(
                SlotStatus(
                    slot=slot,
                    state="live" if slot in live else "empty",
                    member=self._member(slot) if slot in live else None,
                    last_beat_age_s=age_s if slot in live else None,
                    round=int(load.generated),
                    waiting=int(load.waiting),
                    running=int(load.running),
                    counters=Counters(tokens=int(load.generated)),
                    experts=0,
                )
            )
        return GroupStatus(
            name=self._name,
            epoch=self._epoch,
            live=live,
            target=tuple(range(self._wanted)),
            max_ranks=self._config.max_ranks,
            sequence=self._sequence or None,
            placement_hash="",
            uncovered=0,
            losses_survivable=max(0, self._size - LEAST_RANKS),
            slots=tuple(slots),
            gateway="; ".join(text for text in (self._broken, self._trouble) if text),
        )

    def address(self) -> str:
        return self._server.base

    def lose(self, slots: Iterable[int], *, cause: str, detected: float, replace: bool) -> None:
        raise Infeasible(UNSEEN)

    def scale(self, target: int | Iterable[int], *, reason: str) -> tuple[int, ...]:
        self._authority.check()
        slots = tuple(range(target)) if isinstance(target, int) else tuple(sorted(set(target)))
        size, most = len(slots), self._config.max_ranks
        if slots != tuple(range(size)):
            raise Infeasible(f"vLLM drops its last ranks only: expected slots 0 to {size - 1}, not {list(slots)}")
        if not LEAST_RANKS <= size <= most:
            raise Infeasible(f"{size} ranks are outside {LEAST_RANKS}..{most}")
        if self._broken or self._trouble or self._sequence or self._observe_only:
            raise Infeasible(self._broken or self._trouble or self._sequence or "this is a dry run")
        if size != self._size:
            self._wanted = size
            self._sequence = f"scaling to {size}"
            self._begin(self._scale(size, reason), "vllm scale")
        return slots

    def release(self) -> None:
        """Nothing: a policy that asks for it is refused, since vLLM's ranks cannot drop a step."""

    def probation(self, slots: Collection[int]) -> None:
        """Nothing: where an engine starts is Ray's choice."""

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.aclose()

    async def stop(self) -> None:
        """The server is not healer's to end."""
        log.warning("server.left", why=f"{self._server.base} was not started by healer, and serves on")
        await self.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _member(self, slot: int) -> Member:
        return Member(slot, 0, 0, 0, self._server.base)

    async def _canary(self) -> None:
        """One request cannot be sent to one engine: this proves that the server answers, not that each engine does."""
        canary = self._config.canary
        await self._server.canary(self._model, canary.prompt, canary.tokens, deadline_s=canary.deadline_s)

    async def _poll(self) -> None:
        while True:
            try:
                await self._look()
            except Exception as error:
                # what nobody has foreseen in an answer must not end the watch
                log.error("poll.failed", exc_info=error)
            await asyncio.sleep(self._detection.heartbeat_interval_s)

    async def _look(self) -> None:
        now = time.monotonic()
        try:
            sound = await self._server.health(deadline_s=ASK_S)
            text = await self._server.metrics(deadline_s=ASK_S) if not self._sequence else ""
        except ElasticError as error:
            self._lost(str(error), now)
            return
        if not sound:
            self._lost("the server says that an engine is dead: it is about to end", now)
            return
        self._gone, self._trouble, self._heard_at = False, "", now
        for slot in range(self._size):
            if text and (load := self._meters.setdefault(slot, Meter()).read(text, str(slot))) is not None:
                before = self._loads.get(slot)
                if before is None or load.running <= 0 or load.generated != before.generated:
                    self._moved[slot] = now
                self._loads[slot] = load
            if now - self._moved.get(slot, now) < self._detection.stall_after_s or self._sequence:
                self._on_event(RankBeat(self._member(slot), self._beat(slot), now))

    def _beat(self, slot: int) -> Heartbeat:
        load = self._loads.get(slot) or Load(0.0, 0.0, 0.0)
        return Heartbeat(
            round=int(load.generated),
            phase="scaling" if self._sequence else "serving",
            epoch=self._epoch,
            idle=load.running <= 0,
            waiting_on=(),
            counters=Counters(tokens=int(load.generated)),
            waiting=int(load.waiting),
            running=int(load.running),
        )

    def _lost(self, why: str, now: float) -> None:
        self._trouble = f"the vLLM server does not serve: {why}"
        if not self._gone:
            self._gone = True
            log.error("server.lost", why=why)
            for slot in range(self._size):
                self._on_event(RankGone(self._member(slot), "socket", "?", now))

    async def _scale(self, size: int, reason: str) -> None:
        kind: SequenceKind = "join" if size > self._size else "retire"
        changed = tuple(range(min(size, self._size), max(size, self._size)))
        began = time.monotonic()
        self._on_event(PhaseBegan(kind, "scale", self._epoch, changed, began))
        outcome: Outcome = "committed"
        why = ""
        try:
            await self._server.scale(size, deadline_s=self._config.deadlines.scale_s)
            await self._canary()
            self._size, self._epoch = size, self._epoch + 1
            self._meters.clear()
            self._save()
        except Refused as error:
            outcome, why, self._wanted = "rolled-back", str(error), self._size
            if error.status != BAD_REQUEST:
                self._broken = f"a scaling has failed, and vLLM may be half changed: restart the server: {error}"
        except ElasticError as error:
            outcome, why, self._wanted = "failed", str(error), self._size
            self._broken = f"a scaling did not end: restart the server: {error}"
        self._sequence = ""
        ended = time.monotonic()
        self._on_event(
            SequenceEnded(
                SequenceReport(
                    kind=kind,
                    outcome=outcome,
                    reason=f"{reason}: {why}" if why else reason,
                    slots=changed,
                    live=tuple(range(self._size)),
                    epoch=self._epoch,
                    began=began,
                    ended=ended,
                    phases=(Phase("scale", began, ended),),
                    pause_s={},
                    loaded={},
                )
            )
        )

    def _save(self) -> None:
        target = tuple(range(self._size))
        state = files.VllmState(self._name, self._epoch, target, (), {}, 0, True, ())
        try:
            files.save(Path(self._config.run_dir), state)
        except ElasticError as error:
            log.error("state.not_saved", error=str(error))
