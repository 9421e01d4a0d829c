"""One look with every sensor, without a policy, a group or a daemon: what `healer scan` tells."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import msgspec

from healer.clock import Clock
from healer.diagnosis import Diagnosis, Health, Limits, Verdict
from healer.evidence import Evidence
from healer.judge import Judge
from healer.machine import Machine
from healer.sensors import STOP_DEADLINE_S, Sensor, SensorCost, SensorState, SensorStatus

POLL_S = 0.1
LIMITS = Limits(stall_after_s=1.0, silent_after_s=10.0, fault_window_s=30.0)
"""The policy's defaults. Only those for GPUs matter here: there is no rank."""


NOT_HERE = {"kernel-log": "not read: it is for XIDs, and this host has no NVIDIA GPU"}
"""Sensors that are left out where a host has nothing for them, and why."""


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    health: Health
    """Unhealthy if anything is; unknown if anything that matters could not be read, or nothing was."""
    why: str
    """What keeps it from "healthy"; empty there."""
    gpus: tuple[Verdict, ...]
    hosts: tuple[Verdict, ...]
    sensors: tuple[SensorStatus, ...]
    evidence: tuple[Evidence, ...]
    took_s: float


async def scan(machine: Machine, clock: Clock, deadline_s: float, progress: Callable[[str], None]) -> Scan:
    """Start the machine's sensors, wait until each has given a full reading, or said that it cannot, or until the deadline,
    and judge. `progress` is told what is still waited for. Never raises for a sensor that fails."""
    judge, began, wake = Judge(LIMITS), clock.monotonic(), asyncio.Event()
    evidence: list[Evidence] = []
    broken: dict[str, str] = {}
    for sensor in machine.sensors:
        with _reported(broken, sensor):
            sensor.start(wake.set)
            sensor.watch(())
    try:
        while True:
            for sensor in machine.sensors:
                with _reported(broken, sensor):
                    evidence += judge.take(sensor.tick())
            waiting = [s.name for s in machine.sensors if s.name not in broken and not machine.has_read(s)]
            now = clock.monotonic()
            if not waiting or now - began >= deadline_s:
                break
            progress(f"reading {', '.join(waiting)}")
            wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), POLL_S)
        judge.equip(machine.hardware(()))
        found = judge.judge(now).diagnosis
        sensors = tuple(_status(sensor, broken, late=sensor.name in waiting) for sensor in machine.sensors)
    finally:
        ends = (asyncio.wait_for(sensor.stop(), STOP_DEADLINE_S) for sensor in machine.sensors)
        await asyncio.gather(*ends, return_exceptions=True)
    health, why = _sum(found, sensors)
    named = {one.name for one in sensors}
    sensors += tuple(
        SensorStatus(name, SensorState.OFF, text, 0.0, 0, SensorCost(0.0, 0.0, 0.0))
        for name, text in NOT_HERE.items()
        if name not in named
    )
    return Scan(
        health=health,
        why=why,
        gpus=found.gpus,
        hosts=found.hosts,
        sensors=sensors,
        evidence=tuple(evidence),
        took_s=clock.monotonic() - began,
    )


def _sum(found: Diagnosis, sensors: tuple[SensorStatus, ...]) -> tuple[Health, str]:
    verdicts = (*found.hosts, *found.gpus)
    sick = [v.sentence for v in verdicts if v.health == Health.UNHEALTHY]
    if sick:
        return Health.UNHEALTHY, "; ".join(sick)
    unread = [
        f"{s.name} is {s.state}" + (f": {s.why}" if s.why else "")
        for s in sensors
        if s.state in (SensorState.SILENT, SensorState.STARTING)
    ]
    dark = [v.sentence for v in verdicts if v.health == Health.UNKNOWN] + unread
    if not found.gpus and not dark:
        off = [f"{s.name}: {s.why or s.state}" for s in sensors]
        dark = ["no GPU was read" + (f" ({'; '.join(off)})" if off else "")]
    return (Health.UNKNOWN, "; ".join(dark)) if dark else (Health.HEALTHY, "")


@contextlib.contextmanager
def _reported(broken: dict[str, str], sensor: Sensor) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        broken[sensor.name] = f"it failed: {error!r}"


def _status(sensor: Sensor, broken: dict[str, str], *, late: bool) -> SensorStatus:
    found = sensor.status()
    if sensor.name in broken:
        return msgspec.structs.replace(found, state=SensorState.SILENT, why=broken[sensor.name])
    if late and found.state == SensorState.OK:
        return msgspec.structs.replace(found, state=SensorState.SILENT, why="no full reading within the deadline")
    return found
