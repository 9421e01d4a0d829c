"""How long a fault of a GPU takes from where the driver says it to a verdict: `python -m chaos.sensor_bench`.

The supervisor, the probe process with NVIDIA's bindings, and the kernel-log reader are real; what stands for the library and
for /dev/kmsg is not, so the driver's own share (146 and 126 ms for XID 31 on an H200) is not in these figures.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from chaos import fake_nvml
from chaos.bench_report import SensorTimes, quantile
from elastic.controller.records import GroupStatus
from elastic.errors import ElasticError, Infeasible
from healer.clock import SystemClock
from healer.deployment import eventually
from healer.journal import Journal, Kind
from healer.machine import GpuMachine, catalogue
from healer.policy.load import parse_policy
from healer.sensors.kernel_log import KernelLogSensor
from healer.sensors.nvml import NvmlConfig, NvmlSensor
from healer.sensors.nvml.config import EVENT_XID
from healer.supervisor import Supervisor

GPUS = 12
"""A third for each kind of fault: a GPU is judged anew only by a fault that it does not have yet."""
XID = 79
PAUSE_S = 0.3
"""Between two samples, so that each meets the daemon at rest."""
DEADLINE_S = 20.0

_POLICY = """\
apiVersion: healer/v1
kind: Policy
metadata: {name: sensors}
spec:
  target: {kind: embedded, checkpoint: none, runDir: run, ranks: 1, maxRanks: 1, slotsPerRank: 1}
"""


class _NoGroup:
    """A target without ranks: only the machine is watched."""

    async def start(self) -> str:
        return "there is no group"

    def observe(self) -> GroupStatus:
        return GroupStatus("none", 0, (), (), 1, None, "", 0, 0, ())

    def address(self) -> str:
        return ""

    def lose(self, slots: Iterable[int], *, cause: str, detected: float, replace: bool) -> None:
        raise Infeasible("there is no group")

    def scale(self, target: int | Iterable[int], *, reason: str) -> tuple[int, ...]:
        raise Infeasible("there is no group")

    def release(self) -> None: ...

    def probation(self, slots: Collection[int]) -> None: ...

    async def close(self) -> None: ...

    async def stop(self) -> None: ...


async def measure(count: int, say: Callable[[str], None] = lambda text: None) -> SensorTimes:
    """At least `count` faults of each kind. Raises ElasticError where the stand-in cannot be built or a verdict does not
    come."""
    found = SensorTimes()
    while len(found.xid_verdict_s) < count:
        with tempfile.TemporaryDirectory(prefix="sensors-") as folder:
            more = await _machine(Path(folder))
        pairs = zip(msgspec.structs.astuple(found), msgspec.structs.astuple(more), strict=True)
        found = SensorTimes(*((*before, *after) for before, after in pairs))
        say(f"{len(found.xid_verdict_s)} of {count} faults of each kind")
    return found


async def _machine(folder: Path) -> SensorTimes:
    """One daemon, and one fault on each of its GPUs."""
    script = fake_nvml.Script.healthy(folder / "script", GPUS)
    log, clock = folder / "kmsg", SystemClock()
    os.mkfifo(log)
    config = NvmlConfig(
        library_dir=fake_nvml.build(Path(tempfile.gettempdir())), environment=fake_nvml.environment(script.path)
    )
    nvml = NvmlSensor(clock, config)
    machine = GpuMachine(nvml, (KernelLogSensor(clock, path=log, identity=nvml.identity),), catalogue())
    policy = parse_policy(_POLICY, name="bench", base=folder)
    with contextlib.closing(Journal.open(folder / "journal.db", clock)) as journal:
        supervisor = Supervisor(policy, lambda on_event: _NoGroup(), journal, clock, machine=machine)
        running = asyncio.create_task(supervisor.run())
        try:
            await eventually(_when(lambda: nvml.complete), "every GPU is read", DEADLINE_S)
            with log.open("w", buffering=1) as kmsg:
                times = _Times(journal)
                third = GPUS // 3
                kernel = [await times.of(n, functools.partial(_write, kmsg, n)) for n in range(third)]
                xid = [
                    await times.of(n, functools.partial(script.event, n, EVENT_XID, XID))
                    for n in range(third, 2 * third)
                ]
                action = [await times.of(n, functools.partial(script.field, n, 230, 1)) for n in range(2 * third, GPUS)]
                return SensorTimes(tuple(xid), tuple(action), tuple(kernel))
        finally:
            supervisor.end(stop=False, who="bench")
            await running


def _write(kmsg: TextIO, gpu: int) -> None:
    address = fake_nvml.pci_of(gpu).removesuffix(".0")
    text = f"NVRM: Xid (PCI:{address}): {XID}, pid=1, name=bench, GPU has fallen off the bus."
    kmsg.write(f"4,{gpu},{time.monotonic_ns() // 1000},-;{text}\n")


class _Times:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def of(self, gpu: int, fault: Callable[[], None]) -> float:
        """Seconds from the fault to the first verdict on its GPU."""
        await asyncio.sleep(PAUSE_S)
        began = time.monotonic()
        fault()
        name = fake_nvml.uuid_of(gpu)

        async def verdict() -> float | None:
            entries = self._journal.recent(Kind.VERDICT, 50)
            return min((e.monotonic for e in entries if e.body["verdict"]["subject"].get("uuid") == name), default=None)

        return await eventually(verdict, f"a verdict on GPU {gpu}", DEADLINE_S) - began


def _when(check: Callable[[], bool]) -> Callable[[], Awaitable[bool | None]]:
    async def probe() -> bool | None:
        return True if check() else None

    return probe


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 measured; 1 an error, told in one message; 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m chaos.sensor_bench", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--count", type=int, default=20, metavar="N", help="faults of each kind; default: %(default)s")
    given = parser.parse_args(arguments)
    try:
        found = asyncio.run(measure(given.count, lambda text: print(text, file=sys.stderr)))
    except (ElasticError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, values in msgspec.structs.asdict(found).items():
        shown = ", ".join(f"{label} {quantile(values, q) * 1e3:.1f} ms" for label, q in (("p50", 0.5), ("p95", 0.95)))
        print(f"{name}: {shown}, max {max(values) * 1e3:.1f} ms, {len(values)} samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
