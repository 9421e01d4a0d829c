"""What a measurement ran on, so that figures can be compared."""

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

GPUS_S = 20.0


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    cores: int
    """That this process may use."""
    memory_gb: float
    kernel: str
    load: tuple[float, float, float]
    """Runnable processes, average over 1, 5 and 15 minutes, before the measurement: what others took from it."""
    gpus: tuple[str, ...] = ()
    """Name, driver and memory of each NVIDIA GPU."""


def machine() -> Machine:
    cpu = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return Machine(
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)),
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
        kernel=platform.release(),
        load=os.getloadavg(),
        gpus=gpus(),
    )


def gpus() -> tuple[str, ...]:
    """Name, driver and memory of each NVIDIA GPU; empty where there is none, or where nobody says so in time."""
    query = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # it hangs where a GPU has fallen off the bus; "No devices were found" comes with exit code 0
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=GPUS_S).stdout
        return tuple(line.strip() for line in said.splitlines() if line.count(",") == 2)
    return ()


def versions() -> dict[str, str]:
    """Of Python, what was installed, and the revision of this repository where it is one ("+": with changes), or else what
    HEALER_REVISION says: for a copy without its history."""
    found = {"python": platform.python_version()}
    for name in ("healer", "torch", "nixl"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if named := os.environ.get("HEALER_REVISION"):
        found["revision"] = named
    git = ["git", "-C", str(Path(__file__).parents[1])]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        commit = _output(*git, "rev-parse", "--short=12", "HEAD")
        found["revision"] = commit + ("+" if _output(*git, "status", "--porcelain", "--untracked-files=no") else "")
    return found


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
