"""A supervisor in the loop of a test, over a scripted executor with real processes."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import pytest

from elastic.controller.records import Event
from elastic.errors import ElasticError
from elastic.view import Member
from healer.clock import SystemClock
from healer.diagnosis import Hardware
from healer.evidence import Evidence, GpuRef, Severity, Subject, What
from healer.incidents import IncidentSummary, summarise
from healer.journal import Journal, Kind
from healer.machine import Machine
from healer.policy.load import parse_policy
from healer.sensors import Scribe, SensorCost, SensorState, SensorStatus, ref
from healer.supervisor import Supervisor
from healer.targets.embedded import EmbeddedTarget
from healer.trace import Recorder
from tests.healer.scripted import ScriptedExecutor
from tests.healer.stage import HOST, advise, gpu
from tests.healer.support import POLICY, eventually

FAST = "  detection: {heartbeatInterval: 20ms, stallAfter: 300ms, silentAfter: 3s, processInterval: 200ms}\n"
RULES = "  healing: {rules: [{name: all, actions: [replace, scale-down, human], maxAttempts: 2, backoff: 50ms}]}\n"


class SkippingClock(SystemClock):
    """The real one, which can be moved on: as if nobody had run meanwhile."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.skipped_s


class GpuWord(Machine):
    """Four GPUs with a rank on each, and a sensor that says what a test has it say."""

    name = "nvml"

    def __init__(self, clock: SystemClock) -> None:
        super().__init__((self,))
        self.clock, self.scribe = clock, Scribe("nvml", clock)
        self.pending: list[Evidence] = []
        self.asked: list[GpuRef] = []
        self.wake: Callable[[], None] = lambda: None
        self.fails = False
        self.stopped = False

    def start(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    async def stop(self) -> None:
        self.stopped = True

    def watch(self, members: Collection[Member]) -> None: ...

    def tick(self) -> list[Evidence]:
        if self.fails:
            raise RuntimeError("a defect of the sensor")
        found, self.pending = self.pending, []
        return found

    def status(self) -> SensorStatus:
        return SensorStatus(self.name, SensorState.OK, "", 0.0, 1, SensorCost(0.0, 0.0, 0.0))

    def ask(self, gpu: GpuRef, at: float) -> None:
        self.asked.append(gpu)

    def hardware(self, members: Collection[Member]) -> Hardware:
        placed = {ref(m): gpu(m.slot) for m in members if m.slot < 4 and m.incarnation == 0}
        return Hardware(gpus=tuple(gpu(n) for n in range(4)), placed=placed, host=HOST, advise=advise)

    def say(self, of: Subject, what: What, value: str | int | float, severity: Severity = Severity.CRITICAL) -> None:
        self.pending.append(self.scribe.note(of, what, value, severity))
        self.wake()


class Rig:
    """A supervisor in this loop over a scripted executor with real processes."""

    def __init__(self, folder: Path, more: str = RULES, *, record: Path | None = None) -> None:
        self.policy = parse_policy(POLICY + FAST + more, name="p.yaml", base=folder)
        self.clock = SkippingClock()
        self.journal = Journal.open(folder / "journal.db", self.clock)
        self.executors: list[ScriptedExecutor] = []
        self.nvml = GpuWord(self.clock)
        recorder = Recorder(record, self.policy.limits) if record else None
        self.supervisor = Supervisor(
            self.policy, self._make, self.journal, self.clock, machine=self.nvml, recorder=recorder
        )
        self.task: asyncio.Task[None] | None = None

    def _make(self, on_event: Callable[[Event], None]) -> EmbeddedTarget:
        def make(*args: object, **options: object) -> ScriptedExecutor:
            self.executors.append(ScriptedExecutor(self.policy.group(), on_event))
            self.executors[-1].clock = self.clock
            return self.executors[-1]

        return EmbeddedTarget(self.policy.group(), on_event, make)  # type: ignore[arg-type]

    @property
    def executor(self) -> ScriptedExecutor:
        return self.executors[-1]

    async def start(self) -> None:
        self.task = asyncio.create_task(self.supervisor.run())
        await eventually(lambda: self.supervisor.status().state == "ok", "the group is healthy")

    async def rounds(self, count: int) -> None:
        """The supervisor's loop goes round so often, in real time: what it could have done by then it has done."""
        pattern = re.compile(r"^healer_loop_late_seconds_count (\S+)$", re.MULTILINE)

        def gone() -> float:
            found = pattern.search(self.supervisor.metrics.render().decode())
            return float(found[1]) if found else 0.0

        end = gone() + count
        await eventually(lambda: gone() >= end, f"{count} rounds of the loop")

    def lateness(self) -> int:
        """How often the daemon has noticed that it was late itself, and written that down."""
        found = self.journal.recent(Kind.EVIDENCE, 1000)
        return sum(entry.body["what"] == What.TELEMETRY_LOST for entry in found)

    def losses(self) -> list[tuple[str, tuple[int, ...], str]]:
        return [call for call in self.executor.calls if call[0] != "scale"]

    def incidents(self) -> list[IncidentSummary]:
        return summarise(self.journal.incidents(limit=50))

    async def healed(self, count: int = 1) -> None:
        await eventually(
            lambda: len(self.incidents()) == count and self.supervisor.status().state == "ok", "the group is healed"
        )

    def kinds(self) -> list[str]:
        (incident,) = self.incidents()
        return [entry.kind for entry in self.journal.timeline(incident.id)]

    async def end(self) -> None:
        self.supervisor.end(stop=False, who="test")
        if self.task is not None:
            with contextlib.suppress(ElasticError):
                await asyncio.wait_for(self.task, 30)
        self.executor.end()
        self.journal.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    found = Rig(tmp_path)
    try:
        await found.start()
        yield found
    finally:
        await found.end()
