"""What happens, told to people: letters to the receivers of the policy. Each thing is told once.

A letter is put into the outbox only when the round that brought it is over: the survivors of a fault do not wait for it.
"""

import asyncio
import contextlib

from healer.casebook import OpenIncident
from healer.clock import Clock
from healer.journal import Journal
from healer.logs import LateLog
from healer.metrics import Metrics
from healer.notice import About, Notice
from healer.notify import Notifier
from healer.policy.memory import BreakerOpened, Note, Quarantined
from healer.policy.reasons import Step
from healer.policy.records import Decision
from healer.policy.schema import Policy

LAST_WORDS_S = 2.0
"""For letters that are due when the daemon ends; what is not sent by then is sent by the next daemon."""
MAX_TOLD = 1000


class Herald:
    """Owned by the supervisor's loop."""

    def __init__(self, policy: Policy, journal: Journal, clock: Clock, metrics: Metrics, log: LateLog) -> None:
        """`journal`: has the outbox too."""
        self._deployment, self._clock, self._log = policy.metadata.name, clock, log
        receivers = tuple(one.receiver for one in policy.spec.notifications)
        self._notifier = Notifier(receivers, lambda: journal.connection, metrics.notified, wall=clock.wall)
        self._pending: list[Notice] = []
        self._told: dict[tuple[object, ...], None] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._notifier.run(), name="notifications")

    def adopt(self, policy: Policy) -> None:
        """Receivers of another policy, from now on."""
        self._notifier.adopt(tuple(one.receiver for one in policy.spec.notifications))

    async def close(self) -> None:
        self._hand_over()
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._notifier.drained()
            self._task.cancel()
            await asyncio.wait([self._task])

    # --- what is told ---------------------------------------------------------------------------------------------

    def opened(self, incident: OpenIncident) -> None:
        slots = ", ".join(map(str, incident.slots))
        self._tell(
            About.INCIDENT_OPENED, f"incident {incident.id}: {incident.cause} on slots {slots}", incident=incident.id,
            cause=incident.cause, slots=incident.slots,
        )  # fmt: skip

    def closed(self, incident: OpenIncident | None, outcome: str) -> None:
        if incident is None or not outcome:
            return
        self._tell(
            About.INCIDENT_CLOSED, f"incident {incident.id} is over: {outcome}", incident=incident.id,
            cause=incident.cause, slots=incident.slots, resolved=True,
        )  # fmt: skip

    def decided(self, decision: Decision, incident: str) -> None:
        if decision.step == Step.HUMAN:
            key = (incident, decision.reason, decision.slots)
            if key in self._told:
                return
            self._told[key] = None
            if len(self._told) > MAX_TOLD:
                del self._told[next(iter(self._told))]
        elif not decision.acts:
            return
        about = About.HUMAN_NEEDED if decision.step == Step.HUMAN else About.ACTED
        self._tell(about, decision.sentence, incident=incident, cause=decision.cause, slots=decision.slots)

    def noted(self, note: Note) -> None:
        match note:
            case BreakerOpened(why, _):
                self._tell(About.BREAKER_OPENED, f"the circuit breaker is open: {why}")
            case Quarantined(slot, _, why, _):
                self._tell(About.QUARANTINED, f"slot {slot} is quarantined: {why}", slots=(slot,))

    def policy_rejected(self, why: str) -> None:
        self._tell(About.POLICY_REJECTED, f"a changed policy was rejected, the last good one stays: {why}")

    def lease_lost(self, why: str) -> None:
        self._tell(About.LEASE_LOST, why)

    def _tell(
        self,
        about: About,
        sentence: str,
        *,
        incident: str = "",
        cause: str = "",
        slots: tuple[int, ...] = (),
        resolved: bool = False,
    ) -> None:
        self._pending.append(
            Notice(
                about=about,
                deployment=self._deployment,
                incident=incident,
                cause=cause if cause != "none" else "",
                slots=slots,
                sentence=sentence,
                resolved=resolved,
                wall=self._clock.wall(),
            )
        )
        if self._task is not None:
            asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        pending, self._pending = self._pending, []
        for notice in pending:
            self._notifier.tell(notice)
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._log.say("error", "notifications.failed", exc_info=self._task.exception())
            self.start()
