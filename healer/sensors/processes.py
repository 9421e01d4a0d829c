"""The process sensor: what the kernel says about each rank's process, by pid and start time.

A low-rate scan reports changes; `look` reports at once and always, for when another sensor raises a suspicion.
"""

from collections.abc import Collection
from pathlib import Path

from elastic.view import Member
from healer.clock import Clock
from healer.evidence import Evidence, RankRef, Severity, What
from healer.sensors import Scribe, ref

DEAD = frozenset("ZXx")
STOPPED = "T"
_PF_EXITING = 0x4  # include/linux/sched.h


def read_state(pid: int, pid_start: int, proc: Path = Path("/proc")) -> str | None:
    """The state letter of exactly this process; "X" when it is gone, its pid belongs to another process, or it is exiting
    (the kernel closes a killed process's sockets before it turns it into a zombie). None: /proc could not be read."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except OSError:
        return None
    # the command, in parentheses, may itself hold blanks and parentheses
    fields = text[text.rindex(")") + 2 :].split()
    state, flags, started = fields[0], int(fields[6]), int(fields[19])
    if started != pid_start:
        return "X"
    return "X" if flags & _PF_EXITING and state not in DEAD else state


class ProcessSensor:
    """`healer.sensors.Sensor` over /proc: about 20 microseconds a rank and reading."""

    name = "processes"

    def __init__(self, clock: Clock, proc: Path = Path("/proc")) -> None:
        self.last_contact = clock.monotonic()
        self._clock, self._proc = clock, proc
        self._scribe = Scribe(self.name, clock)
        self._members: dict[RankRef, Member] = {}
        self._said: dict[RankRef, str] = {}

    def watch(self, members: Collection[Member]) -> None:
        self._members = {ref(m): m for m in members}
        self._said = {r: s for r, s in self._said.items() if r in self._members}

    def tick(self) -> list[Evidence]:
        found: list[Evidence] = []
        for rank, member in self._members.items():
            state = self._read(member)
            # being alive is what is expected of a rank: no news at the first reading
            if state is not None and _class(state) != _class(self._said.get(rank, "S")):
                found.append(self._note(rank, state))
        return found

    def look(self, rank: RankRef) -> list[Evidence]:
        """One reading now, reported whether or not it changed; nothing where the rank is not watched."""
        member = self._members.get(rank)
        state = self._read(member) if member else None
        return [] if state is None else [self._note(rank, state)]

    def _read(self, member: Member) -> str | None:
        state = read_state(member.pid, member.pid_start, self._proc)
        if state is not None:
            self.last_contact = self._clock.monotonic()
        return state

    def _note(self, rank: RankRef, state: str) -> Evidence:
        self._said[rank] = state
        severity = Severity.INFO
        if state in DEAD:
            severity = Severity.CRITICAL
        elif state == STOPPED:
            severity = Severity.WARNING
        return self._scribe.note(rank, What.PROCESS_STATE, state, severity)


def _class(state: str) -> str:
    """Running and sleeping alternate all the time and mean the same: alive."""
    if state in DEAD:
        return "dead"
    return state if state in "TtD" else "alive"
