"""Clocks, members and evidence for tests."""

import asyncio
import time
from collections.abc import Callable

from elastic.controller.records import RankBeat
from elastic.protocol import Counters, Heartbeat
from elastic.view import Member
from healer.diagnosis import Limits
from healer.evidence import Evidence, RankRef, Severity, What

LIMITS = Limits(stall_after_s=1.0, silent_after_s=10.0, fault_window_s=30.0)

POLICY = """\
apiVersion: healer/v1
kind: Policy
metadata:
  name: test
spec:
  target:
    kind: embedded
    checkpoint: model
    runDir: run
    ranks: 4
    maxRanks: 6
    slotsPerRank: 8
"""


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now


def rank(slot: int, incarnation: int = 0) -> RankRef:
    return RankRef(slot, incarnation)


def member(slot: int, pid: int = 1, pid_start: int = 1, incarnation: int = 0) -> Member:
    return Member(slot, incarnation, pid, pid_start, "")


def beat(slot: int, at: float, *, round_: int = 0, waiting_on: tuple[int, ...] = (), idle: bool = False) -> RankBeat:
    return RankBeat(
        member(slot),
        Heartbeat(
            round=round_,
            phase="serving",
            epoch=1,
            idle=idle,
            waiting_on=waiting_on,
            counters=Counters(),
            waiting=0,
            running=0,
        ),
        at,
    )


class Notes:
    """Builds evidence by hand."""

    def __init__(self) -> None:
        self._seq = 0

    def __call__(
        self, slot: int, what: What, value: str | int | float = 0, *, by: int | None = None, at: float = 100.0
    ) -> Evidence:
        self._seq += 1
        return Evidence(
            source="test",
            seq=self._seq,
            subject=rank(slot),
            what=what,
            value=value,
            severity=Severity.WARNING,
            reporter=None if by is None else rank(by),
            at=at,
            wall=0.0,
        )


async def eventually(check: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not check():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        await asyncio.sleep(0.01)
