"""What a diagnosis says: one verdict for each rank, GPU and host, as plain immutable records."""

from enum import StrEnum

import msgspec

from healer.diagnosis.localise import NOWHERE, Finding
from healer.evidence import RankRef, Subject


class Health(StrEnum):
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


class Cause(StrEnum):
    """With a healthy verdict, a cause is a warning: something is worth a look, and nothing is to be done."""

    NONE = "none"
    PROCESS_DEATH = "process-death"
    STOPPED = "stopped"
    HANG = "hang"
    STUCK = "stuck"
    AGENT_LOST = "agent-lost"
    SILENT = "silent"
    TELEMETRY_LOST = "telemetry-lost"
    SUSPECTED = "suspected"
    MUTUAL_WAIT = "mutual-wait"
    """Two ranks that beat wait for each other in one step: a word between them was lost, or their link is dead."""
    UNHEARD = "unheard"
    EXECUTOR = "executor"
    """Not a diagnosis: the executor itself gave the rank up, since it died unwatched or missed a commit's deadline."""

    XID = "xid"
    RECOVERY_ACTION = "recovery-action"
    """The driver asks for a reset, a reboot or the like (NVML field 230), and no XID says why."""
    GPU_LOST = "gpu-lost"
    ECC = "ecc"
    REMAP = "remap"
    NVLINK = "nvlink"
    FABRIC = "fabric"
    PCIE = "pcie"
    THERMAL = "thermal"
    STRAGGLER = "straggler"
    FOREIGN_PROCESS = "foreign-process"
    MEMORY = "memory"


class Confidence(StrEnum):
    NONE = "none"
    CONCLUSIVE = "conclusive"
    """One source that cannot be wrong about it."""
    QUORUM = "quorum"
    """Independent sources agree."""
    DEADLINE = "deadline"
    """Nothing spoke against it for as long as the limits allow."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When a sign counts, and for how long. Raises ValueError where two of them do not fit each other."""

    stall_after_s: float
    """Silence counts from here on, together with other evidence."""
    silent_after_s: float
    """Silence, or lack of progress, counts by itself from here on."""
    fault_window_s: float
    """A rank's report of a peer's failure counts this long."""
    quorum_window_s: float = 60.0
    """Signs of independent sources about one GPU count together when they lie within it."""
    blame_before_s: float = 30.0
    """A GPU's XID explains the death of a rank on it that follows within this time."""
    blame_after_s: float = 2.0
    """It also explains a death up to this much earlier: the kernel closes a socket in 0.5 ms, while an XID needed 126 ms to
    the kernel log and 146 ms to an NVML event (H200, driver 580)."""
    answer_after_s: float = 2.0
    """How long the driver has to say what an XID means (field 230) before the catalogue's word stands."""
    settle_after_s: float = 5.0
    """After telemetry of a GPU returns, it is not condemned for this long: its first readings may be echoes."""
    probation_s: float = 60.0
    """A GPU that was lost and came back is not called healthy before."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name):g}, expected more than 0")
        if self.silent_after_s < self.stall_after_s:
            text = f"silent_after_s {self.silent_after_s:g} is below stall_after_s {self.stall_after_s:g}"
            raise ValueError(f"{text}, expected at least as much")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    subject: Subject
    health: Health
    cause: Cause
    confidence: Confidence
    evidence: tuple[str, ...]
    """Ids of what supports it."""
    since: float
    """Monotonic time of the earliest supporting evidence: when the fault was detected."""
    sentence: str
    xids: tuple[int, ...] = ()
    """Codes of the XIDs among its evidence, the one to blame first."""

    @property
    def rank(self) -> RankRef:
        """The subject of a verdict on a rank. Raises TypeError for others."""
        if not isinstance(self.subject, RankRef):
            raise TypeError(f"a verdict on {self.subject} is not one on a rank")
        return self.subject

    @property
    def key(self) -> tuple[Subject, Health, Cause]:
        """Two verdicts with the same key say the same."""
        return self.subject, self.health, self.cause


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """All verdicts of one moment."""

    ranks: tuple[Verdict, ...] = ()
    """One for every live rank, by slot. Only these are decided upon."""
    gpus: tuple[Verdict, ...] = ()
    """One for every GPU that is known, by address."""
    hosts: tuple[Verdict, ...] = ()
    """One for every host about which something was said."""
    where: Finding = NOWHERE
    """What the ranks say of one another comes down to. Never acted upon by itself."""

    @property
    def all(self) -> tuple[Verdict, ...]:
        return (*self.ranks, *self.gpus, *self.hosts)
