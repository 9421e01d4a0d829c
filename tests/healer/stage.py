"""A machine with a group on it, for traces and tests of the diagnosis: its clock, its sensors' words, its views.

Beats go through the real heartbeat sensor, so that silence and waiting are told as the daemon would tell them.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from elastic.view import Member
from healer.diagnosis import Advice, Hardware, Limits, XidAction
from healer.evidence import Evidence, GpuRef, HostRef, RankRef, Severity, Subject, What
from healer.sensors import Scribe
from healer.sensors.heartbeats import HeartbeatSensor
from healer.trace import EvidenceLine, Header, Line, view_line
from tests.healer.support import LIMITS, beat

HOST = HostRef("node-7")
DRIVER, GENERATION = "580.159.04", "hopper"

_XIDS = {
    13: ("graphics engine exception", XidAction.RESTART_APP),
    31: ("MMU fault", XidAction.RESTART_APP),
    45: ("preemptive cleanup", XidAction.IGNORE),
    48: ("double-bit ECC error", XidAction.RESET),
    62: ("PMU halt", XidAction.RESET),
    63: ("row remapping recorded", XidAction.IGNORE),
    69: ("graphics class error", XidAction.RESTART_APP),
    74: ("NVLink error", XidAction.HUMAN),
    79: ("GPU has fallen off the bus", XidAction.REBOOT),
    94: ("contained memory error", XidAction.RESTART_APP),
    119: ("GSP timeout", XidAction.RESET),
}


def advise(code: int, detail: str) -> Advice:
    """A few rows of the catalogue, so that the rules are tested apart from it."""
    name, action = _XIDS.get(code, ("not in the catalogue", XidAction.UNKNOWN))
    return Advice(name, action)


def gpu(number: int) -> GpuRef:
    return GpuRef(f"GPU-{number:08x}-0000-4000-8000-000000000000", pci(number))


def pci(number: int) -> str:
    return f"0000:{0x1B + 0x10 * number:02x}:00.0"


def unnamed(number: int) -> GpuRef:
    """As the kernel log knows it."""
    return GpuRef("", pci(number))


class StageClock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.wall_offset = 1_790_000_000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.wall_offset + self.now


class Stage:
    """`ranks` slots, one on each of the first GPUs; `gpus` of them in all. Everything is written to `lines`."""

    def __init__(self, ranks: int = 4, gpus: int = 4, *, limits: Limits = LIMITS, note: str = "") -> None:
        self.clock, self.limits = StageClock(), limits
        self.gpus = tuple(gpu(n) for n in range(gpus))
        self.members = {slot: Member(slot, 0, 100 + slot, 1, "") for slot in range(ranks)}
        self.placed = {RankRef(slot, 0): self.gpus[slot] for slot in range(min(ranks, gpus))}
        self.rounds = dict.fromkeys(range(ranks), 0)
        self._scribes: dict[str, Scribe] = {}
        self._beats = HeartbeatSensor(
            self.clock, stall_after_s=limits.stall_after_s, silent_after_s=limits.silent_after_s
        )
        self._beats.watch(list(self.members.values()))
        self.header = Header(
            version=1, healer="0.1.0", limits=limits, note=note,
            view=view_line(self.clock.now, self.live, self.hardware, driver=DRIVER, generation=GENERATION),
        )  # fmt: skip
        self.lines: list[Line] = []
        self.run(0.2)
        for one in self.gpus:
            self.say("nvml", one, What.RECOVERY_ACTION, 0, Severity.INFO)

    @property
    def live(self) -> tuple[RankRef, ...]:
        return tuple(RankRef(m.slot, m.incarnation) for m in self.members.values())

    @property
    def hardware(self) -> Hardware:
        placed = {rank: one for rank, one in self.placed.items() if rank in self.live}
        return Hardware(gpus=self.gpus, placed=placed, host=HOST, advise=advise)

    def rank(self, slot: int) -> RankRef:
        return RankRef(slot, self.members[slot].incarnation)

    def say(
        self,
        source: str,
        subject: Subject,
        what: What,
        value: str | int | float = 0,
        severity: Severity = Severity.WARNING,
        *,
        by: int | None = None,
        detail: str = "",
    ) -> Evidence:
        scribe = self._scribes.setdefault(source, Scribe(source, self.clock))
        reporter = None if by is None else self.rank(by)
        found = scribe.note(subject, what, value, severity, reporter=reporter, detail=detail)
        self.lines.append(EvidenceLine(evidence=found))
        return found

    def take(self, found: list[Evidence]) -> None:
        self.lines += [EvidenceLine(evidence=one) for one in found]

    def run(
        self,
        seconds: float,
        waits: Mapping[int, tuple[int, ...]] | None = None,
        *,
        mute: tuple[int, ...] = (),
        stand: bool = False,
    ) -> None:
        """Time passes, in steps of a heartbeat. `waits`: whom each slot waits for; `mute`: slots that do not beat;
        `stand`: nobody's round moves."""
        waits = waits or {}
        for _ in range(max(1, round(seconds / 0.2))):
            self.clock.now = round(self.clock.now + min(seconds, 0.2), 6)
            found: list[Evidence] = []
            for slot in self.members:
                if slot in mute:
                    continue
                self.rounds[slot] += 0 if stand else 20
                one = beat(slot, self.clock.now, round_=self.rounds[slot], waiting_on=waits.get(slot, ()))
                found += self._beats.heard(msgspec.structs.replace(one, member=self.members[slot]))
            self.take(found + self._beats.tick())

    def late(self, seconds: float) -> None:
        """The daemon itself does not run for so long."""
        self.clock.now = round(self.clock.now + seconds, 6)
        self.take(self._beats.forgive(seconds))

    def dies(self, slot: int, state: str = "Z", what: What = What.SOCKET_CLOSED) -> None:
        """Its process ends, and the kernel says so."""
        self.say("liveness", self.rank(slot), what, state, Severity.CRITICAL)

    def leaves(self, *slots: int) -> None:
        """The view without them, as after a loss."""
        for slot in slots:
            del self.members[slot]
        self.view()

    def joins(self, slot: int, on: int, incarnation: int = 1) -> None:
        """A replacement is live."""
        self.members[slot] = Member(slot, incarnation, 200 + slot, 1, "")
        self.members = dict(sorted(self.members.items()))
        self.placed[RankRef(slot, incarnation)] = self.gpus[on]
        self.view()
        self.run(0.2)

    def view(self) -> None:
        self._beats.watch(list(self.members.values()))
        self.lines.append(view_line(self.clock.now, self.live, self.hardware, driver=DRIVER, generation=GENERATION))

    def write(self, path: Path) -> None:
        path.write_bytes(self.encoded())

    def encoded(self) -> bytes:
        return b"".join(msgspec.json.encode(line) + b"\n" for line in (self.header, *self.lines))
