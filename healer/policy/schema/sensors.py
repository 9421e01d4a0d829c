"""`spec.detection` and `spec.sensors`: what is read, how often, and from which size on it is told."""

from typing import Annotated

from pydantic import Field

from healer.policy.schema.base import Duration, Model, PathText, Positive


class Detection(Model):
    """Deadlines of the ranks' own signs of life. They hang together: see the relations below."""

    heartbeat_interval_s: Duration = 0.2
    """Between two beats of a rank. Shorter: a hang is seen earlier, at more messages."""
    stall_after_s: Duration = 1.0
    """Silence counts after this, together with other evidence. At least 5 x heartbeatInterval, below target.epTimeout."""
    silent_after_s: Duration = 10.0
    """Silence or lack of progress counts by itself after this. At least 2 x stallAfter."""
    fault_window_s: Duration = 30.0
    """A rank's report of a peer's failure counts this long."""
    quorum_window_s: Duration = 60.0
    """Signs of independent sources about one GPU count together when they lie within it."""
    blame_before_s: Duration = 30.0
    """A GPU's XID explains the death of a rank on it that follows within this time."""
    blame_after_s: Duration = 2.0
    """It also explains a death up to this much earlier: the kernel tells of a dead process sooner than of its XID."""
    answer_after_s: Duration = 2.0
    """How long the driver has to say what an XID means before the catalogue's word stands."""
    settle_after_s: Duration = 5.0
    """After telemetry comes back nothing is condemned, and nothing is done, for this long: first see, then act."""
    probation_s: Duration = 60.0
    """A GPU that was lost and came back is not called healthy before."""
    process_interval_s: Duration = 1.0
    """Between two scans of the ranks' processes; a suspicion is looked into at once."""


class NvmlIntervals(Model):
    """Between two readings of a GPU, by kind of reading."""

    fast_s: Duration = 0.5
    """The driver's recovery action, and whether the GPU answers at all."""
    medium_s: Duration = 2.0
    """ECC counters, remapped rows, throttling, temperature, memory, processes, PCIe width."""
    slow_s: Duration = 10.0
    """NVLink state and errors, fabric state, PCIe replays."""


class Nvml(Model):
    """The driver's view of the GPUs, read in a child process."""

    enabled: bool = True
    """Off: GPUs are unknown, which is neither healthy nor sick. Without a driver the sensor says so and rests."""
    interval: NvmlIntervals = Field(default_factory=NvmlIntervals)
    deadline_s: Duration = 2.0
    """A call that takes longer is given up: the child is ended and started again, and its GPUs read unknown. At least
    200ms, since honest calls stall for 100 ms."""


class KernelLog(Model):
    """XIDs and bus errors in the kernel's log."""

    enabled: bool = True
    """Off: XIDs come from NVML alone, which misses those of a driver that does not answer."""
    path: PathText = "/dev/kmsg"
    """The kernel's log, or a file of the same form. Reading needs the privilege; without it the sensor says so."""


class Thresholds(Model):
    """From which rate on a counter is told. None of them condemns a rank by itself."""

    correctable_ecc_per_second: Positive = 10.0
    """Corrected memory errors of a GPU."""
    nvlink_errors_per_second: Positive = 1.0
    """Recoveries and replays of a GPU's NVLinks."""
    pcie_replays_per_minute: Positive = 8.0
    """Replays on a GPU's PCIe link; DCGM's health watch warns above 8."""
    straggler_ratio: Annotated[float, Field(gt=1)] = 3.0
    """How many times longer than for the median rank the others wait for one, round after round."""
    memory_growth_mb_per_second: Positive = 50.0
    """Growth of a rank's resident memory."""


class Sensors(Model):
    """What is read beside the ranks' own signs of life."""

    nvml: Nvml = Field(default_factory=Nvml)
    kernel_log: KernelLog = Field(default_factory=KernelLog)
    xid_overrides: PathText | None = None
    """A file in the form of the XID catalogue; its rows replace those of the same code."""
    thresholds: Thresholds = Field(default_factory=Thresholds)
