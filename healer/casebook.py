"""The open incident, if any: one at a time, since a fault during a healing belongs to the same story."""

import msgspec

from healer.clock import Clock
from healer.diagnosis import Cause
from healer.incidents import CLOSED, OPENED
from healer.journal import Journal, Kind


class OpenIncident(msgspec.Struct, frozen=True):
    id: str
    opened_at: float
    """Monotonic: when its first fault was detected."""
    opened_wall: float
    cause: Cause
    slots: tuple[int, ...]
    size: int
    """Slots of the target when it was opened."""


class Casebook:
    """Owned by the supervisor. What it says is in the journal; after a restart it takes the open incident up again."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self.current: OpenIncident | None = None
        self._journal, self._clock = journal, clock
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

    def open(self, cause: Cause, slots: tuple[int, ...], detected: float, size: int) -> OpenIncident:
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
        return self.current

    def close(self, size: int) -> tuple[OpenIncident, str, float]:
        """The group is what it should be. Returns the incident, its outcome, and for how many seconds it was open."""
        incident = self.current
        if incident is None:
            raise RuntimeError("no incident is open")
        outcome = "reduced" if size < incident.size else "healed"
        # wall time: a restart of the host in between starts the monotonic clock anew
        open_s = max(0.0, self._clock.wall() - incident.opened_wall)
        body = {"event": CLOSED, "outcome": outcome, "open_s": open_s, "size": size}
        self._journal.add(Kind.LIFECYCLE, body, incident.id)
        self.current = None
        return incident, outcome, open_s
