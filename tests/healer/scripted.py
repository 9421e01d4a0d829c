"""A stand-in for the executor at its public surface: real processes as ranks, everything else by script.

Each rank is a `sleep`; it "beats" while the kernel says that it runs, so that SIGSTOP and SIGKILL look as they do in life.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterable

from elastic import process
from elastic.config import GroupConfig
from elastic.controller.records import (
    BootFailed,
    Event,
    GroupStatus,
    Phase,
    PhaseBegan,
    RankBeat,
    RankGone,
    SequenceEnded,
    SequenceKind,
    SequenceReport,
    SlotState,
    SlotStatus,
)
from elastic.errors import ElasticError, Infeasible
from elastic.protocol import Counters, Heartbeat, Loaded, Source
from elastic.view import Member
from healer.clock import Clock, SystemClock


class ScriptedExecutor:
    def __init__(
        self,
        config: GroupConfig,
        on_event: Callable[[Event], None],
        *,
        term: int = 0,
        armed: Callable[[], bool] = lambda: True,
    ) -> None:
        self.config, self.on_event, self.term, self.armed = config, on_event, term, armed
        self.clock: Clock = SystemClock()
        self.calls: list[tuple[str, tuple[int, ...], str]] = []
        self.fails_to_boot: dict[int, int] = {}
        """By slot: how many more replacements fail for good."""
        self.start_error = ""
        self.waiting_on: dict[int, tuple[int, ...]] = {}
        self.idle = True
        self.gateway_http = "http://127.0.0.1:1"
        self.closed = self.stopped = False
        self._live: dict[int, Member] = {}
        self._target: tuple[int, ...] = ()
        self._lost: set[int] = set()
        self._quarantined: set[int] = set()
        self._incarnations: dict[int, int] = {}
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._epoch = 0

    async def start(self) -> str:
        if self.start_error:
            raise ElasticError(self.start_error)
        self._target = tuple(range(self.config.ranks))
        for slot in self._target:
            self._live[slot] = self._launch(slot)
        self._epoch = 1
        self._spawn(self._beat())
        return f"formed a group of {len(self._live)} ranks"

    def status(self) -> GroupStatus:
        def slot_status(slot: int) -> SlotStatus:
            state: SlotState = "empty"
            if slot in self._lost:
                state = "lost"
            elif slot in self._live:
                state = "live"
            elif slot in self._quarantined:
                state = "quarantined"
            member = self._live.get(slot)
            return SlotStatus(slot, state, member, 0.01 if member else None, 7, 0, 0, Counters(captures=4), 8)

        return GroupStatus(
            name=self.config.name,
            epoch=self._epoch,
            live=tuple(sorted(self._live)),
            target=self._target,
            max_ranks=self.config.max_ranks,
            sequence=None,
            placement_hash="",
            uncovered=0,
            losses_survivable=1,
            slots=tuple(slot_status(s) for s in range(self.config.max_ranks)),
        )

    def lose(self, slots: Iterable[int], *, cause: str, detected: float, replace: bool = True) -> None:
        slots = tuple(slots)
        self._called("replace" if replace else "scale-down", slots, cause)
        self._lost |= set(slots)
        if not replace:
            self._target = tuple(s for s in self._target if s not in slots)
        # reported from within the call, as the interface allows
        self.on_event(PhaseBegan("loss", "release", self._epoch, slots, self.clock.monotonic()))
        self._spawn(self._heal(slots, cause, detected))

    def release(self) -> None:
        self._called("release", (), "")

    def scale(self, target: int | Iterable[int], *, reason: str) -> tuple[int, ...]:
        slots = tuple(range(target)) if isinstance(target, int) else tuple(sorted(set(target)))
        self._called("scale", slots, reason)
        if not 1 <= len(slots) <= self.config.max_ranks:
            raise Infeasible(f"{len(slots)} ranks are outside 1..{self.config.max_ranks}")
        self._target = slots
        self._quarantined -= set(slots)
        self._spawn(self._reach())
        return slots

    async def close(self) -> None:
        self.closed = True
        await self._end_tasks()

    async def stop(self) -> None:
        self.stopped = True
        await self._end_tasks()
        self.end()

    # --- for the tests ------------------------------------------------------------------------------------------------

    def pid(self, slot: int) -> int:
        return self._live[slot].pid

    def signal(self, slot: int, signum: signal.Signals) -> None:
        os.kill(self.pid(slot), signum)

    def end(self) -> None:
        for child in self._children.values():
            child.kill()
            child.wait()
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()

    def _called(self, name: str, slots: tuple[int, ...], why: str) -> None:
        self.calls.append((name, slots, why))
        act = {"at": time.monotonic(), "term": self.term, "pid": os.getpid(), "act": name, "slots": slots}
        if self.config.root.is_dir():
            with (self.config.root / "acts.jsonl").open("a") as file:
                file.write(json.dumps(act) + "\n")

    # --- the script ---------------------------------------------------------------------------------------------------

    def _launch(self, slot: int) -> Member:
        incarnation = self._incarnations[slot] = self._incarnations.get(slot, -1) + 1
        child = subprocess.Popen(["sleep", "3600"])
        self._children[child.pid] = child
        member = Member(slot, incarnation, child.pid, process.start_time(child.pid), "")
        fd = self._pidfds[child.pid] = os.pidfd_open(child.pid)
        asyncio.get_running_loop().add_reader(fd, self._gone, member)
        return member

    def _gone(self, member: Member) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfds[member.pid])
        state = process.state(member.pid, member.pid_start)
        self.on_event(RankGone(member, "socket", state, self.clock.monotonic()))

    async def _beat(self) -> None:
        round_ = 0
        while True:
            round_ += not self.idle and not any(self.waiting_on.values())
            for slot, member in list(self._live.items()):
                if process.state(member.pid, member.pid_start) in "RSD":
                    waits = self.waiting_on.get(slot, ())
                    beat = Heartbeat(
                        round=round_, phase="serving", epoch=self._epoch, idle=self.idle, waiting_on=waits,
                        counters=Counters(), waiting=0, running=0,
                    )  # fmt: skip
                    self.on_event(RankBeat(member, beat, self.clock.monotonic()))
            await asyncio.sleep(self.config.heartbeat_s)

    async def _heal(self, slots: tuple[int, ...], cause: str, detected: float) -> None:
        await asyncio.sleep(0.01)
        for slot in slots:
            member = self._live.pop(slot)
            process.send_signal(member.pid, member.pid_start, signal.SIGKILL)
            self._lost.discard(slot)
        self._report("loss", slots, cause, detected, dict.fromkeys(self._live, 0.012))
        await self._reach()

    async def _reach(self) -> None:
        await asyncio.sleep(0.01)
        for slot in sorted(set(self._live) - set(self._target)):
            member = self._live.pop(slot)
            process.send_signal(member.pid, member.pid_start, signal.SIGKILL)
            self._report("retire", (slot,), "not in the target", self.clock.monotonic(), {})
        for slot in sorted(set(self._target) - set(self._live) - self._quarantined):
            if self.fails_to_boot.get(slot, 0) > 0:
                self.fails_to_boot[slot] -= 1
                self._quarantined.add(slot)
                self.on_event(BootFailed(slot, 1, "ended with exit code 1", 3, True, self.clock.monotonic()))
            else:
                began = self.clock.monotonic()
                self._live[slot] = self._launch(slot)
                self._report("join", (slot,), "refill", began, {})

    def _report(
        self, kind: SequenceKind, slots: tuple[int, ...], why: str, began: float, pause_s: dict[int, float]
    ) -> None:
        self._epoch += 1
        now = self.clock.monotonic()
        self.on_event(
            SequenceEnded(
                SequenceReport(
                    kind=kind,
                    outcome="committed",
                    reason=why,
                    slots=slots,
                    live=tuple(sorted(self._live)),
                    epoch=self._epoch,
                    began=began,
                    ended=now,
                    phases=(Phase("release", began, now),),
                    pause_s=pause_s,
                    loaded={s: Loaded(peer=Source(2, 1000), seconds=0.001) for s in slots if s in self._live},
                )
            )
        )

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)
