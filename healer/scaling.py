"""The load rules beside healing: reads signals in the background, and asks the supervisor for the sizes that are decided."""

import asyncio
import contextlib
from collections.abc import Callable

from elastic.controller.records import GroupStatus
from elastic.errors import ElasticError
from healer.clock import Clock
from healer.journal import Journal, Kind
from healer.load.autoscaler import Autoscaler
from healer.load.readings import Known
from healer.logs import LateLog
from healer.policy.schema import Policy
from healer.status import ScalingStatus
from healer.trace import LoadLine, Recorder

JOURNAL_EVERY_S = 10.0
"""Between two samples of the load in the journal: enough to try another policy on it, some MB a day."""


class Scaling:
    """Owned by the supervisor, called in its loop. `scale` sets a size, with who asked; it raises ElasticError when that
    cannot be. `held` says why load may change nothing now, empty when it may."""

    def __init__(
        self,
        policy: Policy,
        clock: Clock,
        observe: Callable[[], GroupStatus],
        address: Callable[[], str],
        held: Callable[[], str],
        scale: Callable[[int, str], object],
        journal: Journal,
        log: LateLog,
        recorder: Recorder | None = None,
    ) -> None:
        self.autoscaler = Autoscaler(policy, clock, observe, address, held)
        self._scale, self._journal, self._log, self._clock = scale, journal, log, clock
        self._recorder = recorder
        self._task: asyncio.Task[None] | None = None
        self._said: tuple[object, ...] = ()
        self._next_sample = 0.0

    def start(self) -> None:
        if not self.autoscaler.idle:
            self._task = asyncio.create_task(self.autoscaler.run(), name="load signals")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def adopt(self, policy: Policy) -> None:
        """Other bounds, from now on, under the same load rules and schedules."""
        self.autoscaler.adopt(policy)

    def tick(self, now: float) -> None:
        """Decide when it is due, and carry the decision out. A task that failed is begun again."""
        if self._task is not None and self._task.done():
            self._log.say("error", "load.failed", exc_info=self._task.exception())
            self.start()
        decision = self.autoscaler.tick(now)
        if decision is None:
            return
        self._record(now)
        if decision.acts or decision.key != self._said:
            told = {
                name: getattr(decision, name) for name in ("reason", "current", "wanted", "size", "rule", "sentence")
            }
            self._log.say("info", "scaling", **told)
            self._journal.add(Kind.LIFECYCLE, {"event": "scaling", "dry_run": decision.dry_run, **told})
        self._said = decision.key
        if decision.acts:
            try:
                self._scale(decision.size, f"load rule {decision.rule}" if decision.rule else f"the {decision.reason}")
            except ElasticError as error:
                self.autoscaler.refused(str(error))

    def status(self) -> ScalingStatus:
        last, levels = self.autoscaler.last, self.autoscaler.levels
        return ScalingStatus(
            sentence=last.sentence if last else "",
            reason=last.reason.value if last else "",
            wanted=last.wanted if last else 0,
            signals={name: level.value for name, level in levels.items() if level.known is Known.VALUE},
            missing=tuple(name for name, level in levels.items() if level.known is Known.MISSING),
            problems=tuple(f"{one.url}: {one.error}" for one in self.autoscaler.sources if one.error),
        )

    def _record(self, now: float) -> None:
        levels = self.autoscaler.levels
        line = LoadLine(
            at=now,
            wall=self._clock.wall(),
            values={name: level.value for name, level in levels.items() if level.known is Known.VALUE},
            idle=tuple(name for name, level in levels.items() if level.known is Known.IDLE),
        )
        if self._recorder is not None:
            self._recorder.load(line)
        if now >= self._next_sample:
            self._next_sample = now + JOURNAL_EVERY_S
            self._journal.add(Kind.LIFECYCLE, {"event": "load", "sample": line})
