"""Who holds the lease: a state machine over what the store says and one's own monotonic clock. Pure; `keeper` runs it.

The rule that makes two holders impossible needs no common clock. A holder counts its time from *before* the write that
renewed it, and stops acting `ttl - margin` later. An observer counts from *after* the read that showed a change, and takes
over no earlier than `ttl` later. Since the read came after the write, the holder has stopped before the observer starts.
(The scheme is that of Kubernetes' leader election; the term is what its resource version is not: a number the ranks compare.)
"""

from enum import StrEnum

import msgspec

from healer.lease import Record, Versioned


class Role(StrEnum):
    HOLDER = "holder"
    STANDBY = "standby"
    LAPSED = "lapsed"
    """Held it, could not renew in time, and has stopped acting; it may win it again."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """`problems` says what does not fit."""

    ttl_s: float
    renew_s: float
    """Between two renewals."""
    call_deadline_s: float
    """Of one call to the store."""
    margin_s: float
    """How long before the end of its time a holder stops acting."""

    def problems(self) -> list[str]:
        found = []
        if self.renew_s + 2 * self.call_deadline_s > self.ttl_s - self.margin_s:
            # one renewal may fail at its deadline, and the next must still come in time
            found.append(
                f"renew {self.renew_s:g}s + 2 x deadline {self.call_deadline_s:g}s is above ttl {self.ttl_s:g}s - margin "
                f"{self.margin_s:g}s: one slow call would end the lease"
            )
        if self.margin_s <= 0:
            found.append(f"margin {self.margin_s:g}s must be positive")
        return found


class Election:
    """One candidate. Owned by one thread; `armed` may be asked from any."""

    def __init__(self, name: str, timing: Timing, floor: int = 0) -> None:
        """`floor`: a term that is known to have been given already, also where the record was deleted meanwhile."""
        self.name, self.timing = name, timing
        self._highest = floor
        self.term = 0
        """Of the record last written by this candidate."""
        self._seen: Versioned | None = None
        self._changed_at: float | None = None
        """After the read that showed the present record for the first time."""
        self._held_from: float | None = None
        """Before the write of the newest renewal; None while not the holder."""
        self._lapsed = False

    def armed(self, now: float) -> bool:
        """May act. To be asked at the last moment before each act; needs no call to the store."""
        held = self._held_from
        return held is not None and now < held + self.timing.ttl_s - self.timing.margin_s

    def role(self, now: float) -> Role:
        if self.armed(now):
            return Role.HOLDER
        return Role.LAPSED if self._lapsed or self._held_from is not None else Role.STANDBY

    @property
    def holder(self) -> str:
        """As last read."""
        return self._seen.record.holder if self._seen else ""

    @property
    def known_term(self) -> int:
        """The highest that was ever seen."""
        return max(self.term, self._highest)

    def observed(self, seen: Versioned | None, now: float) -> None:
        """What a read that has just returned showed."""
        if seen is None:
            self._seen, self._changed_at = None, now
            return
        before = self._seen
        if before is None or before.record != seen.record:
            self._changed_at = now
        self._seen = seen
        self._highest = max(self._highest, seen.record.term)
        if seen.record.holder != self.name or seen.record.term != self.term:
            self._lapsed |= self._held_from is not None
            self._held_from = None

    def proposal(self, now: float) -> tuple[Record, str | None] | None:
        """What to write, and against which version; None: nothing, another holds it."""
        if self._changed_at is None:
            return None
        seen = self._seen
        if seen is None:
            return Record(self.name, self.known_term + 1, 1, self.timing.ttl_s), None
        record = seen.record
        if record.holder == self.name and record.term == self.term and self.term:
            if not self.armed(now):
                # its time is over by its own clock: others may be about to write; a new term, as anybody would need
                return self._takeover(record), seen.version
            return msgspec.structs.replace(record, beat=record.beat + 1, ttl_s=self.timing.ttl_s), seen.version
        if not record.holder or now >= self._changed_at + max(record.ttl_s, self.timing.ttl_s):
            return self._takeover(record), seen.version
        return None

    def written(self, record: Record, began: float) -> None:
        """`record` was written by a call that began at `began`."""
        self.term, self._held_from, self._lapsed = record.term, began, False

    def farewell(self, now: float) -> tuple[Record, str] | None:
        """What to write in order to give the lease back; None where it is not held. The holder acts no more from now on."""
        seen, held = self._seen, self.armed(now)
        self._held_from = None
        if not held or seen is None or seen.record.term != self.term:
            return None
        return msgspec.structs.replace(seen.record, holder="", beat=seen.record.beat + 1), seen.version

    def _takeover(self, record: Record) -> Record:
        return Record(self.name, max(record.term, self.known_term) + 1, record.beat + 1, self.timing.ttl_s)
