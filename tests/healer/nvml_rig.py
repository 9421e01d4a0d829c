"""The NVML sensor against the stand-in for the library: the real probe process and the real bindings."""

import asyncio
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos import fake_nvml
from chaos.fake_nvml import Script, pci_of, uuid_of
from healer.clock import SystemClock
from healer.evidence import Evidence, GpuRef, What
from healer.identity import IdentityMap
from healer.sensors.nvml import NvmlConfig, NvmlSensor

QUICK: dict[str, Any] = {
    "fast_s": 0.03,
    "medium_s": 0.06,
    "slow_s": 0.1,
    "search_s": 0.2,
    "deadline_s": 0.6,
    "restart_s": 0.2,
    "restart_max_s": 1.0,
    "blind_retry_s": 0.3,
    "link_window_s": 0.5,
}


@functools.cache
def library() -> Path:
    return fake_nvml.build(Path(tempfile.gettempdir()))


def gpu(number: int) -> GpuRef:
    return GpuRef(uuid_of(number), pci_of(number))


class NvmlRig:
    """Use as `async with`: the sensor is started and stopped, and its probe process is gone at the end."""

    def __init__(self, folder: Path, *, gpus: int = 4, **options: Any) -> None:
        self.log = folder / "nvml.log"
        self.script = Script.healthy(folder / "script", gpus)
        spawn = options.pop("spawn", None)
        root = options.pop("root", folder / "root")
        self.identity = IdentityMap()
        self.config = NvmlConfig(
            **QUICK | options,
            library_dir=library(),
            environment=fake_nvml.environment(self.script.path, self.log),
        )
        extra = {} if spawn is None else {"spawn": spawn}
        self.sensor = NvmlSensor(SystemClock(), self.config, self.identity, root=root, **extra)
        self.seen: list[Evidence] = []
        self.wakes = 0

    async def __aenter__(self) -> "NvmlRig":
        self.sensor.start(self._woken)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sensor.stop()

    def _woken(self) -> None:
        self.wakes += 1

    def of(self, what: What, number: int | None = None) -> list[Evidence]:
        return [e for e in self.seen if e.what == what and (number is None or e.subject == gpu(number))]

    async def until(self, check: Callable[[], object], why: str, deadline_s: float = 15.0) -> None:
        """As the supervisor does it: tick ten times a second and whenever something comes."""
        end = time.monotonic() + deadline_s
        while not check():
            assert time.monotonic() < end, f"not within {deadline_s:g} s: {why}; {self.sensor.status()}; {self.seen}"
            await asyncio.sleep(0.02)
            self.seen += self.sensor.tick()

    async def ready(self) -> None:
        await self.until(lambda: self.sensor.complete, "every GPU is read once")

    async def sees(self, what: What, number: int | None = None, times: int = 1) -> list[Evidence]:
        await self.until(lambda: len(self.of(what, number)) >= times, f"{what} of GPU {number}")
        return self.of(what, number)

    async def rounds(self, count: int, number: int = 0) -> None:
        """That many more readings of a GPU."""
        wanted = self.sensor.status().readings + count
        await self.until(lambda: self.sensor.status().readings >= wanted, f"{count} more readings")
