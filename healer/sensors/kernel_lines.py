"""What a line of the kernel log says about a GPU, a link or the host. Pure: text in, facts out.

Formats: the NVIDIA driver's (kernel-open/nvidia/nv.c and nvlog of open-gpu-kernel-modules; "NVRM:" lines), its NVSwitch
driver's (SXid, Fabric Manager user guide, appendix D), and the kernel's own for PCIe AER (drivers/pci/pcie/aer.c).
"""

import re
from collections.abc import Iterator

import msgspec

from healer.evidence import Severity, What
from healer.identity import normal_pci
from healer.xid_lines import recovery_action

_ADDRESS = r"(?:PCI:)?((?:[0-9a-f]{1,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"
_XID = re.compile(rf"NVRM: Xid \({_ADDRESS}(?:\s+([^)]*))?\): (\d{{1,5}})(?:,|$|\s)", re.IGNORECASE)
_OFF_BUS = re.compile(rf"NVRM:\s+GPU {_ADDRESS}:? GPU has fallen off the bus", re.IGNORECASE)
_OFF_BUS_BEGINS = re.compile(rf"NVRM:\s+The NVIDIA GPU {_ADDRESS}", re.IGNORECASE)
_OFF_BUS_ENDS = re.compile(r"fallen off the bus and is not responding", re.IGNORECASE)
_SXID = re.compile(rf"SXid \({_ADDRESS}\): (\d{{1,6}}), (Fatal|Non-fatal)(?:, Link (\d+))?", re.IGNORECASE)
_AER = re.compile(
    rf"(?:nvidia|pcieport) {_ADDRESS}: (?:AER: )?PCIe Bus Error: severity=(Corrected|Uncorrect(?:ed|able) \((Non-)?Fatal\))",
    re.IGNORECASE,
)

_OFF_BUS_LINES = 3
"""The longest form takes three lines of the log: the address, the PCI id, what happened."""


class Fact(msgspec.Struct, frozen=True):
    """One thing that a line says."""

    pci: str
    """Address of the GPU; empty where it concerns the host, such as a switch or a port."""
    what: What
    value: str | int
    severity: Severity


class LineReader:
    """Reads lines in their order; remembers only whether one of a group has begun."""

    def __init__(self) -> None:
        self._off_bus = ""
        self._lines_left = 0

    def read(self, line: str) -> list[Fact]:
        """Empty for almost every line; never raises, whatever the line is."""
        if not any(word in line for word in ("NVRM", "SXid", "PCIe Bus Error")):
            return []
        try:
            return list(self._facts(line))
        except ValueError:  # an address that is none
            return []

    def _facts(self, line: str) -> Iterator[Fact]:
        if found := _XID.search(line):
            pci = normal_pci(found[1])
            yield Fact(pci, What.XID, int(found[3]), Severity.WARNING)
            asked = recovery_action(line) if int(found[3]) == 154 else None
            if asked is not None and asked < 8:
                yield Fact(pci, What.RECOVERY_ACTION, asked, Severity.CRITICAL if asked else Severity.INFO)
        elif found := _OFF_BUS.search(line):
            yield Fact(normal_pci(found[1]), What.GPU_LOST, "fell-off-bus", Severity.CRITICAL)
        elif found := _SXID.search(line):
            fatal = found[3].lower() == "fatal"
            what = What.FABRIC_FAILED if fatal else What.NVLINK_ERRORS
            yield Fact("", what, f"SXid {found[2]}", Severity.WARNING)
        elif found := _AER.search(line):
            yield from self._aer(found)
        else:
            yield from self._group(line)

    def _aer(self, found: re.Match[str]) -> Iterator[Fact]:
        text = found[2].lower()
        value = "corrected" if text == "corrected" else "nonfatal" if found[3] else "fatal"
        severity = {"corrected": Severity.INFO, "nonfatal": Severity.WARNING, "fatal": Severity.CRITICAL}[value]
        own = found[0].lower().startswith("nvidia")
        yield Fact(normal_pci(found[1]) if own else "", What.PCIE_AER, value, severity)

    def _group(self, line: str) -> Iterator[Fact]:
        if found := _OFF_BUS_BEGINS.search(line):
            self._off_bus, self._lines_left = normal_pci(found[1]), _OFF_BUS_LINES
        if self._lines_left:
            self._lines_left -= 1
            if _OFF_BUS_ENDS.search(line) or "fallen off the bus" in line:
                self._lines_left = 0
                yield Fact(self._off_bus, What.GPU_LOST, "fell-off-bus", Severity.CRITICAL)
