"""The open incident, if any: one at a time, since a fault during a healing belongs to the same story."""

import msgspec

from healer.clock import Clock
from healer.diagnosis import Cause, Refined
from healer.incidents import CLOSED, OPENED, REFINED
from healer.journal import Journal, Kind
from healer.logs import LateLog
from healer.metrics import Metrics


class OpenIncident(msgspec.Struct, frozen=True):
    id: str
    opened_at: float
    """Monotonic: when its first fault was detected."""
    opened_wall: float
    cause: Cause
    """The root of it, as far as is known: refined when evidence comes that explains what was acted upon."""
    slots: tuple[int, ...]
    size: int
    """Slots of the target when it was opened."""


class Casebook:
    """Owned by the supervisor. What it says is in the journal; after a restart it takes the open incident up again."""

    def __init__(self, journal: Journal, clock: Clock, metrics: Metrics, log: LateLog) -> None:
        self.current: OpenIncident | None = None
        self._journal, self._clock, self._metrics, self._log = journal, clock, metrics, log
        self._last = 0
        known = journal.incidents(limit=1)
        if known:
            self._last = int(known[-1].incident.rsplit("-", 1)[-1])
            opened = next((e for e in known if e.kind == Kind.LIFECYCLE and e.body.get("event") == OPENED), None)
            closed = any(e.kind == Kind.LIFECYCLE and e.body.get("event") == CLOSED for e in known)
            if opened is not None and not closed:
                self.current = msgspec.convert(opened.body["incident"], OpenIncident)

    @property
    def id(self) -> str:
        """Of the open incident; empty when there is none."""
        return self.current.id if self.current else ""

    def open(self, cause: Cause, slots: tuple[int, ...], detected: float, size: int) -> OpenIncident | None:
        """Unless one is open already: then this fault is part of it, and None is returned. `detected`: monotonic seconds;
        `size`: slots of the target."""
        if self.current is not None:
            return None
        self._last += 1
        now = self._clock.monotonic()
        self.current = OpenIncident(
            id=f"inc-{self._last}",
            opened_at=detected,
            opened_wall=self._clock.wall() - (now - detected),
            cause=cause,
            slots=slots,
            size=size,
        )
        self._journal.add(
            Kind.LIFECYCLE, {"event": OPENED, "incident": self.current, "cause": cause, "slots": slots}, self.id
        )
        self._metrics.incidents.labels(cause).inc()
        self._metrics.incident_open.set(1)
        self._log.say("warning", "incident.opened", incident=self.id, cause=cause, slots=slots)
        return self.current

    def refine(self, refined: Refined, entries: list[int]) -> None:
        """What the incident of `refined` comes down to; it may be closed already. `entries`: where the journal has the
        evidence for it."""
        incident = refined.departed.incident
        body = {
            "event": REFINED,
            "cause": refined.cause,
            "slots": (refined.departed.rank.slot,),
            "xids": refined.xids,
            "sentence": refined.sentence,
            "entries": entries,
        }
        self._journal.add(Kind.LIFECYCLE, body, incident)
        if self.current is not None and self.current.id == incident:
            self.current = msgspec.structs.replace(self.current, cause=refined.cause)

    def close(self, size: int) -> str:
        """The group is what it should be, with `size` slots. Returns the outcome; empty where no incident was open."""
        incident = self.current
        if incident is None:
            return ""
        outcome = "reduced" if size < incident.size else "healed"
        # wall time: a restart of the host in between starts the monotonic clock anew
        open_s = max(0.0, self._clock.wall() - incident.opened_wall)
        body = {"event": CLOSED, "outcome": outcome, "open_s": open_s, "size": size}
        self._journal.add(Kind.LIFECYCLE, body, incident.id)
        self.current = None
        self._metrics.incident_open.set(0)
        self._log.say("info", "incident.closed", incident=incident.id, outcome=outcome, open_s=round(open_s, 3))
        return outcome
