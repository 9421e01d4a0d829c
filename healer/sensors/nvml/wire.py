"""The lines that the probe process writes, one JSON object each. `at` is monotonic seconds, the same clock as the
daemon's."""

import msgspec


class GpuInfo(msgspec.Struct, frozen=True):
    index: int
    """NVML's number; another one after a GPU was lost."""
    uuid: str
    pci: str
    arch: int
    """nvmlDeviceArchitecture_t: 7 Ampere, 8 Ada, 9 Hopper, 10 Blackwell; -1 where it is not known."""
    mig: tuple[str, ...] = ()
    """UUIDs of its MIG devices."""


class Broken(msgspec.Struct, frozen=True):
    index: int
    code: int


class Gpus(msgspec.Struct, frozen=True, tag_field="t", tag="gpus"):
    """NVML is open, and these are there; said again when they change."""

    at: float
    driver: str
    gpus: tuple[GpuInfo, ...]
    broken: tuple[Broken, ...]


class Reading(msgspec.Struct, frozen=True, tag_field="t", tag="reading"):
    at: float
    gpu: str
    group: str
    took_s: float
    values: dict[str, int]
    """What could be read; a name that is missing has no value, not the value 0."""
    codes: dict[str, int]
    """By call, NVML's return code, other than "not supported" and the like."""
    processes: tuple[tuple[int, int | None], ...] | None = None
    """Pid and bytes of GPU memory; None where they were not read."""


class NvmlEvent(msgspec.Struct, frozen=True, tag_field="t", tag="event"):
    at: float
    gpu: str
    kind: int
    data: int
    instance: int


class Registered(msgspec.Struct, frozen=True, tag_field="t", tag="registered"):
    at: float
    gpu: str
    mask: int


class ReadingOff(msgspec.Struct, frozen=True, tag_field="t", tag="off"):
    """Not supported, or not permitted: not asked for again."""

    at: float
    gpu: str
    reading: str
    code: int


class CallFailed(msgspec.Struct, frozen=True, tag_field="t", tag="failed"):
    """A call that concerns no GPU in particular; with the code -1 a fault of the probe itself, which then ends."""

    at: float
    call: str
    code: int


class Blind(msgspec.Struct, frozen=True, tag_field="t", tag="blind"):
    """The driver as a whole does not answer."""

    at: float
    code: int
    call: str


class Beat(msgspec.Struct, frozen=True, tag_field="t", tag="beat"):
    """The process runs, whatever its driver calls do."""

    at: float
    cpu_s: float
    busy: tuple[tuple[str, str, float], ...]
    """GPU, group and seconds of each reading that is under way."""


class Bye(msgspec.Struct, frozen=True, tag_field="t", tag="bye"):
    """NVML is closed, or could not be closed in time."""

    at: float


Line = Gpus | Reading | NvmlEvent | Registered | ReadingOff | CallFailed | Blind | Beat | Bye

decode = msgspec.json.Decoder(Line).decode
"""Raises msgspec.MsgspecError."""
