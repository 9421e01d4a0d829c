"""Evidence: what a sensor saw, as plain immutable records. A sensor reports; it never decides."""

from enum import StrEnum

import msgspec


class RankRef(msgspec.Struct, frozen=True, order=True):
    """One incarnation of a rank: evidence about an earlier holder of the slot says nothing about the present one."""

    slot: int
    incarnation: int

    def __str__(self) -> str:
        return f"rank {self.slot}.{self.incarnation}"


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class What(StrEnum):
    """What was seen; the comment says what `value` holds."""

    LIFELINE_CUT = "lifeline-cut"  # state letter of the process: the kernel handed on the mutex of its main thread
    SOCKET_CLOSED = "socket-closed"  # state letter
    PIDFD_FIRED = "pidfd-fired"  # state letter
    PROCESS_STATE = "process-state"  # state letter of /proc/<pid>/stat; "X": gone, or exiting and never to return
    BEAT_HEARD = "beat-heard"  # the round it reported: the first beat, or the first after silence
    SILENCE = "silence"  # seconds since the last beat
    TELEMETRY_LOST = "telemetry-lost"  # seconds by which the daemon itself was late
    NO_PROGRESS = "no-progress"  # seconds for which the round did not move, although beats arrive
    PROGRESS = "progress"  # the round that it moved to
    WAITED_ON = "waited-on"  # seconds for which the reporter has waited for the subject within one round
    WAIT_ENDED = "wait-ended"  # the reporter's round
    PEER_FAULT = "peer-fault"  # what and where the reporter saw it, as "disconnect/ep"


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    """The sensor."""
    seq: int
    """Sequence in the source, from 1."""
    subject: RankRef
    what: What
    value: str | int | float
    severity: Severity
    reporter: RankRef | None = None
    """The rank that said so; None: the sensor saw it itself."""
    at: float
    """Monotonic seconds."""
    wall: float

    @property
    def id(self) -> str:
        """Unique in the life of one daemon."""
        return f"{self.source}/{self.seq}"

    def __str__(self) -> str:
        by = f" by {self.reporter}" if self.reporter else ""
        shown = f"{self.value:.2f}" if isinstance(self.value, float) else self.value
        return f"{self.subject}: {self.what} ({shown}){by}"
