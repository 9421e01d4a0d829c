"""The machine below the group: the sensors of its GPUs and of its kernel log, and what they know of who is on which GPU."""

import socket
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.view import Member
from healer.clock import Clock
from healer.diagnosis import Hardware
from healer.diagnosis.hardware import Advice, Advise, unadvised
from healer.evidence import GpuRef, HostRef
from healer.sensors import Sensor, SensorState, ref

if TYPE_CHECKING:
    from healer.policy.schema import Sensors
    from healer.sensors.nvml import NvmlConfig, NvmlSensor

AdviseFor = Callable[[str, str], Advise]
"""Version of the driver, generation of the GPUs -> what XIDs mean there."""


def here() -> HostRef:
    """This host."""
    return HostRef(socket.gethostname())


class Machine:
    """Without sensors: nobody looks at GPUs, and nothing is said of any."""

    def __init__(self, sensors: Sequence[Sensor] = ()) -> None:
        self.sensors = tuple(sensors)

    @property
    def driver(self) -> str:
        """Version of the GPU driver; empty while it is not known."""
        return ""

    @property
    def generation(self) -> str:
        """Of the GPUs, as the XID catalogue names it; empty while it is not known."""
        return ""

    def has_read(self, sensor: Sensor) -> bool:
        """It has given a full reading, or said that it cannot."""
        return sensor.status().state != SensorState.STARTING

    def ask(self, gpu: GpuRef, at: float) -> None:
        """An XID came at `at`, monotonic seconds: have the driver say what it asks for, also if that is nothing."""

    def hardware(self, members: Collection[Member]) -> Hardware:
        """Called often, and cheap: what is known now of the GPUs and of the ranks on them."""
        return Hardware()


class GpuMachine(Machine):
    """NVML, and what else there is; all share NVML's map of who is on which GPU."""

    def __init__(self, nvml: "NvmlSensor", others: Sequence[Sensor], advise_for: AdviseFor) -> None:
        """`advise_for`: given the driver's version and the generation of the GPUs, what XIDs mean."""
        super().__init__((nvml, *others))
        self._nvml, self._identity, self._host = nvml, nvml.identity, here()
        self._advise_for = advise_for
        self._advise, self._advised = advise_for("", ""), ("", "")

    @property
    def driver(self) -> str:
        return self._nvml.driver

    @property
    def generation(self) -> str:
        """Of all GPUs where they are of one kind, as they are in every server that is sold."""
        kinds = {board.arch for gpu in self._nvml.gpus if (board := self._identity.board(gpu)) is not None}
        return GENERATIONS.get(next(iter(kinds)), "") if len(kinds) == 1 else ""

    def has_read(self, sensor: Sensor) -> bool:
        return self._nvml.settled if sensor is self._nvml else super().has_read(sensor)

    def ask(self, gpu: GpuRef, at: float) -> None:
        self._nvml.ask(gpu, at)

    def hardware(self, members: Collection[Member]) -> Hardware:
        placed = {}
        for rank in map(ref, members):
            gpu = self._identity.gpu_of(rank)
            if gpu is not None:
                placed[rank] = gpu
        if self._advised != (self.driver, self.generation):
            self._advised = (self.driver, self.generation)
            self._advise = self._advise_for(*self._advised)
        return Hardware(gpus=self._identity.gpus, placed=placed, host=self._host, advise=self._advise)


GENERATIONS = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
}
"""nvmlDeviceArchitecture_t, nvidia-ml-py 13.615."""


def catalogue(overrides: Path | None = None) -> AdviseFor:
    """Advice from the XID catalogue, with a site's own rows. Reads it now. Raises ElasticError where those have errors."""
    from healer.xids import load

    rows = load(overrides)

    def advise_for(driver: str, generation: str) -> Advise:
        def advise(code: int, detail: str) -> Advice:
            found = rows.classify(code, generation, driver, detail)
            # NVIDIA's own names, without what they all begin with
            return Advice(found.name.removeprefix("ROBUST_CHANNEL_").replace("_", " ").lower(), found.action)

        return advise

    return advise_for


def this_machine(
    clock: Clock,
    settings: "Sensors | None" = None,
    home: Path | None = None,
    group: str = "",
    visible: Callable[[int], str] = lambda slot: "",
) -> Machine:
    """The sensors of this host, not started. `settings`: `spec.sensors` of a policy, the defaults without one; `home`: where
    it is kept how far the kernel log has been read; `group`: the run directory of the group, to know its processes by;
    `visible`: as of `IdentityMap`.
    Raises ElasticError where the site's XID rows have errors."""
    from healer.identity import IdentityMap
    from healer.sensors.nvml import NvmlConfig, NvmlSensor
    from healer.sensors.nvml.presence import nvidia_present

    overrides = Path(settings.xid_overrides) if settings is not None and settings.xid_overrides else None
    config: NvmlConfig = NvmlConfig()
    others: list[Sensor] = []
    if settings is not None:
        if not settings.nvml.enabled:
            return Machine()
        config = _nvml_config(settings)
    nvml = NvmlSensor(clock, config, identity=IdentityMap(group=group, visible=visible))
    if not nvidia_present():
        # nothing to look at; the sensor says so, and nothing is read for it
        return GpuMachine(nvml, (), catalogue(overrides) if overrides else lambda driver, generation: unadvised)
    if settings is None or settings.kernel_log.enabled:
        from healer.sensors.kernel_log import KMSG, KernelLogSensor

        path = KMSG if settings is None else Path(settings.kernel_log.path)
        position = home / "kernel-log.json" if home is not None else None
        others.append(KernelLogSensor(clock, path=path, position=position, identity=nvml.identity))
    return GpuMachine(nvml, others, catalogue(overrides))


def _nvml_config(settings: "Sensors") -> "NvmlConfig":
    from healer.sensors.nvml import NvmlConfig

    nvml, limits = settings.nvml, settings.thresholds
    return NvmlConfig(
        fast_s=nvml.interval.fast_s,
        medium_s=nvml.interval.medium_s,
        slow_s=nvml.interval.slow_s,
        deadline_s=nvml.deadline_s,
        ecc_correctable_per_s=limits.correctable_ecc_per_second,
        nvlink_errors_per_s=limits.nvlink_errors_per_second,
        pcie_replays_per_s=limits.pcie_replays_per_minute / 60,
    )
