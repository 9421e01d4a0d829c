"""The process sensor: what the kernel says about each rank's process, by pid and start time.

A low-rate scan reports changes; `look` reports at once and always, for when another sensor raises a suspicion;
`look_deeper` has the rank's stacks captured, which takes a moment.
"""

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

from elastic.view import Member
from healer.clock import Clock
from healer.evidence import Evidence, RankRef, Severity, What
from healer.sensors import Scribe, SensorState, SensorStatus, Tally, no_wake, ref, stacks
from healer.sensors.memory import Growth, MemoryConfig, available_bytes, resident_bytes

DEAD = frozenset("ZXx")
STOPPED = "T"
UNINTERRUPTIBLE = "D"
UNINTERRUPTIBLE_AFTER_S = 2.0
"""Every read from a disk is state D for a moment; a process that stays in it is stuck in a driver."""
STACK_DEADLINE_S = 5.0
STACK_PAUSE_S = 10.0
"""At least between two captures of one rank."""
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

    def __init__(
        self,
        clock: Clock,
        proc: Path = Path("/proc"),
        memory: MemoryConfig | None = None,
        *,
        stack_deadline_s: float = STACK_DEADLINE_S,
    ) -> None:
        self._clock, self._proc, self._tally = clock, proc, Tally(clock)
        self._state, self._why = SensorState.OFF, ""
        self._scribe = Scribe(self.name, clock)
        self._memory, self._stack_deadline_s = memory or MemoryConfig(), stack_deadline_s
        self._wake: Callable[[], None] = no_wake
        self._members: dict[RankRef, Member] = {}
        self._said: dict[RankRef, str] = {}
        self._uninterruptible: dict[RankRef, float] = {}  # since when
        self._growth: dict[RankRef, Growth] = {}
        self._captures: dict[RankRef, asyncio.Task[None]] = {}
        self._captured_at: dict[RankRef, float] = {}
        self._stacks: list[Evidence] = []

    def start(self, wake: Callable[[], None]) -> None:
        self._wake, self._state = wake, SensorState.OK

    async def stop(self) -> None:
        for task in self._captures.values():
            task.cancel()
        await asyncio.gather(*self._captures.values(), return_exceptions=True)
        self._state = SensorState.OFF

    def status(self) -> SensorStatus:
        return self._tally.status(self.name, self._state, self._why)

    def watch(self, members: Collection[Member]) -> None:
        # a rank on another machine has no process here
        self._members = {ref(m): m for m in members if m.pid}
        for known in (self._said, self._uninterruptible, self._growth, self._captured_at):
            for rank in known.keys() - self._members.keys():
                del known[rank]

    def tick(self) -> list[Evidence]:
        found, self._stacks = self._stacks, []
        with self._tally.working():
            for rank, member in self._members.items():
                found += self._scan(rank, member)
        return found

    def look(self, rank: RankRef) -> list[Evidence]:
        """One reading now, reported whether or not it changed; nothing where the rank is not watched."""
        member = self._members.get(rank)
        state = self._read(member) if member else None
        return [] if state is None else [self._note(rank, state)]

    def look_deeper(self, rank: RankRef) -> None:
        """Have its stacks captured, in a running loop: a later `tick`, announced by `wake`, returns them as `What.STACK`.
        Does nothing where that is under way or was done a moment ago, and where the rank is not watched."""
        member, now = self._members.get(rank), self._clock.monotonic()
        if member is None or rank in self._captures or now - self._captured_at.get(rank, -1e9) < STACK_PAUSE_S:
            return
        self._captured_at[rank] = now
        task = asyncio.get_running_loop().create_task(self._capture(rank, member), name=f"stack of {rank}")
        self._captures[rank] = task
        task.add_done_callback(lambda _: self._captures.pop(rank, None))

    async def _capture(self, rank: RankRef, member: Member) -> None:
        try:
            stack = await stacks.capture(
                member.pid, member.pid_start, deadline_s=self._stack_deadline_s, py_spy=stacks.find_py_spy()
            )
        except (stacks.NoStack, OSError) as error:
            self._why = f"no stack of {rank}: {error}"
            return
        self._why = ""
        self._stacks.append(
            self._scribe.note(rank, What.STACK, stack.frames, Severity.INFO, detail=f"{stack.how}: {stack.text}")
        )
        self._wake()

    def _scan(self, rank: RankRef, member: Member) -> list[Evidence]:
        state = self._read(member)
        if state is None:
            return []
        if state == UNINTERRUPTIBLE:
            since = self._uninterruptible.setdefault(rank, self._clock.monotonic())
            if self._clock.monotonic() - since < UNINTERRUPTIBLE_AFTER_S:
                return []
        else:
            self._uninterruptible.pop(rank, None)
        found = self._grows(rank, member)
        # being alive is what is expected of a rank: no news at the first reading
        if _class(state) != _class(self._said.get(rank, "S")):
            found.append(self._note(rank, state))
        return found

    def _grows(self, rank: RankRef, member: Member) -> list[Evidence]:
        growth, now = self._growth.setdefault(rank, Growth(self._memory)), self._clock.monotonic()
        if not growth.due(now):
            return []
        resident, available = resident_bytes(member.pid, self._proc), available_bytes(self._proc)
        changed = None if resident is None or available is None else growth.sample(now, resident, available)
        if changed is None:
            return []
        per_s, over = changed
        severity = Severity.WARNING if over else Severity.INFO
        return [self._scribe.note(rank, What.MEMORY_GROWS, per_s, severity, detail=f"{available} bytes are available")]

    def _read(self, member: Member) -> str | None:
        began = self._clock.monotonic()
        state = read_state(member.pid, member.pid_start, self._proc)
        if state is not None:
            self._tally.read(self._clock.monotonic() - began)
        return state

    def _note(self, rank: RankRef, state: str) -> Evidence:
        self._said[rank] = state
        severity = Severity.INFO
        if state in DEAD:
            severity = Severity.CRITICAL
        elif state in (STOPPED, UNINTERRUPTIBLE):
            severity = Severity.WARNING
        return self._scribe.note(rank, What.PROCESS_STATE, state, severity)


def _class(state: str) -> str:
    """Running and sleeping alternate all the time and mean the same: alive."""
    if state in DEAD:
        return "dead"
    return state if state in "TtD" else "alive"
