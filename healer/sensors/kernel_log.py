"""The kernel log as a sensor: what NVML does not deliver. The driver writes XIDs there about 20 ms before NVML has them, and
some (79, 119, 120) never reach NVML; a GPU that fell off the bus is named there by its address.

How far it has read is kept on disk by boot id and the kernel's own sequence number. So a daemon that is started again tells
nothing twice and misses nothing that is still in the kernel's buffer. Ages are measured on the monotonic clock; the wall
clock may jump by hours and nothing changes.
"""

import asyncio
import errno
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from elastic.view import Member
from healer.clock import Clock
from healer.evidence import Evidence, GpuRef, HostRef, Severity, Subject, What
from healer.identity import IdentityMap
from healer.logs import LateLog
from healer.sensors import Scribe, SensorState, SensorStatus, Tally, no_wake
from healer.sensors.kernel_lines import Fact, LineReader

KMSG = Path("/dev/kmsg")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
POSITION_FILE = "kernel-log.json"
"""In the run directory."""
_READ_BYTES = 8192
"""More than the longest record of /dev/kmsg (CONSOLE_EXT_LOG_MAX); a smaller buffer gives EINVAL."""
_READS_A_TURN = 400
"""At most; the rest comes in the next turn, so that a flood does not hold the daemon up."""
_SAVE_S = 1.0
_SKIP_S = 0.2
"""Two microseconds a record: the whole buffer, if it is not many megabytes."""
_MAX_REST_BYTES = 1 << 16

_HEAD = re.compile(rb"\d+,(\d+),(\d+),[^;]*;")

ReadFn = Callable[[int, int], bytes]


class Position(msgspec.Struct, frozen=True):
    """How far the log has been read."""

    boot_id: str
    seq: int


class KernelLogSensor:
    """See `healer.sensors.Sensor`. Needs to be root, or CAP_SYSLOG where kernel.dmesg_restrict is set."""

    name = "kernel-log"

    def __init__(
        self,
        clock: Clock,
        *,
        path: Path = KMSG,
        position: Path | None = None,
        identity: IdentityMap | None = None,
        boot_id: Path = BOOT_ID,
        read: ReadFn = os.read,
    ) -> None:
        """`path` may also be a fifo or a file of lines. `position`: the file that remembers; None: none does. `identity`:
        turns an address into the GPU that is known there."""
        self._clock, self._path, self._position, self._read_fn = clock, path, position, read
        self._identity, self._boot_id_path, self._boot_id = identity, boot_id, ""
        self._tally, self._scribe, self._log = Tally(clock), Scribe(self.name, clock), LateLog("healer")
        self._lines = LineReader()
        self._host = HostRef(socket.gethostname())
        self._wake: Callable[[], None] = no_wake
        self._state, self._why = SensorState.OFF, "not started"
        self._pending: list[Evidence] = []
        self._fd: int | None = None
        self._watched = self._more = False
        self._rest = b""
        self._seq = self._saved_seq = -1
        self._saved_at = clock.monotonic()
        self._catching_up = False
        self._overruns = 0

    # --- the contract ---------------------------------------------------------------------------------------------

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        try:
            self._boot_id = self._boot_id_path.read_text().strip()
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._find_position(self._fd)
        except OSError as error:
            self._blind(error)
            return
        self._state, self._why = SensorState.OK, ""
        self._tally.read()
        try:
            asyncio.get_running_loop().add_reader(self._fd, self._readable)
            self._watched = True
        except PermissionError:
            pass  # a regular file is always ready: it is read at every tick
        self._readable()

    async def stop(self) -> None:
        if self._fd is not None:
            if self._watched:
                asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
            self._save()
        self._state, self._why = SensorState.OFF, "stopped"

    def watch(self, members: Collection[Member]) -> None:
        """The log knows no ranks."""

    def tick(self) -> list[Evidence]:
        if self._fd is not None and (self._more or not self._watched):
            self._readable()
        if self._seq != self._saved_seq and self._clock.monotonic() - self._saved_at >= _SAVE_S:
            self._save()
        found, self._pending = self._pending, []
        self._log.flush()
        return found

    def status(self) -> SensorStatus:
        why = self._why
        if self._state is SensorState.OK and self._overruns:
            why = f"the kernel's buffer overran {self._overruns} times: some lines were never read"
        return self._tally.status(self.name, self._state, why)

    # --- reading --------------------------------------------------------------------------------------------------

    def _find_position(self, fd: int) -> None:
        """Where the last daemon stopped, if this is the same boot; after a reboot from the beginning, since nobody has read
        that; without a memory after what is there now, since what is old is not news."""
        before = self._load()
        if before is None:
            self._skip(fd)
            self._save()
            return
        self._catching_up = True
        if before.boot_id == self._boot_id:
            self._seq = self._saved_seq = before.seq

    def _skip(self, fd: int) -> None:
        """Past all that is there, record by record, so that the last one's number is known."""
        kind = os.fstat(fd).st_mode
        if stat.S_ISFIFO(kind):
            return
        end = self._clock.monotonic() + _SKIP_S
        while stat.S_ISCHR(kind) and self._clock.monotonic() < end:
            try:
                head = _HEAD.match(self._read_fn(fd, _READ_BYTES))
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                continue
            self._seq = int(head[1]) if head else self._seq
        os.lseek(fd, 0, os.SEEK_END)

    def _readable(self) -> None:
        if self._fd is None:
            return
        began = time.perf_counter()
        with self._tally.working():
            count = self._drain(self._fd)
        if count:
            self._tally.read((time.perf_counter() - began) / count)
            self._tally.readings += count - 1
        if self._pending:
            self._save()  # before it is told, so that a daemon that dies over it does not die over it again
        if self._pending or self._more:
            self._wake()

    def _drain(self, fd: int) -> int:
        """Read what there is, up to a limit. Returns the number of records."""
        count, self._more = 0, False
        for _ in range(_READS_A_TURN):
            try:
                chunk = self._read_fn(fd, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EPIPE:
                    self._blind(error)
                    break
                # records were overwritten before they were read; the next read gives the oldest that is left
                self._overruns += 1
                self._note(self._host, Fact("", What.KERNEL_LOG_LOST, self._overruns, Severity.WARNING), "", None)
                continue
            if not chunk:
                break
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > _MAX_REST_BYTES:
                self._rest = b""
            for line in lines:
                count += self._record(line)
        else:
            self._more = True
        if not self._more:
            self._catching_up = False
        return count

    def _record(self, line: bytes) -> bool:
        """One line: "level,sequence,microseconds,flags;text", or without a head in a file of lines."""
        head = _HEAD.match(line)
        if head is None and line[:1] == b" ":
            return False  # " KEY=value": details of the record before
        stamp_s = None
        if head is not None:
            seq = int(head[1])
            if seq <= self._seq:
                return False
            self._seq, stamp_s = seq, int(head[2]) / 1e6
        text = line[head.end() :] if head else line
        decoded = text.decode(errors="replace")
        for fact in self._lines.read(decoded):
            subject = self._subject(fact.pci)
            self._note(subject, fact, decoded, stamp_s if self._catching_up else None)
        return True

    def _subject(self, pci: str) -> Subject:
        if not pci:
            return self._host
        return self._identity.by_pci(pci) if self._identity is not None else GpuRef("", pci)

    def _note(self, subject: Subject, fact: Fact, line: str, at: float | None) -> None:
        """`at`: when the kernel wrote it. Read as it comes, that is now: the kernel's clock drifts from the monotonic one."""
        now = self._clock.monotonic()
        self._pending.append(
            self._scribe.note(
                subject, fact.what, fact.value, fact.severity, detail=line, at=now if at is None else min(at, now)
            )
        )

    def _blind(self, error: OSError) -> None:
        """Told once: from now on NVML is the only witness."""
        if self._fd is not None:
            if self._watched:
                asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd, self._watched = None, False
        why = f"{self._path}: {error.strerror}"
        if isinstance(error, PermissionError):
            why += "; the kernel log is for root, so GPUs are watched by NVML only"
        self._state, self._why = SensorState.BLIND, why
        self._note(self._host, Fact("", What.SENSOR_BLIND, why, Severity.WARNING), "", None)
        self._log.say("warning", "kernel_log.blind", why=why)

    # --- memory ---------------------------------------------------------------------------------------------------

    def _load(self) -> Position | None:
        if self._position is None:
            return None
        try:
            return msgspec.json.decode(self._position.read_bytes(), type=Position)
        except (OSError, msgspec.MsgspecError):
            return None

    def _save(self) -> None:
        self._saved_seq, self._saved_at = self._seq, self._clock.monotonic()
        if self._position is None:
            return
        scratch = self._position.with_name(f"{self._position.name}~")
        try:
            scratch.write_bytes(msgspec.json.encode(Position(self._boot_id, self._seq)))
            scratch.replace(self._position)
        except OSError as error:
            self._log.say("warning", "kernel_log.position_not_saved", why=str(error))
