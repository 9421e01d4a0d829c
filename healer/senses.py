"""All sensors together, as the supervisor calls them: which is asked when, and which is asked because another is in doubt.

A sensor that fails is reported and asked again; it never keeps the others from being asked.
"""

import asyncio
from collections.abc import Callable, Collection

import msgspec

from elastic.controller.records import PeerFaultSeen, RankBeat, RankGone
from elastic.view import Member
from healer.clock import Clock
from healer.diagnosis import Hardware
from healer.evidence import Evidence, GpuRef, RankRef, What
from healer.machine import Machine
from healer.policy.schema import Policy
from healer.sensors import STOP_DEADLINE_S, Sensor, SensorState, SensorStatus
from healer.sensors.heartbeats import HeartbeatSensor
from healer.sensors.liveness import LivenessSensor
from healer.sensors.processes import DEAD, ProcessSensor
from healer.sensors.stragglers import StragglerConfig, StragglerSensor
from healer.sensors.wall_clock import WallClockSensor

LATE_FRACTION = 0.25
"""Of the stall time: when the loop woke later than this, the silence that it would see is its own."""

OnError = Callable[[str, Exception], None]
"""Told the sensor's name and what it raised, at the first failure in a row."""


class Senses:
    """Owned by the supervisor, called in its loop."""

    def __init__(self, policy: Policy, clock: Clock, machine: Machine, on_error: OnError) -> None:
        detection = policy.spec.detection
        self._clock, self._machine, self._on_error = clock, machine, on_error
        self._liveness, self._wall_clock = LivenessSensor(clock), WallClockSensor(clock)
        self._processes = ProcessSensor(clock)
        self._heartbeats = HeartbeatSensor(
            clock, stall_after_s=detection.stall_after_s, silent_after_s=detection.silent_after_s
        )
        self._stragglers = StragglerSensor(clock, StragglerConfig(ratio=policy.spec.sensors.thresholds.straggler_ratio))
        self._all: tuple[Sensor, ...] = (
            self._liveness, self._processes, self._heartbeats, self._stragglers, self._wall_clock, *machine.sensors,
        )  # fmt: skip
        self._broken: dict[str, str] = {}  # by sensor, why its last call failed
        self._members: tuple[Member, ...] = ()
        self._hardware = Hardware()
        self._next_scan = clock.monotonic()
        self.adopt(policy)

    def adopt(self, policy: Policy) -> None:
        """The limits of another policy, from now on."""
        detection = policy.spec.detection
        self._scan_s = detection.process_interval_s
        self._late_limit_s = LATE_FRACTION * detection.stall_after_s
        self._heartbeats.thresholds = (detection.stall_after_s, detection.silent_after_s)
        self._stragglers.config = StragglerConfig(ratio=policy.spec.sensors.thresholds.straggler_ratio)

    def start(self, wake: Callable[[], None]) -> None:
        for sensor in self._all:
            try:
                sensor.start(wake)
            except Exception as error:
                self._failed(sensor, error)

    async def stop(self) -> None:
        """Within the sensors' deadline, whatever they do."""
        ended = await asyncio.gather(
            *(asyncio.wait_for(sensor.stop(), STOP_DEADLINE_S) for sensor in self._all), return_exceptions=True
        )
        for sensor, outcome in zip(self._all, ended, strict=True):
            if isinstance(outcome, Exception):
                self._failed(sensor, outcome)

    def watch(self, members: Collection[Member]) -> None:
        self._members = tuple(members)
        for sensor in self._all:
            try:
                sensor.watch(members)
            except Exception as error:
                self._failed(sensor, error)

    def hardware(self) -> Hardware:
        """What the machine's sensors know of its GPUs now."""
        try:
            self._hardware = self._machine.hardware(self._members)
        except Exception as error:
            # what was known stays known
            self._on_error("machine", error)
        return self._hardware

    def heard(self, event: RankBeat) -> list[Evidence]:
        self._stragglers.heard(event)
        return self._heartbeats.heard(event)

    def gone(self, event: RankGone, rank: RankRef) -> list[Evidence]:
        found = [self._liveness.gone(event)]
        # a killed process closes its socket while it is still on its way out
        return found if event.process_state in DEAD else found + self._processes.look(rank)

    def peer_fault(self, event: PeerFaultSeen, peer: RankRef) -> list[Evidence]:
        return [self._liveness.peer_fault(event, peer), *self._processes.look(peer)]

    def died(self, rank: RankRef) -> list[Evidence]:
        """Look at the rank's process now; empty unless it is dead."""
        return [e for e in self._processes.look(rank) if e.value in DEAD]

    def scan(self) -> list[Evidence]:
        return self._ask(self._processes)

    def round(self, late_s: float) -> list[Evidence]:
        """One tick of the loop, which woke `late_s` too late."""
        found: list[Evidence] = []
        if late_s > self._late_limit_s:
            found += self._heartbeats.forgive(late_s)
        found += self._ask(self._heartbeats)
        silent = [e.subject for e in found if e.what == What.SILENCE and isinstance(e.subject, RankRef)]
        for rank in silent:
            found += self._processes.look(rank)
            self._processes.look_deeper(rank)
        found += self._ask(self._stragglers) + self._ask(self._wall_clock)
        for sensor in self._machine.sensors:
            found += self._ask(sensor)
        for e in found:
            if e.what == What.XID and isinstance(e.subject, GpuRef):
                self._machine.ask(e.subject, e.at)
        now = self._clock.monotonic()
        if now >= self._next_scan:
            self._next_scan = now + self._scan_s
            found += self.scan()
        return found

    def status(self) -> tuple[SensorStatus, ...]:
        return tuple(self._status(sensor) for sensor in self._all)

    def _ask(self, sensor: Sensor) -> list[Evidence]:
        try:
            found = sensor.tick()
        except Exception as error:
            self._failed(sensor, error)
            return []
        self._broken.pop(sensor.name, None)
        return found

    def _failed(self, sensor: Sensor, error: Exception) -> None:
        if sensor.name not in self._broken:
            self._on_error(sensor.name, error)
        self._broken[sensor.name] = f"it failed: {error!r}"

    def _status(self, sensor: Sensor) -> SensorStatus:
        found, why = sensor.status(), self._broken.get(sensor.name)
        return found if why is None else msgspec.structs.replace(found, state=SensorState.SILENT, why=why)
