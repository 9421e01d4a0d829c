"""A day of 64 GPUs that are well, with the noise that healthy machines make: nobody is ever condemned."""

import heapq
import itertools
import random

from healer.diagnosis import Health
from healer.diagnosis.hardware import Hardware
from healer.evidence import Evidence, GpuRef, Severity, Subject, What
from healer.judge import Judge
from healer.sensors import Scribe
from tests.healer.stage import HOST, StageClock, advise
from tests.healer.support import LIMITS, rank

_Later = tuple[str, Subject, What, str | int | float]
DAY_S, RANKS = 86400.0, 64
INFO, WARNING = Severity.INFO, Severity.WARNING
PER_DAY = {
    "throttle": 300, "ecc": 120, "slow call": 200, "lost sample": 80, "silence": 400, "wait": 600, "late": 20, "nvlink": 60,
    "pcie": 40, "app xid": 12, "echo xid": 12, "clock": 4, "straggler": 30, "remap": 3, "daemon blind": 2,
}  # fmt: skip
"""Events of each kind a day, over all GPUs: far more than are seen on healthy machines."""


class Noise:
    """One event and, later, what takes it back; as the sensors tell it."""

    def __init__(self, clock: StageClock, draw: random.Random) -> None:
        self.ranks = tuple(rank(s) for s in range(RANKS))
        self.gpus = tuple(GpuRef(f"GPU-{n:08x}", f"{n // 8:04x}:{0x10 + n % 8:02x}:00.0") for n in range(RANKS))
        self._clock, self._draw = clock, draw
        self._scribes: dict[str, Scribe] = {}

    def say(
        self,
        source: str,
        of: Subject,
        what: What,
        value: str | int | float = 0,
        severity: Severity = WARNING,
        by: int = -1,
    ) -> Evidence:
        scribe = self._scribes.setdefault(source, Scribe(source, self._clock))
        return scribe.note(of, what, value, severity, reporter=self.ranks[by] if by >= 0 else None)

    def event(self, kind: str) -> tuple[list[Evidence], float, list[_Later]]:
        """What is said now; after how many seconds what takes it back."""
        draw, n = self._draw, self._draw.randrange(RANKS)
        gpu, its, by = self.gpus[n], self.ranks[n], (n + 1) % RANKS
        slow = draw.uniform(2.1, 20.0)
        match kind:
            case "throttle":
                reason = draw.choice(["hw-thermal", "sw-thermal", "power-brake"])
                return (
                    [self.say("nvml", gpu, What.THROTTLED, reason)],
                    draw.uniform(5, 900),
                    [("nvml", gpu, What.THROTTLED, "")],
                )
            case "ecc":
                many = draw.uniform(10, 200)
                return (
                    [self.say("nvml", gpu, What.ECC_CORRECTABLE, many)],
                    60.0,
                    [("nvml", gpu, What.ECC_CORRECTABLE, 0)],
                )
            case "slow call" | "lost sample":
                return [self.say("nvml", gpu, What.SENSOR_SILENT, slow)], slow, [("nvml", gpu, What.SENSOR_BACK, slow)]
            case "silence":
                quiet = draw.uniform(1.0, 6.0)
                return [self.say("heartbeats", its, What.SILENCE, 1.0), self.say("processes", its, What.PROCESS_STATE, "R")], quiet, [
                    ("heartbeats", its, What.BEAT_HEARD, 5)
                ]  # fmt: skip
            case "wait":
                return [self.say("heartbeats", its, What.WAITED_ON, 1.1, by=by)], draw.uniform(0.2, 3.0), [
                    (f"ends {by}", its, What.WAIT_ENDED, 7)
                ]  # fmt: skip
            case "late":
                return [self.say("heartbeats", r, What.TELEMETRY_LOST, 0.4) for r in self.ranks], 0.2, [
                    ("heartbeats", r, What.BEAT_HEARD, 5) for r in self.ranks
                ]  # fmt: skip
            case "nvlink":
                return [self.say("nvml", gpu, What.NVLINK_ERRORS, 3.0)], 30.0, [("nvml", gpu, What.NVLINK_ERRORS, 0)]
            case "pcie":
                return [self.say("kernel-log", GpuRef("", gpu.pci), What.PCIE_AER, "corrected")], 1.0, []
            case "app xid":
                # an application's error that it survives, told by both ways
                code = draw.choice([13, 31, 43, 69])
                both = [
                    self.say("kernel-log", GpuRef("", gpu.pci), What.XID, code),
                    self.say("nvml", gpu, What.XID, code),
                ]
                return both, 1.0, []
            case "echo xid":
                return [self.say("nvml", gpu, What.XID, draw.choice([45, 63, 92]))], 1.0, []
            case "clock":
                return [self.say("clock", HOST, What.CLOCK_JUMP, draw.choice([36000.0, -36000.0]))], 1.0, []
            case "straggler":
                return (
                    [self.say("stragglers", its, What.STRAGGLES, 4.0)],
                    60.0,
                    [("stragglers", its, What.KEEPS_UP, 1.0)],
                )
            case "remap":
                return [self.say("nvml", gpu, What.REMAP_PENDING, 1)], 3600.0, []
            case "daemon blind":
                found = [self.say("nvml", HOST, What.SENSOR_BLIND, "code 18")]
                return found, 120.0, [("nvml", HOST, What.SENSOR_BACK, 120.0)]
        raise AssertionError(kind)


def test_a_day_of_noise_on_64_healthy_gpus_condemns_nobody() -> None:
    clock, draw = StageClock(), random.Random(42)
    noise, court = Noise(clock, draw), Judge(LIMITS)
    placed = dict(zip(noise.ranks, noise.gpus, strict=True))
    court.equip(Hardware(gpus=noise.gpus, placed=placed, host=HOST, advise=advise))
    court.watch(noise.ranks, clock.now)
    court.take([noise.say("heartbeats", r, What.BEAT_HEARD, 1, INFO) for r in noise.ranks])
    court.take([noise.say("nvml", g, What.RECOVERY_ACTION, 0, INFO) for g in noise.gpus])
    began = clock.now
    number = itertools.count()
    plan: list[tuple[float, int, str, list[_Later] | None]] = [
        (began + draw.uniform(0, DAY_S), next(number), kind, None)
        for kind, count in PER_DAY.items()
        for _ in range(count)
    ]
    heapq.heapify(plan)
    warned, unknown, events = set(), set(), 0
    while plan:
        at, _, kind, over = heapq.heappop(plan)
        clock.now = max(clock.now, at)
        if over is None:
            found, after_s, later = noise.event(kind)
            heapq.heappush(plan, (clock.now + after_s, next(number), kind, later))
        else:
            found = []
            for source, subject, what, value in over:
                by = int(source.split()[1]) if source.startswith("ends") else -1
                found.append(noise.say("heartbeats" if by >= 0 else source, subject, what, value, INFO, by))
        court.take(found)
        events += len(found)
        verdicts = court.judge(clock.now).diagnosis.all
        assert [v.sentence for v in verdicts if v.health == Health.UNHEALTHY] == []
        warned |= {v.cause for v in verdicts if v.health == Health.HEALTHY}
        unknown |= {v.cause for v in verdicts if v.health == Health.UNKNOWN}
    assert clock.now - began >= DAY_S * 0.99
    assert events > 3000
    assert len(warned) >= 6, "the noise was seen: it is the rules that hold"
    assert len(unknown) >= 2
