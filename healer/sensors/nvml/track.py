"""One GPU as the sensor knows it: its identity, whether it answers, what its readings and events say."""

from collections import deque
from collections.abc import Iterator

from healer.evidence import GpuRef, Severity, What
from healer.sensors.nvml import config as bits
from healer.sensors.nvml.config import NvmlConfig
from healer.sensors.nvml.rules import Told, rules
from healer.sensors.nvml.wire import NvmlEvent, Reading

LOST_CODES = {15: "GPU is lost", 28: "GPU not found"}
UNKNOWN_CODE = 999
OPENING_CODE = 10
"""From the probe, for a GPU that is still being opened: NVML_ERROR_TIMEOUT."""
RESET_REQUIRED_CODE = 16
WHOLE_GPU = 0xFFFFFFFF
"""gpuInstanceId of an event that concerns no MIG instance in particular."""

_EVENTS: dict[int, tuple[What, str | int, Severity]] = {
    bits.EVENT_DBE: (What.ECC_UNCORRECTABLE, 1, Severity.CRITICAL),
    bits.EVENT_SBE_STORM: (What.ECC_CORRECTABLE, "storm", Severity.WARNING),
    bits.EVENT_DRAM_RETIREMENT: (What.REMAP_PENDING, 1, Severity.WARNING),
    bits.EVENT_DRAM_RETIREMENT_FAILED: (What.REMAP_FAILED, 1, Severity.CRITICAL),
    bits.EVENT_POISON: (What.POISON, "non-fatal", Severity.WARNING),
    bits.EVENT_POISON_FATAL: (What.POISON, "fatal", Severity.CRITICAL),
}


class GpuTrack:
    """Fed by the sensor, in order of time."""

    def __init__(self, gpu: GpuRef, config: NvmlConfig, now: float) -> None:
        self.gpu, self.last_at = gpu, now
        self.silent_since: float | None = None
        self.index = self.arch = -1
        self.mig: tuple[str, ...] = ()
        self.groups: set[str] = set()
        """Which rates have been read at least once."""
        self.lost_since: float | None = None
        self._config, self._rules = config, rules(config)
        self._unknowns = 0
        self._reset_required = False
        self._lost_by_event = self._unlisted = False
        self._asked_at: float | None = None
        # full: over the limit
        self._sbe_at: deque[float] = deque(maxlen=int(config.ecc_correctable_per_s * config.ecc_window_s) + 1)
        self._sbe_over = False

    @property
    def lost(self) -> bool:
        return self.lost_since is not None

    def ask(self, at: float) -> None:
        """Tell the driver's next word on this GPU (field 230) even if it asks for nothing: something happened at `at`."""
        self._asked_at = at

    def reading(self, reading: Reading) -> Iterator[Told]:
        self.last_at = reading.at
        if self._asked_at is not None and reading.at > self._asked_at and "recovery_action" in reading.values:
            self._asked_at = None
            if reading.values["recovery_action"] == 0:
                yield Told(What.RECOVERY_ACTION, 0, Severity.INFO)
        self.groups.add(reading.group)
        codes = set(reading.codes.values())
        yield from self._reset(reading)
        self._unknowns = self._unknowns + 1 if UNKNOWN_CODE in codes and not reading.values else 0
        gone = min(codes & set(LOST_CODES), default=None)
        if gone is None and self._unknowns >= self._config.unknown_before_lost:
            gone = UNKNOWN_CODE
        if gone is not None:
            yield from self.gone(gone, reading.at, ", ".join(sorted(reading.codes)))
        elif reading.values and self._shows_life(reading):
            yield from self._back(reading.at)
        for rule in self._rules:
            yield from rule(reading.values, reading.at)

    def gone(self, value: str | int, at: float, detail: str = "", *, unlisted: bool = False) -> Iterator[Told]:
        """NVML does not reach it, or (`unlisted`) does not list it any more. Said once."""
        self._unlisted = self._unlisted or unlisted
        if self.lost_since is None:
            self.lost_since = at
            yield Told(What.GPU_LOST, value, Severity.CRITICAL, detail)

    def listed(self) -> None:
        """NVML lists it, and opens it."""
        self._unlisted = False

    def _shows_life(self, reading: Reading) -> bool:
        """Not a reading that was under way when the GPU was lost, nor one through the handle of a GPU that cannot be opened
        any more. After an event said that it is unavailable, field 230 alone, which may come from a cache, does not do."""
        began = reading.at - reading.took_s
        if self._unlisted or (self.lost_since is not None and began < self.lost_since):
            return False
        return reading.group == "medium" or not self._lost_by_event

    def _back(self, at: float) -> Iterator[Told]:
        self._lost_by_event = False
        if self.lost_since is not None:
            away_s, self.lost_since = at - self.lost_since, None
            yield Told(What.GPU_BACK, away_s, Severity.INFO)

    def event(self, event: NvmlEvent) -> Iterator[Told]:
        detail = "NVML event"
        if event.instance != WHOLE_GPU:
            # a reset concerns the whole GPU, so an event of one instance does too
            detail += f", MIG instance {event.instance}: counts for the whole GPU"
        if event.kind == bits.EVENT_XID:
            unknown = "; NVML does not know the code" if event.data == UNKNOWN_CODE else ""
            yield Told(What.XID, event.data, Severity.WARNING, detail + unknown)
        elif event.kind == bits.EVENT_UNAVAILABLE:
            self._lost_by_event = True
            yield from self.gone("unavailable", event.at, detail)
        elif event.kind == bits.EVENT_SBE:
            yield from self._single_bit(event.at)
        elif event.kind in _EVENTS:
            what, value, severity = _EVENTS[event.kind]
            yield Told(what, value, severity, detail)
        # EVENT_RECOVERY_ACTION carries no value: the probe reads field 230 at once

    def _reset(self, reading: Reading) -> Iterator[Told]:
        asking = [call for call, code in reading.codes.items() if code == RESET_REQUIRED_CODE]
        if asking and not self._reset_required:
            self._reset_required = True
            yield Told(What.RESET_REQUIRED, RESET_REQUIRED_CODE, Severity.CRITICAL, ", ".join(sorted(asking)))
        elif self._reset_required and reading.group == "medium" and reading.values and not reading.codes:
            # the group with the most calls: one call that works proves little
            self._reset_required = False
            yield Told(What.RESET_REQUIRED, 0, Severity.INFO)

    def _single_bit(self, at: float) -> Iterator[Told]:
        """Events tell the rate also while the call that reads the counter hangs."""
        self._sbe_at.append(at)
        while self._sbe_at[0] < at - self._config.ecc_window_s:
            self._sbe_at.popleft()
        over = len(self._sbe_at) == self._sbe_at.maxlen
        per_s = (
            len(self._sbe_at) / max(0.001, at - self._sbe_at[0])
            if over
            else len(self._sbe_at) / self._config.ecc_window_s
        )
        if over != self._sbe_over:
            self._sbe_over = over
            yield Told(What.ECC_CORRECTABLE, per_s, Severity.WARNING if over else Severity.INFO, "NVML events")
