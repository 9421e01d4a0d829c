"""A group of fake vLLM ranks, real processes all, under a real `VllmGroupTarget`; what it reports is kept."""

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from elastic import process
from elastic.controller.records import Event, SequenceReport
from healer.policy.load import parse_policy
from healer.policy.schema import Policy
from healer.targets.vllm.processes import sessions
from healer.targets.vllm.records import Part
from healer.targets.vllm.target import VllmGroupTarget

FAKE = Path(__file__).with_name("fake_vllm.py")
DEADLINE_S = 30.0
POLICY = """\
apiVersion: healer/v1
kind: Policy
metadata: {{name: fake}}
spec:
  target:
    kind: vllm
    runDir: {folder}/run
    ranks: {ranks}
    maxRanks: 4
    executable: {folder}/vllm
    model: m
    basePort: {port}
    args: [--enable-elastic-ep, --enable-expert-parallel, --enable-eplb, --elastic-ep-max-dp-size, "4", --enable-fault-tolerance,
      --eplb-config, '{{"num_redundant_experts": 8}}']
    env: {{FAKE_VLLM: {folder}/group, VLLM_SERVER_DEV_MODE: "1"}}
    gateway: {{port: 0}}
    canary: {{interval: 1s, deadline: 2s}}
    deadlines: {{start: 20s, scale: 10s, gate: 1s, retry: 5s, settle: 500ms, stall: 2s, drain: 1s, end: 1s}}
  detection: {{heartbeatInterval: 100ms, stallAfter: 600ms, silentAfter: 1500ms}}
  bounds: {{minRanks: 2}}
"""


def free_base() -> int:
    """Four ports in a row that nobody listens on; by the pid, below those that the kernel gives out."""
    return 20000 + os.getpid() % 1000 * 10


class Stand:
    def __init__(self, folder: Path, ranks: int = 2) -> None:
        self.folder = folder
        (folder / "group/faults").mkdir(parents=True, exist_ok=True)
        script = folder / "vllm"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {FAKE} "$@"\n')
        script.chmod(0o755)
        text = POLICY.format(folder=folder, ranks=ranks, port=free_base())
        self.policy: Policy = parse_policy(text, name="p", base=folder)
        self.events: list[Event] = []
        self.target = self.another()

    def another(self, *, observe_only: bool = False) -> VllmGroupTarget:
        """Another daemon's, for the same run directory."""
        self.target = VllmGroupTarget(self.policy, self.events.append, observe_only=observe_only)
        return self.target

    def fault(self, name: str, on: bool = True) -> None:
        path = self.folder / "group/faults" / name
        if on:
            path.touch()
        else:
            path.unlink(missing_ok=True)

    def clean(self) -> None:
        """What a new launch of real ranks would not remember."""
        for name in ("posts", "ready", "committed"):
            shutil.rmtree(self.folder / "group" / name, ignore_errors=True)

    def pid(self, slot: int, part: Part = Part.API) -> int:
        leader = next(h.pid for h in self.target.group.held() if h.slot == slot)
        return next(p.pid for p in sessions({leader})[leader] if p.part == part)

    def pids(self) -> list[tuple[int, int]]:
        leaders = {h.pid for h in self.target.group.held()}
        return [(p.pid, p.pid_start) for found in sessions(leaders).values() for p in found]

    def incarnations(self) -> dict[int, int]:
        return {h.slot: h.incarnation for h in self.target.group.held()}

    def reports(self, kind: str) -> list[SequenceReport]:
        return [
            r for e in self.events if isinstance(r := getattr(e, "report", None), SequenceReport) and r.kind == kind
        ]

    async def until(self, condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > end:
                group = self.target.group
                raise AssertionError(f"not in time: {group.machine.state}, {group.machine.why}, {self.events[-5:]}")
            await asyncio.sleep(0.02)

    async def serves(self, *slots: int) -> None:
        await self.until(lambda: self.target.observe().live == slots and not self.target.observe().sequence)


@contextlib.asynccontextmanager
async def standing(
    folder: Path, ranks: int = 2, *, prepare: Callable[[Stand], None] | None = None
) -> AsyncIterator[Stand]:
    """A group that serves; ended in any case. `prepare` is called before its start."""
    stand = Stand(folder, ranks)
    if prepare is not None:
        prepare(stand)
    try:
        await stand.target.start()
        yield stand
    finally:
        left = stand.pids()
        await stand.target.stop()
        assert not [pid for pid, start in left if process.is_alive(pid, start)], "a process was left behind"
