"""A stand-in for NVIDIA's management library, so that GPU faults can be played where there is no GPU.

`build` compiles it, `Script` writes what it answers, and a monitor is pointed at it by `environment`: it loads the same
`libnvidia-ml.so.1` through the same bindings as ever. The script is read again whenever it changes. Its statements are
described at the top of `script.h`.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from elastic.errors import ElasticError

SOURCE, HEADER = Path(__file__).with_name("fake_nvml.c"), Path(__file__).with_name("script.h")
LIBRARY = "libnvidia-ml.so.1"
SCRIPT_VARIABLE, LOG_VARIABLE = "FAKE_NVML_SCRIPT", "FAKE_NVML_LOG"

SUPPORTED_EVENTS = 0xFF9F
"""What an H200 with driver 580 reports; the clock event, 0x10, is among them."""

_FLAGS = ("-shared", "-fPIC", "-O1", "-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}", "-pthread")


def build(folder: Path) -> Path:
    """Compile the library into `folder`, unless the same source was compiled there before; returns the directory to give
    to the loader. Raises ElasticError where there is no C compiler or it fails."""
    digest = hashlib.blake2b(SOURCE.read_bytes() + HEADER.read_bytes(), digest_size=8).hexdigest()
    built = folder / f"fake-nvml-{digest}"
    if (built / LIBRARY).exists():
        return built
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ElasticError("no C compiler (cc, gcc or clang) on PATH: the stand-in for NVML cannot be built")
    built.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch, LIBRARY)
        done = subprocess.run([compiler, *_FLAGS, "-o", str(made), str(SOURCE)], capture_output=True, text=True)
        if done.returncode:
            raise ElasticError(f"{compiler} could not build {SOURCE}:\n{done.stderr.strip()}")
        made.replace(built / LIBRARY)
    return built


def environment(script: Path, log: Path | None = None) -> dict[str, str]:
    """Variables that the library reads, to be added to those of the process that loads it."""
    return {SCRIPT_VARIABLE: str(script)} | ({LOG_VARIABLE: str(log)} if log else {})


def uuid_of(gpu: int) -> str:
    return f"GPU-{gpu:08x}-fa4e-4e11-0000-{gpu:012x}"


def pci_of(gpu: int) -> str:
    return f"0000:{0x1B + 0x10 * gpu:02x}:00.0"


HEALTHY: Mapping[str, int | str] = {
    "architecture": 9,
    "events": SUPPORTED_EVENTS,
    "mig": 0,
    "field.230": 0,
    "ecc.corrected.volatile.dram": 0,
    "ecc.corrected.volatile.sram": 0,
    "ecc.uncorrected.volatile.dram": 0,
    "ecc.uncorrected.volatile.sram": 0,
    "ecc.corrected.aggregate.dram": 3,
    "ecc.corrected.aggregate.sram": 0,
    "ecc.uncorrected.aggregate.dram": 0,
    "ecc.uncorrected.aggregate.sram": 0,
    "sram.threshold": 0,
    "remap.correctable": 0,
    "remap.uncorrectable": 0,
    "remap.pending": 0,
    "remap.failed": 0,
    "clocks": 0,
    "field.269": 0,
    "field.270": 0,
    "field.271": 0,
    "temperature": 45,
    "slowdown": 87,
    "memory.total": 150_754_820_096,
    "memory.used": 20_000_000_000,
    "utilization": 60,
    "pcie.width": 16,
    "pcie.width.max": 16,
    "pcie.generation": 5,
    "pcie.generation.max": 5,
    "field.94": 0,
    "nvlink.count": 18,
    "nvlink": 1,
    "field.161": 0,
    "field.162": 0,
    "fabric.state": 3,
    "fabric.status": 0,
    "fabric.health": 0,
    "fabric.summary": 0,
}
"""An H200 in good order, as far as healer reads it. The totals over all links and what the H200 does not offer are
missing, so the library answers "not supported"."""


class Script:
    """The statements that the library answers from. Every change is written at once, by renaming."""

    def __init__(self, path: Path, lines: list[str] | None = None) -> None:
        self.path = path
        self._lines = lines or []
        self._events = sum(line.startswith("event ") for line in self._lines)

    @classmethod
    def healthy(cls, path: Path, gpus: int) -> "Script":
        """`gpus` boards in good order, `uuid_of(0)` to `uuid_of(gpus - 1)`."""
        made = cls(path, ["driver 580.159.04"])
        made._lines += [f"gpu {gpu} {uuid_of(gpu)} {pci_of(gpu)}" for gpu in range(gpus)]
        made._lines += [f"set * {key} {value}" for key, value in HEALTHY.items()]
        made._write()
        return made

    @classmethod
    def open(cls, path: Path) -> "Script":
        """Raises ElasticError where there is none."""
        try:
            return cls(path, path.read_text().splitlines())
        except OSError as error:
            raise ElasticError(f"{path}: no script of the stand-in for NVML: {error.strerror}") from None

    @property
    def gpus(self) -> int:
        """How many boards there are."""
        return sum(line.startswith("gpu ") for line in self._lines)

    def say(self, *statements: str) -> None:
        """Add statements as they are."""
        self._lines += statements
        self._write()

    def set(self, gpu: int | str, **readings: int | str) -> None:
        """A reading, from now on; "__" in a name stands for a dot: `set(1, remap__pending=1)`. A text is "err:CODE" or
        "START+RATE/s"."""
        self.say(*[f"set {gpu} {key.replace('__', '.')} {value}" for key, value in readings.items()])

    def field(self, gpu: int | str, number: int, value: int | str) -> None:
        self.say(f"set {gpu} field.{number} {value}")

    def call(self, gpu: int | str, function: str, rule: str) -> None:
        """`rule`: "ok", "err CODE", "delay MILLISECONDS", "hang" (until the rule changes), "crash"."""
        self.say(f"call {gpu} {function} {rule}")

    def event(self, gpu: int, kind: int, data: int = 0, instance: str = "") -> None:
        """One event, delivered once to whoever is registered for it. `instance`: "GI CI" of a MIG device."""
        self._events += 1
        self.say(f"event {self._events} {gpu} {kind:#x} {data} {instance}".rstrip())

    def order(self, *listed: int | str) -> None:
        """What NVML lists, in its own order; "!CODE:GPU" is listed, but asking for it gives CODE."""
        self.say("order " + " ".join(map(str, listed)))

    def _write(self) -> None:
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        scratch.write_text("\n".join(self._lines) + "\n")
        scratch.replace(self.path)
