"""Evidence: what a sensor saw, as plain immutable records. A sensor reports; it never decides."""

from enum import StrEnum

import msgspec

DETAIL_CHARS = 2000


class RankRef(msgspec.Struct, frozen=True, order=True, tag_field="kind", tag="rank"):
    """One incarnation of a rank: evidence about an earlier holder of the slot says nothing about the present one."""

    slot: int
    incarnation: int

    def __str__(self) -> str:
        return f"rank {self.slot}.{self.incarnation}"


class GpuRef(msgspec.Struct, frozen=True, order=True, tag_field="kind", tag="gpu"):
    """One GPU, whatever number CUDA or NVML gives it today."""

    uuid: str
    """As NVML writes it, "GPU-…"; empty where only the address is known (the kernel log names no UUID)."""
    pci: str
    """PCI address, domain:bus:device.function in lower case, "0000:1b:00.0"."""

    def __str__(self) -> str:
        return f"{self.uuid[:12] or 'GPU'} at {self.pci}"


class HostRef(msgspec.Struct, frozen=True, order=True, tag_field="kind", tag="host"):
    """The machine as a whole: its driver, its fabric, its kernel log."""

    name: str

    def __str__(self) -> str:
        return f"host {self.name}"


Subject = RankRef | GpuRef | HostRef


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
    STRAGGLES = "straggles"  # how many times longer than the median peer the others waited for it, over a window
    KEEPS_UP = "keeps-up"  # the same ratio, back under the limit
    MEMORY_GROWS = "memory-grows"  # bytes per second of its resident memory, over a window
    STACK = "stack"  # number of frames; `detail` has them

    XID = "xid"  # the code
    RECOVERY_ACTION = "recovery-action"  # NVML field 230, 1 to 7; 0: none, back to good
    GPU_LOST = "gpu-lost"  # NVML's return code, or the shape of the kernel-log line
    RESET_REQUIRED = "reset-required"  # NVML's return code 16, from any call
    GPU_BACK = "gpu-back"  # seconds for which it was lost
    POISON = "poison"  # "fatal" or "non-fatal"
    ECC_UNCORRECTABLE = "ecc-uncorrectable"  # how many more than at the last reading; `detail`: dram or sram
    ECC_CORRECTABLE = "ecc-correctable"  # per second, over the limit
    SRAM_THRESHOLD = "sram-threshold"  # 1: the driver's own threshold is exceeded
    REMAP_PENDING = "remap-pending"  # 1: a reset is needed for the rows to be remapped; 0: not any more
    REMAP_FAILED = "remap-failed"  # 1
    NVLINK_DOWN = "nvlink-down"  # links inactive that were active before; 0: all active again
    NVLINK_ERRORS = "nvlink-errors"  # recoveries and replays per second, over the limit
    FABRIC_FAILED = "fabric-failed"  # the state that the fabric manager reports
    PCIE_DEGRADED = "pcie-degraded"  # width as "8/16" or generation as "gen3/gen5", under load; "": back to full
    PCIE_REPLAYS = "pcie-replays"  # per second, over the limit
    PCIE_AER = "pcie-aer"  # the kernel log's severity: corrected, nonfatal, fatal
    THROTTLED = "throttled"  # reasons that slow the hardware down: "hw-thermal", "power-brake", …; "": none any more
    HOT = "hot"  # degrees Celsius at or above the GPU's own slowdown threshold; below it again: INFO
    FOREIGN_PROCESS = "foreign-process"  # pid of a process on the GPU that is no rank's

    SENSOR_BLIND = (
        "sensor-blind"  # why a sensor sees nothing of the subject: no driver, version mismatch, no permission
    )
    SENSOR_SILENT = "sensor-silent"  # seconds beyond its deadline for which the sensor gave no reading of the subject
    SENSOR_BACK = "sensor-back"  # seconds for which it was blind or silent
    KERNEL_LOG_LOST = "kernel-log-lost"  # how often so far lines were overwritten before they could be read
    CLOCK_JUMP = "clock-jump"  # seconds by which the wall clock moved against the monotonic one


TEXT = frozenset(
    {
        What.LIFELINE_CUT,
        What.SOCKET_CLOSED,
        What.PIDFD_FIRED,
        What.PROCESS_STATE,
        What.PEER_FAULT,
        What.POISON,
        What.FABRIC_FAILED,
        What.PCIE_DEGRADED,
        What.PCIE_AER,
        What.THROTTLED,
        What.SENSOR_BLIND,
    }
)
"""Their values are words."""
EITHER = frozenset({What.GPU_LOST, What.ECC_CORRECTABLE, What.NVLINK_ERRORS, What.KERNEL_LOG_LOST, What.RESET_REQUIRED})
LARGEST = 1e18


def wrong_value(what: What, value: str | int | float) -> str:
    """What is wrong with a value that came from outside, such as a file; empty: nothing. Diagnosis relies on it."""
    if isinstance(value, str):
        return "" if what in TEXT or what in EITHER else f"{what}: {value[:40]!r} is not valid, expected a number"
    if what in TEXT:
        return f"{what}: {str(value)[:40]} is not valid, expected a text"
    return "" if -LARGEST <= value <= LARGEST else f"{what}: {str(value)[:40]} is not valid, expected a sensible number"


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    """The sensor."""
    seq: int
    """Sequence in the source, from 1."""
    subject: Subject
    what: What
    value: str | int | float
    severity: Severity
    reporter: RankRef | None = None
    """The rank that said so; None: the sensor saw it itself."""
    detail: str = ""
    """The source's own words, such as a log line, at most DETAIL_CHARS characters."""
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
