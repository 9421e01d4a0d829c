"""One GPU of this machine, and the thread that opens it, registers it for events and reads it at its rates.

A thread each, since a call for one GPU may block for ever while the others answer.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import pynvml as nv

from .output import Output
from .readings import Readings

BLIND_CODES = frozenset({nv.NVML_ERROR_DRIVER_NOT_LOADED, nv.NVML_ERROR_LIB_RM_VERSION_MISMATCH})
"""These concern the driver as a whole."""


class Gpu:
    """One GPU. All driver calls for it are made by its own thread; `poke`, `began` and `group` are for others."""

    def __init__(self, handle: Any, periods_s: dict[str, float], output: Output, stopping: threading.Event) -> None:
        """Raises NVMLError where the GPU does not say who it is."""
        self.handle = handle
        self.uuid: str = nv.nvmlDeviceGetUUID(handle)
        self.pci = pci_text(nv.nvmlDeviceGetPciInfo(handle))
        self.arch: int = _or(-1, nv.nvmlDeviceGetArchitecture, handle)
        self.mig = mig_uuids(handle)
        self.began: float | None = None
        """Since when the reading that is under way has been so."""
        self.group = ""
        self._periods_s, self._output, self._stopping = periods_s, output, stopping
        self._readings = Readings(handle)
        self._wake = threading.Event()

    def describe(self, index: int) -> dict[str, Any]:
        return {"index": index, "uuid": self.uuid, "pci": self.pci, "arch": self.arch, "mig": self.mig}

    def poke(self) -> None:
        """Read the fast group now: something has happened to this GPU."""
        self._wake.set()

    def register(self, wanted: int, events: Any) -> None:
        """On the GPU itself also where MIG is on: instances cannot be registered."""
        try:
            mask = wanted & nv.nvmlDeviceGetSupportedEventTypes(self.handle)
            nv.nvmlDeviceRegisterEvents(self.handle, mask, events)
            self._output.say("registered", gpu=self.uuid, mask=mask)
        except nv.NVMLError as error:
            self._output.say("off", gpu=self.uuid, reading="events", code=error.value)

    def run(self) -> None:
        due = dict.fromkeys(self._periods_s, time.monotonic())
        while not self._stopping.is_set():
            now = time.monotonic()
            if self._wake.is_set():
                self._wake.clear()
                due["fast"] = now
            for group, at in due.items():
                if at <= now and not self._stopping.is_set():
                    self._read(group)
                    due[group] = max(at + self._periods_s[group], now)
            self._wake.wait(max(0.0, min(due.values()) - time.monotonic()))

    def _read(self, group: str) -> None:
        readings = self._readings
        self.group, self.began = group, time.monotonic()
        values = readings.take(group)
        if group == "slow":
            self.mig = mig_uuids(self.handle)
        took_s, self.began = time.monotonic() - self.began, None
        refused = BLIND_CODES & set(readings.codes.values())
        if refused:
            self._output.say("blind", code=min(refused), call=f"reading {group}")
            return
        for name, code in readings.newly_off:
            self._output.say("off", gpu=self.uuid, reading=name, code=code)
        self._output.say(
            "reading",
            gpu=self.uuid,
            group=group,
            took_s=took_s,
            values=values,
            codes=readings.codes,
            processes=readings.processes,
        )


def pci_text(info: Any) -> str:
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def mig_uuids(handle: Any) -> list[str]:
    """The UUIDs of the MIG devices on a GPU; empty where MIG is off."""
    mode: list[int] = _or([0, 0], nv.nvmlDeviceGetMigMode, handle)
    found: list[str] = []
    if mode[0] == 1:
        for index in range(_or(0, nv.nvmlDeviceGetMaxMigDeviceCount, handle)):
            device = _or(None, nv.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            uuid = None if device is None else _or(None, nv.nvmlDeviceGetUUID, device)
            if uuid is not None:
                found.append(uuid)
    return found


def _or(otherwise: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except nv.NVMLError:
        return otherwise
