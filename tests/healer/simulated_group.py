"""A group for timelines: a target as the supervisor sees one, in which nothing runs and time is given."""

from collections.abc import Iterable
from typing import Any

from elastic.controller.records import BootFailed, GroupStatus, SlotStatus
from elastic.errors import Infeasible
from elastic.protocol import Counters
from elastic.view import Member
from tests.healer.support import FakeClock


class Group:
    """A target as the supervisor sees one, in which boots take time and fail by order."""

    def __init__(self, ranks: int, clock: FakeClock, boot_s: float) -> None:
        self.clock, self.boot_s = clock, boot_s
        self.live = dict.fromkeys(range(ranks), 0)
        self.target = tuple(range(ranks))
        self.sequence = ""
        self.survivable = 99
        self.failing: dict[int, int] = {}
        self.refuse = ""
        self.drain_hangs = False
        self.drain_s = 1.0
        self.calls: list[str] = []
        self._incarnations = dict(self.live)
        self._booting: dict[int, float] = {}
        self._leaving: dict[int, float] = {}
        self.gave_up: set[int] = set()

    def lose(self, slots: Iterable[int], *, cause: str, detected: float, replace: bool) -> None:
        for slot in slots:
            self.calls.append(f"lose {slot}")
            self.live.pop(slot, None)
            if replace:
                self._booting[slot] = self.clock.now + self.boot_s
            else:
                self.target = tuple(s for s in self.target if s != slot)

    def release(self) -> None:
        self.calls.append("release")

    def scale(self, wanted: int | Iterable[int], *, reason: str) -> tuple[int, ...]:
        if self.refuse:
            raise Infeasible(self.refuse)
        self.target = tuple(range(wanted)) if isinstance(wanted, int) else tuple(sorted(set(wanted)))
        self.calls.append(f"scale {self.target}")
        for slot in self.target:
            self.gave_up.discard(slot)
            if slot not in self.live and slot not in self._booting:
                self._booting[slot] = self.clock.now + self.boot_s
        for slot in set(self.live) - set(self.target):
            if self.drain_hangs:
                continue
            self._leaving.setdefault(slot, self.clock.now + self.drain_s)
        return self.target

    def step(self) -> list[BootFailed]:
        now, failed = self.clock.now, []
        for slot, at in list(self._booting.items()):
            if now < at:
                continue
            del self._booting[slot]
            if slot not in self.target:
                continue
            if self.failing.get(slot, 0) > 0:
                self.failing[slot] -= 1
                self.gave_up.add(slot)
                failed.append(BootFailed(slot, self._incarnations.get(slot, -1) + 1, "exit code 1", 3, True, now))
                continue
            self._incarnations[slot] = self._incarnations.get(slot, -1) + 1
            self.live[slot] = self._incarnations[slot]
        for slot, at in list(self._leaving.items()):
            if now >= at:
                del self._leaving[slot]
                self.live.pop(slot, None)
        return failed

    def observe(self) -> GroupStatus:
        def status(slot: int) -> SlotStatus:
            held = self.live.get(slot)
            member = None if held is None else Member(slot, held, 1, 1, "")
            state: Any = "live" if member else "booting" if slot in self._booting else "empty"
            return SlotStatus(slot, state, member, 0.0, 0, 0, 0, Counters(), 8)

        return GroupStatus(
            name="golden",
            epoch=1,
            live=tuple(sorted(self.live)),
            target=self.target,
            max_ranks=8,
            sequence=self.sequence or None,
            placement_hash="",
            uncovered=0,
            losses_survivable=self.survivable,
            slots=tuple(status(slot) for slot in range(8)),
        )
