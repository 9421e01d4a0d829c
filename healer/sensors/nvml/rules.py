"""From one GPU's readings to what is worth telling, one small rule for each kind of reading.

Pure: no clock, no process. A rule tells changes only; severity INFO takes back what it told before. None of them says
whether the GPU may go on serving: that is diagnosis.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping

import msgspec

from healer.evidence import Severity, What
from healer.sensors.nvml.config import NvmlConfig
from healer.sensors.nvml.counters import Counter, Growth

Values = Mapping[str, int]

KNOWN_ACTIONS = range(8)
"""NVML_GPU_RECOVERY_ACTION_*, nvidia-ml-py 13.615: none, GPU reset, node reboot, drain P2P, drain and reset, recover IMEX
domain, bus reset, system reboot."""

SLOWED = {0x8: "hw-slowdown", 0x20: "sw-thermal", 0x40: "hw-thermal", 0x80: "power-brake"}
"""nvmlClocksEventReason bits that slow the hardware down. The power cap (0x4) is how a GPU normally runs under load."""
SLOWED_NS = {"sw-thermal": "thermal_sw_ns", "hw-thermal": "thermal_hw_ns", "power-brake": "power_brake_ns"}

FABRIC_STATES = {0: "not-supported", 1: "not-started", 2: "in-progress", 3: "completed"}
FABRIC_SUMMARIES = {2: "unhealthy", 3: "limited-capacity"}


class Told(msgspec.Struct, frozen=True):
    """One thing worth telling; the sensor adds who and when."""

    what: What
    value: str | int | float
    severity: Severity
    detail: str = ""


Rule = Callable[[Values, float], Iterator[Told]]
"""Values of one reading and its monotonic time, in seconds."""


def rules(config: NvmlConfig) -> tuple[Rule, ...]:
    """All of them, for one GPU: they remember what they saw of it."""
    return (
        recovery_action(),
        uncorrectable("dram"),
        uncorrectable("sram"),
        correctable(config),
        flag("sram_threshold", What.SRAM_THRESHOLD, Severity.CRITICAL),
        flag("remap_pending", What.REMAP_PENDING, Severity.WARNING),
        flag("remap_failed", What.REMAP_FAILED, Severity.CRITICAL),
        throttling(config),
        heat(),
        pcie_link(),
        rate(("pcie_replays",), What.PCIE_REPLAYS, config.pcie_replays_per_s, config.link_window_s),
        rate(
            ("nvlink_replays", "nvlink_recoveries", "nvlink5_errors", "nvlink5_recoveries"),
            What.NVLINK_ERRORS,
            config.nvlink_errors_per_s,
            config.link_window_s,
        ),
        links(config),
        fabric(),
    )


def recovery_action() -> Rule:
    """Field 230: what the driver itself asks for. A number that is not known yet says that it asks for something, but not
    what."""
    said = 0

    def rule(values: Values, at: float) -> Iterator[Told]:
        nonlocal said
        now = values.get("recovery_action")
        if now is None or now == said:
            return
        said = now
        if now not in KNOWN_ACTIONS:
            yield Told(What.SENSOR_BLIND, f"recovery action {now} is not known", Severity.WARNING, "field 230")
        else:
            yield Told(What.RECOVERY_ACTION, now, Severity.CRITICAL if now else Severity.INFO)

    return rule


def uncorrectable(place: str) -> Rule:
    """The counter of this driver's life, or where there is none that of the GPU's life."""
    counters = {name: Counter() for name in (f"ecc_unc_volatile_{place}", f"ecc_unc_aggregate_{place}")}

    def rule(values: Values, at: float) -> Iterator[Told]:
        grown = [counter.read(values.get(name), at) for name, counter in counters.items()]
        found = next((growth for growth in grown if growth is not None), None)
        if found is not None and found.delta:
            yield Told(What.ECC_UNCORRECTABLE, found.delta, Severity.CRITICAL, place)

    return rule


def correctable(config: NvmlConfig) -> Rule:
    names = ("ecc_cor_volatile_dram", "ecc_cor_volatile_sram")
    return rate(names, What.ECC_CORRECTABLE, config.ecc_correctable_per_s, config.ecc_window_s)


def rate(names: tuple[str, ...], what: What, limit_per_s: float, window_s: float) -> Rule:
    """The growth of some counters together, over a window: more than the limit, and as many as the limit allows for a whole
    window, so that two at once are no news."""
    counters = {name: Counter() for name in names}
    recent: deque[tuple[float, Growth]] = deque()
    over = False

    def rule(values: Values, at: float) -> Iterator[Told]:
        nonlocal over
        grown = {name: growth for name, c in counters.items() if (growth := c.read(values.get(name), at)) is not None}
        if not grown:
            return
        recent.append((at, Growth(sum(g.delta for g in grown.values()), max(g.elapsed_s for g in grown.values()))))
        while recent[0][0] < at - window_s and len(recent) > 1:
            recent.popleft()
        count, elapsed_s = sum(g.delta for _, g in recent), sum(g.elapsed_s for _, g in recent)
        per_s = count / elapsed_s if elapsed_s > 0 else 0.0
        if (per_s > limit_per_s and count > limit_per_s * window_s) == over:
            return
        over = not over
        detail = ", ".join(f"{name} +{growth.delta}" for name, growth in grown.items() if growth.delta)
        yield Told(what, per_s, Severity.WARNING if over else Severity.INFO, detail)

    return rule


def flag(name: str, what: What, severity: Severity) -> Rule:
    said = 0

    def rule(values: Values, at: float) -> Iterator[Told]:
        nonlocal said
        now = values.get(name)
        if now is not None and bool(now) != bool(said):
            said = int(bool(now))
            yield Told(what, said, severity if said else Severity.INFO)

    return rule


def throttling(config: NvmlConfig) -> Rule:
    """Reasons set at the moment of the reading, and those that the driver's counters say were set in between."""
    counters = {reason: Counter() for reason in SLOWED_NS}
    said, last_at = "", 0.0

    def rule(values: Values, at: float) -> Iterator[Told]:
        nonlocal said, last_at
        mask = values.get("clock_reasons")
        slowed = {name for bit, name in SLOWED.items() if mask is not None and mask & bit}
        for reason, name in SLOWED_NS.items():
            growth = counters[reason].read(values.get(name), at)
            if growth is not None and growth.per_s / 1e9 > config.throttle_fraction:
                slowed.add(reason)
        if mask is None and not slowed:
            return
        now = ",".join(sorted(slowed))
        if now:
            last_at = at
        if now == said or (not now and at - last_at < config.throttle_clear_s):
            return
        said = now
        yield Told(What.THROTTLED, now, Severity.WARNING if now else Severity.INFO)

    return rule


def heat() -> Rule:
    hot = False

    def rule(values: Values, at: float) -> Iterator[Told]:
        nonlocal hot
        now, limit = values.get("temperature_c"), values.get("slowdown_c")
        if now is None or not limit or (now >= limit) == hot:
            return
        hot = not hot
        yield Told(What.HOT, now, Severity.WARNING if hot else Severity.INFO, f"slows down at {limit} degrees Celsius")

    return rule


def pcie_link() -> Rule:
    """Narrower or slower than it could be, in two readings in a row under load: an idle GPU lowers its link to save power."""
    said = seen = ""

    def rule(values: Values, at: float) -> Iterator[Told]:
        nonlocal said, seen
        if not values.get("utilization"):
            return
        width, width_max = values.get("pcie_width"), values.get("pcie_width_max")
        gen, gen_max = values.get("pcie_gen"), values.get("pcie_gen_max")
        now = ""
        if width and width_max and width < width_max:
            now = f"{width}/{width_max}"
        elif gen and gen_max and gen < gen_max:
            now = f"gen{gen}/gen{gen_max}"
        elif not (width or gen):
            return
        before, seen = seen, now
        if now != said and now == before:
            said = now
            yield Told(What.PCIE_DEGRADED, now, Severity.WARNING if now else Severity.INFO)

    return rule


def links(config: NvmlConfig) -> Rule:
    """Fewer NVLinks active than there were, or than must be. A GPU on a fabric none of whose links is active is told of
    at the first reading: that it never saw them up makes it no better."""
    expected, said = config.nvlinks or 0, 0

    def rule(values: Values, at: float) -> Iterator[Told]:
        nonlocal expected, said
        active = values.get("nvlinks_active")
        if active is None:
            return
        expected = max(expected, active)
        if not active and not expected and values.get("fabric_state"):
            expected = values.get("nvlinks", 0)
        down = max(0, expected - active)
        if down != said:
            said = down
            yield Told(What.NVLINK_DOWN, down, Severity.WARNING if down else Severity.INFO, f"{active} are active")

    return rule


def fabric() -> Rule:
    """Registered with the fabric and well is state 3, status 0, and a summary that says nothing bad. A registration that is
    under way is told of when two readings find it so."""
    said = seen = ""

    def rule(values: Values, at: float) -> Iterator[Told]:
        nonlocal said, seen
        state = values.get("fabric_state")
        if not state:
            return  # unreadable, or not on a fabric
        now = FABRIC_SUMMARIES.get(values.get("fabric_summary", 0), "")
        if state != 3:
            now = FABRIC_STATES.get(state, f"state-{state}")
        elif values.get("fabric_status"):
            now = f"status-{values['fabric_status']}"
        before, seen = seen, now
        if now == said or (state in (1, 2) and now != before):
            return
        said = now
        detail = f"health mask {values.get('fabric_health', 0):#x}"
        yield Told(What.FABRIC_FAILED, now, Severity.WARNING if now else Severity.INFO, detail)

    return rule
