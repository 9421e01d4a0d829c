"""Rates, deadlines and thresholds of the NVML sensor."""

from pathlib import Path

import msgspec

# NVML event bits, nvml.h; never 0x10 (clock), which arrives ten times a second on an idle GPU
EVENT_SBE, EVENT_DBE, EVENT_XID = 0x1, 0x2, 0x8
EVENT_SBE_STORM, EVENT_DRAM_RETIREMENT, EVENT_DRAM_RETIREMENT_FAILED = 0x200, 0x400, 0x800
EVENT_POISON, EVENT_POISON_FATAL = 0x1000, 0x2000
EVENT_UNAVAILABLE, EVENT_RECOVERY_ACTION = 0x4000, 0x8000

EVENTS = (
    EVENT_SBE
    | EVENT_DBE
    | EVENT_XID
    | EVENT_SBE_STORM
    | EVENT_DRAM_RETIREMENT
    | EVENT_DRAM_RETIREMENT_FAILED
    | EVENT_POISON
    | EVENT_POISON_FATAL
    | EVENT_UNAVAILABLE
    | EVENT_RECOVERY_ACTION
)
"""What is registered, where the GPU supports it: registering a bit that it does not support raises nothing and delivers
nothing."""


class NvmlConfig(msgspec.Struct, frozen=True, kw_only=True):
    library_dir: Path | None = None
    """Where the loader looks for libnvidia-ml.so.1 first; None: where it always looks."""
    environment: dict[str, str] = {}
    """Further variables of the probe process."""

    fast_s: float = 0.5
    """Recovery action (field 230) and whether the GPU answers at all: 15 to 125 microseconds a call on an H200."""
    medium_s: float = 2.0
    """ECC, remapped rows, clocks, temperature, memory, PCIe link, processes: about 2 ms a round on an H200."""
    slow_s: float = 10.0
    """NVLink states and errors, fabric, PCIe replays: a few ms a round on an H200."""
    search_s: float = 10.0
    """How often it is asked which GPUs there are."""

    deadline_s: float = 2.0
    """A GPU without a reading for so long is silent. Far above the longest call seen on a healthy H200: 101 ms, while
    another process starts CUDA."""
    start_deadline_s: float = 30.0
    """For NVML to open and list the GPUs: without the persistence daemon the driver initialises each of them then."""
    restart_s: float = 1.0
    """Before a probe process that was ended is started again; doubled each time, up to `restart_max_s`."""
    restart_max_s: float = 60.0
    settled_s: float = 60.0
    """A probe process that worked for so long clears the count of restarts."""
    blind_retry_s: float = 30.0
    """After the driver itself refused: it is being replaced, or it does not fit the library."""
    lost_retry_s: float = 60.0
    """While a GPU is lost, NVML is opened anew so often: a GPU that was reset shows up only then."""
    unknown_before_lost: int = 3
    """Readings in a row that fail with "unknown" (999) before the GPU counts as lost; 15 and 28 count at once."""

    ecc_correctable_per_s: float = 10.0
    """Correctable errors, DRAM and SRAM together. Healthy memory has a few a day; a public report of a rotting GPU
    (NVSentinel issue 1748) has 17,657 per second."""
    ecc_window_s: float = 10.0
    """Told after as many errors as the rate allows for so long."""
    throttle_fraction: float = 0.05
    """Part of a medium period that the driver's own counters (fields 269 to 271) must say was slowed down, to be seen
    although no reason is set at the moment of the reading."""
    throttle_clear_s: float = 10.0
    """Without any reason for so long, throttling is over."""
    pcie_replays_per_s: float = 8 / 60
    """DCGM's health watch warns above 8 a minute."""
    nvlink_errors_per_s: float = 1.0
    """Replays, recoveries and receive errors, over all links of a GPU."""
    link_window_s: float = 60.0
    """For PCIe replays and NVLink errors: told after as many as the rate allows for so long."""
    nvlinks: int | None = None
    """How many links of each GPU must be active; None: as many as have been seen active."""
