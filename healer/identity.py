"""Which rank runs on which GPU, by names that last: rank, pid, GPU UUID, PCI address, host.

NVML's and CUDA's numbers are good for the moment only. NVML counts by PCI address and closes the gap when a GPU is lost;
CUDA counts what CUDA_VISIBLE_DEVICES lets through, in its own order. So a number is turned into a UUID once, when a rank is
first seen, against the GPUs that are there then, and the UUID is what is remembered. NVML's process lists, where they name
the rank's process, overrule that: they say where its memory is.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from elastic.view import Member
from healer.evidence import GpuRef, RankRef
from healer.sensors import ref

_PCI = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.IGNORECASE)
_MAX_ANCESTORS = 8


class Board(msgspec.Struct, frozen=True):
    """One GPU as NVML lists it."""

    gpu: GpuRef
    index: int
    arch: int = -1
    """nvmlDeviceArchitecture_t; -1 where it is not known."""
    mig: tuple[str, ...] = ()


class Identity(msgspec.Struct, frozen=True):
    """One line of the map."""

    rank: RankRef
    pid: int
    host: str
    gpus: tuple[GpuRef, ...]
    """Empty where it is not known, or where the rank uses none."""
    how: str
    """"processes": NVML lists the pid there; "environment": from CUDA_VISIBLE_DEVICES; "" where it is not known."""


def normal_pci(text: str) -> str:
    """ "0000:1b:00.0" from any way to write it: PCI:0000:1b:00, 00000000:1B:00.0, 1b:00.0. Raises ValueError."""
    found = _PCI.fullmatch(text.strip().removeprefix("PCI:").removeprefix("pci:"))
    if found is None:
        raise ValueError(f"{text!r} is no PCI address: expected domain:bus:device.function, such as 0000:1b:00.0")
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function or 0}"


class IdentityMap:
    """Fed by the NVML sensor (`listed`, `processes`) and the supervisor (`watch`); read by everybody. In the loop."""

    def __init__(
        self, proc: Path = Path("/proc"), group: str = "", visible: Callable[[int], str] = lambda slot: ""
    ) -> None:
        """`group`: the run directory of the group, by which its processes are known before they are ranks; empty: none is.
        `visible`: CUDA_VISIBLE_DEVICES of the rank in a slot, for those that show none: a process that became a rank after its start
        had none then. Empty: nobody knows."""
        self._proc, self._group, self._visible = proc, group, visible
        self._boards: dict[str, Board] = {}  # every GPU ever seen, by UUID
        self._present: tuple[str, ...] = ()  # UUIDs that NVML lists now
        self._pids: dict[str, frozenset[int]] = {}
        self._members: dict[RankRef, Member] = {}
        self._owners: dict[int, RankRef | None] = {}  # by pid, while NVML lists it
        self._declared: dict[RankRef, tuple[str, ...]] = {}  # UUIDs, from the environment, as first resolved
        self._used: dict[RankRef, tuple[str, ...]] = {}  # UUIDs, where NVML listed its processes last

    def watch(self, members: Collection[Member]) -> None:
        before, self._members = self._members, {ref(m): m for m in members}
        if self._members.keys() - before.keys():
            self._owners = {}
        else:
            # with one less nothing changes but for its own processes. To look at all again took 2 to 10 ms beside 26 spares on
            # an H200, in the middle of a loss
            self._owners = {pid: rank for pid, rank in self._owners.items() if rank is None or rank in self._members}
        for known in (self._declared, self._used):
            for rank in known.keys() - self._members.keys():
                del known[rank]
        self._resolve()
        self._place()

    def listed(self, boards: Iterable[Board]) -> None:
        """What NVML lists now."""
        found = {board.gpu.uuid: board for board in boards}
        self._boards |= found
        self._present = tuple(found)
        self._resolve()

    def processes(self, uuid: str, pids: Iterable[int]) -> None:
        """The compute processes on one GPU, as NVML lists them now."""
        before, now = self._pids.get(uuid), frozenset(pids)
        if now == before:
            return
        self._pids[uuid] = now
        listed = frozenset().union(*self._pids.values())
        self._owners = {pid: owner for pid, owner in self._owners.items() if pid in listed}
        self._place()

    @property
    def gpus(self) -> tuple[GpuRef, ...]:
        """All that were ever seen, in the order of their addresses."""
        return tuple(sorted((b.gpu for b in self._boards.values()), key=lambda gpu: gpu.pci))

    def board(self, gpu: GpuRef) -> Board | None:
        return self._boards.get(gpu.uuid)

    def gpu_of(self, rank: RankRef) -> GpuRef | None:
        """The rank's GPU; None where it has none, has several, or where it is not known."""
        found = self.gpus_of(rank)
        return found[0] if len(found) == 1 else None

    def gpus_of(self, rank: RankRef) -> tuple[GpuRef, ...]:
        return self.identity(rank).gpus

    def identity(self, rank: RankRef) -> Identity:
        """Raises KeyError where the rank is not watched."""
        member, used = self._members[rank], self._used.get(rank, ())
        how = "processes" if used else "environment" if self._declared.get(rank) else ""
        gpus = tuple(self._boards[uuid].gpu for uuid in used or self._declared.get(rank, ()) if uuid in self._boards)
        return Identity(rank, member.pid, member.host, gpus, how)

    def table(self) -> tuple[Identity, ...]:
        return tuple(self.identity(rank) for rank in sorted(self._members))

    def ranks_on(self, gpu: GpuRef) -> tuple[RankRef, ...]:
        """All watched ranks on this GPU. A GPU of which only the address is known is found by that."""
        known = self.by_pci(gpu.pci) if not gpu.uuid else gpu
        return tuple(rank for rank in sorted(self._members) if known in self.gpus_of(rank))

    def by_pci(self, text: str) -> GpuRef:
        """The GPU at an address, however that is written; without a UUID where none was seen there. Raises ValueError where
        the text is no address."""
        pci = normal_pci(text)
        return next((b.gpu for b in self._boards.values() if b.gpu.pci == pci), GpuRef("", pci))

    def by_name(self, text: str) -> GpuRef | None:
        """From a UUID or a prefix of one that fits a single GPU, or from a MIG device's name: its parent."""
        if text.startswith("MIG-GPU-"):  # before driver 470: MIG-<UUID of the parent>/<GI>/<CI>
            text = text.removeprefix("MIG-").partition("/")[0]
        if text.startswith("MIG-"):
            found = [b.gpu for b in self._boards.values() if any(mig.startswith(text) for mig in b.mig)]
        else:
            found = [b.gpu for b in self._boards.values() if text and b.gpu.uuid.startswith(text)]
        return found[0] if len(found) == 1 else None

    def strangers(self, uuid: str) -> frozenset[int]:
        """Pids on a GPU with a rank of ours on it that belong neither to a rank nor to what is to become one; empty on a GPU
        that is not ours."""
        pids = self._pids.get(uuid, frozenset())
        ours = {pid for pid in pids if self._owner(pid) is not None}
        return frozenset(pid for pid in pids - ours if not self._comes(pid)) if ours else frozenset()

    def _comes(self, pid: int) -> bool:
        """Of a rank that boots, or a spare: started by this daemon, or for the run directory of its group."""
        for ancestor in self._line(pid):
            if ancestor == os.getpid() or (self._group and self._group in self._command(ancestor)):
                return True
        return False

    def _owner(self, pid: int) -> RankRef | None:
        """The rank whose process this is, or that has started it. Looked up once, while the process is listed."""
        if pid not in self._owners:
            ranks = {member.pid: rank for rank, member in self._members.items()}
            self._owners[pid] = next((ranks[one] for one in self._line(pid) if one in ranks), None)
        return self._owners[pid]

    def _line(self, pid: int) -> Iterator[int]:
        """The process and those that started it, up to a limit."""
        for _ in range(_MAX_ANCESTORS):
            if pid <= 1:
                return
            yield pid
            pid = self._parent(pid)

    def _command(self, pid: int) -> list[str]:
        """Its words; empty where they may not be read."""
        try:
            return (self._proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return []

    def _parent(self, pid: int) -> int:
        try:
            text = (self._proc / str(pid) / "stat").read_text()
        except OSError:
            return 0
        return int(text[text.rindex(")") + 2 :].split()[1])

    def _place(self) -> None:
        """A rank that has died is on no list any more, and it is then that one asks where it was."""
        used: dict[RankRef, tuple[str, ...]] = {}
        for uuid, pids in self._pids.items():
            for rank in {owner for pid in pids if (owner := self._owner(pid)) is not None}:
                used[rank] = (*used.get(rank, ()), uuid)
        self._used |= used

    def _resolve(self) -> None:
        if not self._present:
            return
        for rank, member in self._members.items():
            if rank not in self._declared:
                environment = self._environment(member.pid)
                if environment is not None:
                    if "CUDA_VISIBLE_DEVICES" not in environment and (given := self._visible(member.slot)):
                        environment = {**environment, "CUDA_VISIBLE_DEVICES": given}
                    self._declared[rank] = self._declare(environment)

    def _environment(self, pid: int) -> Mapping[str, str] | None:
        """As the process was started; None where it may not be read."""
        try:
            text = (self._proc / str(pid) / "environ").read_bytes().decode(errors="replace")
        except OSError:
            return None
        return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)

    def _declare(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        """UUIDs that CUDA_VISIBLE_DEVICES names, up to the first that names none, as CUDA does; () where it is not set,
        since such a process may use any."""
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return ()
        found: list[str] = []
        for name in map(str.strip, visible.split(",")):
            gpu = self._by_number(int(name), environment) if name.isdecimal() else self.by_name(name)
            if gpu is None:
                break
            found.append(gpu.uuid)
        return tuple(dict.fromkeys(found))

    def _by_number(self, number: int, environment: Mapping[str, str]) -> GpuRef | None:
        """CUDA's number. By address if CUDA_DEVICE_ORDER says so; CUDA's own order, fastest first, is the same where all
        GPUs are of one kind, and unknown where they are not."""
        boards = sorted((self._boards[uuid] for uuid in self._present), key=lambda board: board.gpu.pci)
        by_address = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if number >= len(boards) or not (by_address or len({board.arch for board in boards}) == 1):
            return None
        return boards[number].gpu
