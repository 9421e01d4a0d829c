"""Whether this machine has NVIDIA GPUs at all, without asking the driver: no driver on a machine with a GPU is something
else than a machine without one."""

from pathlib import Path

_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"


def nvidia_present(root: Path = Path("/")) -> bool:
    """A driver that is loaded, a device file of it (a container may have no more), or a board on the PCI bus."""
    if (root / "proc/driver/nvidia").exists() or (root / "dev/nvidiactl").exists() or (root / "dev/dxg").exists():
        return True
    return any(_is_gpu(device) for device in (root / "sys/bus/pci/devices").glob("*"))


def driver_addresses(root: Path = Path("/")) -> frozenset[str]:
    """PCI addresses of the boards that the driver has bound, also of those that it cannot reach any more."""
    return frozenset(path.name.lower() for path in (root / "proc/driver/nvidia/gpus").glob("*:*:*.*"))


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
    except OSError:
        return False
    return vendor.strip() == _VENDOR and kind.startswith(_DISPLAY_CLASS)
