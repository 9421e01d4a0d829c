"""The figures of a benchmark: raw samples, their summary, and both as a table that fits 100 columns."""

import math
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from chaos.machine import Machine
from elastic.protocol import Source
from healer import drill

TIMES = ("detect_s", "verdict_s", "pause_s", "coverage_s", "capacity_s", "silence_s")
AIMS = {
    "pause_s": 0.1,
    "xid_verdict_s": 0.05,
    "kernel_log_verdict_s": 0.02,
    "start_s": 1.0,
    "daemon_rss_mb": 80.0,
    "daemon_cpu_percent": 1.0,
}


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. Moments are in seconds since it."""

    slot: int
    detect_s: float
    verdict_s: float
    """When the daemon condemned the rank: the figure for "how long until it knows"."""
    pause_s: float
    """The longest of all survivors, between two committed steps."""
    pauses_s: dict[int, float]
    coverage_s: float
    capacity_s: float
    silence_s: float
    """The longest that any client went without a token while the group healed."""
    in_flight: int
    replayed: int
    requests: int
    """Answered while the group healed."""
    cover: dict[str, Source]
    refill: dict[str, Source]
    steps: tuple[drill.Step, ...]
    tokens_equal: bool
    problems: tuple[str, ...]


class Quiet(msgspec.Struct, frozen=True):
    """Without any fault."""

    step_s: float
    """Median over several runs of all requests."""
    tokens_per_s: float
    silence_s: float
    daemon_rss_mb: float
    daemon_cpu_percent: float
    """Of one core, while no request runs."""
    start_s: tuple[float, ...]
    """From the start of `healer run`, which finds the group running, to its API's first answer."""
    rank_rss_mb: float
    """The largest."""


class SensorTimes(msgspec.Struct, frozen=True):
    """Seconds, one figure for each sample."""

    xid_verdict_s: tuple[float, ...] = ()
    """From an XID that the stand-in for NVML gives out to the verdict on its GPU."""
    action_verdict_s: tuple[float, ...] = ()
    """From a change of field 230 to the verdict "unhealthy": it is polled, so this is mostly the poll's period."""
    kernel_log_verdict_s: tuple[float, ...] = ()
    """From a line in what stands for /dev/kmsg to the verdict."""


class Spread(msgspec.Struct, frozen=True):
    p50: float
    p95: float
    max: float


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    versions: dict[str, str]
    began: str
    load_after: tuple[float, float, float]
    """As `machine.load`, after the measurement; the group and its clients are in it too."""
    options: dict[str, object]
    config: dict[str, int]
    summary: dict[str, Spread]
    quiet: Quiet
    samples: tuple[Sample, ...]
    sensors: SensorTimes
    """Empty where the stand-in for NVML could not be built."""
    problems: tuple[str, ...]


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that a share `q` of all does not exceed."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def summarise(samples: Sequence[Sample], quiet: Quiet, sensors: SensorTimes) -> dict[str, Spread]:
    columns: dict[str, list[float]] = {name: [getattr(s, name) for s in samples] for name in TIMES}
    columns["start_s"] = list(quiet.start_s)
    columns |= {name: list(values) for name, values in msgspec.structs.asdict(sensors).items() if values}
    return {
        name: Spread(quantile(values, 0.5), quantile(values, 0.95), max(values)) for name, values in columns.items()
    }


def show(bench: Bench, out: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("MEASURED", "P50", "P95", "MAX", "AIM"):
        table.add_column(name, justify="left" if name == "MEASURED" else "right")
    words = {
        "detect_s": "fault to evidence",
        "verdict_s": "fault to verdict",
        "xid_verdict_s": "XID of the stand-in for NVML to verdict",
        "action_verdict_s": "recovery action, which is polled, to verdict",
        "kernel_log_verdict_s": "line in the kernel log to verdict",
        "pause_s": "pause of a survivor, the longest",
        "coverage_s": "fault to every expert covered, all serving",
        "capacity_s": "fault to full size",
        "silence_s": "longest silence of a client",
        "start_s": "start of the daemon to its API's answer",
    }
    for name, spread in bench.summary.items():
        aim = f"{AIMS[name] * 1000:.0f} ms" if name in AIMS else ""
        table.add_row(words[name], *(f"{v * 1000:.1f} ms" for v in (spread.p50, spread.p95, spread.max)), aim)
    quiet = bench.quiet
    table.add_row("daemon at rest, memory", f"{quiet.daemon_rss_mb:.1f} MB", "", "", f"{AIMS['daemon_rss_mb']:.0f} MB")
    cpu_aim = f"{AIMS['daemon_cpu_percent']:.0f} %"
    table.add_row("daemon at rest, of one core", f"{quiet.daemon_cpu_percent:.2f} %", "", "", cpu_aim)
    table.add_row("rank, memory", f"{quiet.rank_rss_mb:.0f} MB")
    table.add_row("step without a fault", f"{quiet.step_s * 1000:.1f} ms")
    table.add_row("tokens a second without a fault", f"{quiet.tokens_per_s:.0f}")
    out.print(table)
    wrong = sum(1 for s in bench.samples if s.problems)
    replayed = sum(s.replayed for s in bench.samples)
    out.print(
        f"{len(bench.samples)} faults, {sum(s.requests for s in bench.samples)} requests, {replayed} replayed; "
        f"{'every token as without a fault' if not wrong else f'{wrong} faults with wrong answers'}"
    )
