"""The NVML sensor: what the probe process says, as evidence about GPUs and the host.

A GPU that was not read within the deadline is silent: unknown, neither healthy nor sick. A probe that hangs is killed and
started again, at once the first time, then ever more slowly, and the GPUs that do answer are read meanwhile. A driver that
refuses as a whole makes the sensor blind, and it waits: the driver may be in the middle of an upgrade.
"""

import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from elastic.view import Member
from healer.clock import Clock
from healer.evidence import Evidence, GpuRef, HostRef, Severity, Subject, What
from healer.identity import Board, IdentityMap
from healer.logs import LateLog
from healer.sensors import Scribe, SensorState, SensorStatus, Tally, no_wake
from healer.sensors.nvml import wire
from healer.sensors.nvml.child import Child
from healer.sensors.nvml.config import NvmlConfig
from healer.sensors.nvml.keeper import Keeper, Spawn
from healer.sensors.nvml.presence import driver_addresses, nvidia_present
from healer.sensors.nvml.rules import Told
from healer.sensors.nvml.track import OPENING_CODE, RESET_REQUIRED_CODE, GpuTrack

_LATE_S = 0.5
"""A daemon that slept for so long between two ticks listens for as long again before it calls a GPU silent."""
_MAX_PID = 1 << 22
"""PID_MAX_LIMIT of 64-bit Linux. Bindings that do not fit the library have shown memory sizes as pids."""

CODES = {
    3: "not supported",
    4: "no permission",
    9: "the driver is not loaded",
    12: "libnvidia-ml.so.1 was not found",
    13: "the driver is too old for this call",
    15: "GPU is lost",
    16: "reset required",
    18: "library and driver are of different versions: an upgrade without a reboot",
    27: "the driver is not ready",
    28: "GPU not found",
    999: "unknown error",
}


class NvmlSensor:
    """See `healer.sensors.Sensor`."""

    name = "nvml"

    def __init__(
        self,
        clock: Clock,
        config: NvmlConfig | None = None,
        identity: IdentityMap | None = None,
        *,
        root: Path = Path("/"),
        spawn: Spawn = Child,
    ) -> None:
        """`identity` is told which GPUs and GPU processes there are; it is the caller's. `root`: of the file systems in
        which the driver shows itself."""
        self.config = config or NvmlConfig()
        self.identity = identity or IdentityMap()
        self.driver = ""
        self._clock, self._root = clock, root
        self._tally, self._scribe, self._log = Tally(clock), Scribe(self.name, clock), LateLog("healer")
        self._keeper = Keeper(self.config, clock, self._line, spawn)
        self._host = HostRef(socket.gethostname())
        self._wake: Callable[[], None] = no_wake
        self._state, self._why = SensorState.OFF, "not started"
        self._pending: list[Evidence] = []
        self._tracks: dict[str, GpuTrack] = {}
        self._blind_since = self._host_silent_since = self._opened_at = None  # type: float | None
        self._blind_count = 0
        self._off: dict[tuple[str, int], None] = {}
        self._busy: tuple[tuple[str, str, float], ...] = ()
        self._child_cpu_s = self._past_cpu_s = 0.0
        self._strangers: dict[str, frozenset[int]] = {}
        self._unnamed: frozenset[int] = frozenset()
        self._last_tick = self._judge_from = clock.monotonic()

    # --- the contract ---------------------------------------------------------------------------------------------

    def start(self, wake: Callable[[], None]) -> None:
        self._wake, self._last_tick = wake, self._clock.monotonic()
        if self.config.library_dir is None and not nvidia_present(self._root):
            self._why = "there is no NVIDIA GPU on this host"
            return
        self._state, self._why = SensorState.STARTING, ""
        self._start_child()

    async def stop(self) -> None:
        await self._keeper.close()
        self._state, self._why = SensorState.OFF, "stopped"

    def watch(self, members: Collection[Member]) -> None:
        self.identity.watch(members)

    def ask(self, gpu: GpuRef, at: float) -> None:
        """Something happened to this GPU at `at`: tell what the driver asks for next, even if it is nothing."""
        uuid = gpu.uuid or self.identity.by_pci(gpu.pci).uuid
        if uuid in self._tracks:
            self._tracks[uuid].ask(at)

    def tick(self) -> list[Evidence]:
        if self._state is not SensorState.OFF:
            with self._tally.working():
                self._look()
        found, self._pending = self._pending, []
        self._log.flush()
        return found

    def status(self) -> SensorStatus:
        self._tally.cpu_s += self._past_cpu_s + self._child_cpu_s
        found = self._tally.status(self.name, self._state, self._explain())
        self._tally.cpu_s -= self._past_cpu_s + self._child_cpu_s
        return found

    @property
    def gpus(self) -> tuple[GpuRef, ...]:
        return tuple(track.gpu for track in self._tracks.values())

    @property
    def complete(self) -> bool:
        """Every GPU that was found has been read at every rate at least once: what `tick` then returns is a full
        picture."""
        return self._opened_at is not None and all(
            t.groups >= {"fast", "medium", "slow"} for t in self._tracks.values()
        )

    @property
    def settled(self) -> bool:
        """Nothing more will come by itself: complete, or unable to see."""
        return self.complete or self._state in (SensorState.OFF, SensorState.BLIND, SensorState.SILENT)

    @property
    def starts(self) -> int:
        """Probe processes started so far."""
        return self._keeper.started

    @property
    def stuck(self) -> int:
        """Probe processes that were killed and do not end."""
        return self._keeper.stuck

    @property
    def probe_pid(self) -> int | None:
        return self._keeper.child.pid if self._keeper.child else None

    # --- what the probe says --------------------------------------------------------------------------------------

    def _line(self, line: wire.Line) -> None:
        with self._tally.working():
            self._hear(line)
        if self._pending:
            self._wake()

    def _hear(self, line: wire.Line) -> None:
        match line:
            case wire.Reading():
                self._reading(line)
            case wire.NvmlEvent():
                if line.gpu in self._tracks:
                    track = self._tracks[line.gpu]
                    self._tell(track.gpu, track.event(line), line.at)
            case wire.Gpus():
                self._listed(line)
            case wire.Beat():
                self._child_cpu_s, self._busy = line.cpu_s, line.busy
            case wire.Blind():
                self._refused(line)
            case wire.ReadingOff():
                self._switched_off(line)
            case wire.CallFailed():
                self._log.say("warning", "nvml.call_failed", call=line.call, code=line.code, why=meaning(line.code))
            case wire.Registered() | wire.Bye():
                pass

    def _listed(self, line: wire.Gpus) -> None:
        self.driver = line.driver
        first, self._opened_at = self._opened_at is None, line.at
        for info in line.gpus:
            gpu = GpuRef(info.uuid, info.pci)
            track = self._tracks.setdefault(info.uuid, GpuTrack(gpu, self.config, line.at))
            track.index, track.arch, track.mig = info.index, info.arch, info.mig
            track.listed()
        self.identity.listed(Board(gpu=GpuRef(i.uuid, i.pci), index=i.index, arch=i.arch, mig=i.mig) for i in line.gpus)
        self._missing(line)
        self._state = SensorState.OK
        for since in (self._blind_since, self._host_silent_since):
            if since is not None:
                self._note(self._host, What.SENSOR_BACK, line.at - since, Severity.INFO)
        self._blind_since = self._host_silent_since = None
        self._blind_count = 0
        if first:
            self._log.say("info", "nvml.open", driver=line.driver, gpus=len(line.gpus), broken=len(line.broken))

    def _missing(self, line: wire.Gpus) -> None:
        """GPUs that cannot be opened, and those that are not listed any more. An unopened GPU does not say who it is: it is
        one of those that are known, else the one that the driver has bound and NVML did not list."""
        listed = {info.uuid for info in line.gpus}
        codes = sorted(broken.code for broken in line.broken if broken.code != OPENING_CODE)
        opening = hanging = len(line.broken) - len(codes)
        for track in [track for uuid, track in self._tracks.items() if uuid not in listed]:
            if not codes and opening:
                opening -= 1  # as long as it hangs, this GPU is silent
                continue
            code = codes.pop(0) if codes else "not-listed"
            # beside a GPU that still opens, it is not known which of them this one is
            lost = track.gone(code, line.at, f"NVML: {meaning(code)}", unlisted=not hanging)
            self._broken(track.gpu, code, lost, line.at)
        unnamed = frozenset(codes)
        if not codes or unnamed == self._unnamed:
            return
        self._unnamed = unnamed
        left = sorted(driver_addresses(self._root) - {info.pci for info in line.gpus})
        for place, code in enumerate(codes):
            known = len(left) == len(codes)
            subject = GpuRef("", left[place]) if known else self._host
            text = f"NVML cannot open a GPU: {meaning(code)}"
            self._broken(subject, code, iter([Told(What.GPU_LOST, code, Severity.CRITICAL, text)]), line.at)

    def _broken(self, subject: Subject, code: int | str, lost: Iterator[Told], at: float) -> None:
        if code == RESET_REQUIRED_CODE:
            lost = iter([Told(What.RESET_REQUIRED, RESET_REQUIRED_CODE, Severity.CRITICAL, "opening it")])
        elif code == 4:
            lost = iter([Told(What.SENSOR_BLIND, meaning(code), Severity.WARNING, "opening it")])
        self._tell(subject, lost, at)

    def _reading(self, line: wire.Reading) -> None:
        track = self._tracks.get(line.gpu)
        if track is None:
            return  # it is announced before the next reading
        self._tally.read(line.took_s, at=line.at)
        if track.silent_since is not None:
            self._note(track.gpu, What.SENSOR_BACK, line.at - track.silent_since, Severity.INFO, at=line.at)
            track.silent_since = None
        self._tell(track.gpu, track.reading(line), line.at)
        if line.processes is not None:
            self._processes(track.gpu, line.processes)

    def _processes(self, gpu: GpuRef, processes: Iterable[tuple[int, int | None]]) -> None:
        listed = [pid for pid, _ in processes]
        possible = [pid for pid in listed if 0 < pid <= _MAX_PID]
        if len(possible) < len(listed):
            self._once("nvml.impossible_pid", f"{gpu}: pids that cannot be are left out", 0)
        self.identity.processes(gpu.uuid, possible)
        now, before = self.identity.strangers(gpu.uuid), self._strangers.get(gpu.uuid, frozenset())
        self._strangers[gpu.uuid] = now
        for pid in sorted(now - before):
            self._note(gpu, What.FOREIGN_PROCESS, pid, Severity.WARNING)
        if before and not now:
            self._note(gpu, What.FOREIGN_PROCESS, 0, Severity.INFO)

    def _refused(self, line: wire.Blind) -> None:
        why = f"{line.call}: {meaning(line.code)}"
        self._blind(why)
        self._blind_count += 1
        delay_s = min(self.config.blind_retry_s * 2.0 ** (self._blind_count - 1), 10 * self.config.blind_retry_s)
        self._keeper.hold(why, delay_s)

    def _blind(self, why: str) -> None:
        if self._blind_since is None:
            self._blind_since = self._clock.monotonic()
            self._note(self._host, What.SENSOR_BLIND, why, Severity.WARNING)
            self._log.say("warning", "nvml.blind", why=why)
        self._state, self._why = SensorState.BLIND, why

    def _switched_off(self, line: wire.ReadingOff) -> None:
        self._once("nvml.reading_off", line.reading, line.code)

    def _once(self, event: str, reading: str, code: int) -> None:
        if (reading, code) not in self._off:
            self._off[(reading, code)] = None
            self._log.say("info", event, reading=reading, why=meaning(code))

    # --- what it does not say -------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = self._clock.monotonic()
        if now - self._last_tick > _LATE_S:
            self._judge_from = now + _LATE_S
        self._last_tick = now
        if self._keeper.child is not None:
            self._keeper.child.read()
        if now >= self._judge_from:
            self._judge_silence(now)
        if any(t.lost for t in self._tracks.values()) and now - self._keeper.since > self.config.lost_retry_s:
            self._keeper.renew("a GPU is lost: looking for it again")
        self._start_child()

    def _start_child(self) -> None:
        before = self._keeper.started
        self._keeper.tick()
        if self._keeper.started > before:
            self._past_cpu_s += self._child_cpu_s
            self._child_cpu_s, self._busy, self._opened_at = 0.0, (), None
        elif self._keeper.child is None and not self._tracks and self._keeper.why:
            self._blind(self._keeper.why)

    def _judge_silence(self, now: float) -> None:
        if self._state is SensorState.BLIND:
            return
        newly = [t for t in self._tracks.values() if t.silent_since is None and self._overdue(t, now)]
        for track in newly:
            track.silent_since = now
            over_s = now - track.last_at - self.config.deadline_s
            self._note(track.gpu, What.SENSOR_SILENT, over_s, Severity.WARNING, detail=self._doing(track.gpu.uuid))
        if self._keeper.child is None:
            return
        if self._opened_at is None:
            if now - self._keeper.since > self.config.start_deadline_s:
                self._host_is_silent(now)
                self._keeper.replace(f"NVML was not open after {self.config.start_deadline_s:g} s")
            return
        hung = [t for t in self._tracks.values() if t.silent_since is not None and self._hangs(t, now)]
        if hung:
            why = "; ".join(f"{t.gpu} is silent, {self._doing(t.gpu.uuid)}" for t in hung)
            if self._keeper.replace(why):
                self._log.say("warning", "nvml.probe_replaced", why=why)

    def _overdue(self, track: GpuTrack, now: float) -> bool:
        """A lost GPU that NVML does not list has no readings: that it is lost is all there is to say."""
        return not track.lost and now - track.last_at > self.config.deadline_s

    def _hangs(self, track: GpuTrack, now: float) -> bool:
        """The present process had its time with this GPU."""
        return now - max(track.last_at, self._opened_at or now) > self.config.deadline_s

    def _host_is_silent(self, now: float) -> None:
        self._state = SensorState.SILENT
        if self._host_silent_since is None:
            self._host_silent_since = now
            self._note(self._host, What.SENSOR_SILENT, 0.0, Severity.WARNING, detail="NVML does not open")

    def _doing(self, uuid: str) -> str:
        for gpu, group, _ in self._busy:
            if gpu == uuid:
                return f"inside a driver call of the {group} readings"
        return "the probe does not say what it waits for"

    def _explain(self) -> str:
        if self._state in (SensorState.OFF, SensorState.BLIND):
            return self._why
        parts = [f"{t.gpu} is silent" for t in self._tracks.values() if t.silent_since is not None]
        parts += [f"{t.gpu} is lost" for t in self._tracks.values() if t.lost]
        if self._keeper.stuck:
            parts.append(f"{self._keeper.stuck} probe processes are stuck in the driver")
        if self._keeper.child is None and self._keeper.why:
            parts.append(self._keeper.why)
        if self._opened_at is not None and not self._tracks:
            parts.append("NVML lists no GPU")
        if self._off:
            parts.append("not readable here: " + ", ".join(f"{name} ({meaning(code)})" for name, code in self._off))
        return "; ".join(parts)

    # --- notes ----------------------------------------------------------------------------------------------------

    def _tell(self, subject: Subject, told: Iterable[Told], at: float) -> None:
        for each in told:
            self._note(subject, each.what, each.value, each.severity, at=at, detail=each.detail)

    def _note(
        self,
        subject: Subject,
        what: What,
        value: str | int | float,
        severity: Severity,
        *,
        at: float | None = None,
        detail: str = "",
    ) -> None:
        self._pending.append(self._scribe.note(subject, what, value, severity, at=at, detail=detail))


def meaning(code: int | str) -> str:
    """NVML's return code in words."""
    return f"{code}, {CODES[code]}" if isinstance(code, int) and code in CODES else str(code)
