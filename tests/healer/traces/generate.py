"""Writes the scenario traces of this folder: `python -m tests.healer.traces.generate`. Times and orders are those of
docs/diagnosis.md: what is known of real faults, on a clock that is not the wall's."""

from collections.abc import Callable
from pathlib import Path

from healer.evidence import Severity, What
from tests.healer.stage import HOST, Stage, unnamed

FOLDER = Path(__file__).parent
INFO, WARNING, CRITICAL = Severity.INFO, Severity.WARNING, Severity.CRITICAL
OTHERS = {slot: tuple(peer for peer in range(4) if peer != slot) for slot in range(4)}


def xid_79_cascade() -> Stage:
    s = Stage(gpus=5, note="GPU 1 falls off the bus; its readings go blank, its rank dies, the peers mask it")
    s.run(2.0)
    s.say("kernel-log", unnamed(1), What.XID, 79, detail="NVRM: Xid (PCI:0000:2b:00): 79, GPU has fallen off the bus.")
    s.clock.now += 0.02
    s.say("nvml", s.gpus[1], What.GPU_LOST, 15, CRITICAL)
    s.clock.now += 0.05
    s.say("nvml", s.gpus[1], What.SENSOR_SILENT, 2.0, detail="ECC counters are blank")
    s.clock.now += 0.3
    s.dies(1)
    for slot in (0, 2, 3):
        s.say("liveness", s.rank(1), What.PEER_FAULT, "disconnect/ep", by=slot)
    s.clock.now += 0.01
    s.leaves(1)
    s.run(3.0)
    s.joins(1, on=4)
    s.run(2.0)
    return s


def xid_31() -> Stage:
    s = Stage(note="rank 2 writes to an illegal address: the process is gone 126 ms before the XID is known")
    s.run(2.0)
    s.dies(2)
    s.clock.now += 0.004
    s.leaves(2)
    s.clock.now += 0.122
    text = "NVRM: Xid (PCI:0000:3b:00): 31, pid=102, name=python, MMU Fault: ENGINE GRAPHICS faulted @ 0x0"
    s.say("kernel-log", unnamed(2), What.XID, 31, detail=text)
    s.clock.now += 0.02
    s.say("nvml", s.gpus[2], What.XID, 31, detail="NVML event")
    s.run(3.0)
    s.joins(2, on=2)
    s.run(60.0)
    return s


def sigkill() -> Stage:
    s = Stage(note="rank 0 is killed: no NVML event and no XID follow")
    s.run(2.0)
    s.dies(0, what=What.LIFELINE_CUT)
    s.clock.now += 0.001
    s.dies(0)
    for slot in (1, 2, 3):
        s.say("liveness", s.rank(0), What.PEER_FAULT, "disconnect/ep", by=slot)
    s.leaves(0)
    s.run(12.0)
    s.joins(0, on=0)
    s.run(2.0)
    return s


def ecc_storm() -> Stage:
    s = Stage(gpus=5, note="corrected errors by the thousand for a minute, then one that cannot be corrected")
    s.run(2.0)
    s.say("nvml", s.gpus[3], What.ECC_CORRECTABLE, 17657.0, detail="ecc_cor_volatile_dram +35314")
    s.run(60.0)
    s.say("nvml", s.gpus[3], What.ECC_UNCORRECTABLE, 1, CRITICAL, detail="dram")
    s.clock.now += 0.1
    s.say("kernel-log", unnamed(3), What.XID, 48, detail="NVRM: Xid (PCI:0000:4b:00): 48, DBE")
    s.clock.now += 0.05
    s.say("nvml", s.gpus[3], What.RECOVERY_ACTION, 1, CRITICAL)
    s.leaves(3)
    s.run(3.0)
    s.joins(3, on=4)
    return s


def remap_pending() -> Stage:
    s = Stage(note="a row is to be remapped at the next reset: nothing to be done now")
    s.run(2.0)
    s.say("kernel-log", unnamed(0), What.XID, 63, INFO, detail="NVRM: Xid (PCI:0000:1b:00): 63, Row Remapper: pending")
    s.say("nvml", s.gpus[0], What.REMAP_PENDING, 1)
    s.run(30.0)
    return s


def nvml_hang() -> Stage:
    s = Stage(note="an NVML call does not return for a minute; the ranks serve on")
    s.run(2.0)
    for one in s.gpus:
        s.say("nvml", one, What.SENSOR_SILENT, 2.0)
    s.run(60.0)
    for one in s.gpus:
        s.say("nvml", one, What.SENSOR_BACK, 62.0, INFO)
    s.run(10.0)
    return s


def driver_upgrade() -> Stage:
    s = Stage(
        note="an unattended upgrade: library and driver differ (code 18); what is read before and after is no fault"
    )
    s.run(2.0)
    s.say("nvml", HOST, What.SENSOR_BLIND, "driver and library differ (code 18)")
    for one in s.gpus:
        s.say("nvml", one, What.SENSOR_SILENT, 2.0)
    s.run(2.0)
    for number in range(4):
        s.say("kernel-log", unnamed(number), What.XID, 119, detail="Timeout waiting for RPC from GSP")
    s.run(120.0)
    s.say("nvml", HOST, What.SENSOR_BACK, 124.0, INFO)
    s.say("nvml", s.gpus[0], What.GPU_LOST, 999, CRITICAL)
    for one in s.gpus:
        s.say("nvml", one, What.SENSOR_BACK, 124.0, INFO)
        s.say("nvml", one, What.RECOVERY_ACTION, 0, INFO)
    s.run(1.0)
    s.say("nvml", s.gpus[0], What.GPU_BACK, 1.0, INFO)
    s.run(90.0)
    return s


def clock_jump() -> Stage:
    s = Stage(note="the wall clock jumps ten hours ahead, and back")
    s.run(2.0)
    for jump in (36000.0, -36000.0):
        s.clock.wall_offset += jump
        s.say("clock", HOST, What.CLOCK_JUMP, jump, INFO)
        s.run(30.0)
    return s


def telemetry_outage() -> Stage:
    s = Stage(note="the daemon's machine stands still for eight seconds, so it hears nobody")
    s.run(2.0)
    s.late(8.0)
    s.run(5.0)
    return s


def partition() -> Stage:
    s = Stage(note="slots 0 and 1 do not hear 2 and 3 any more, and the other way round; all beat")
    s.run(2.0)
    s.run(14.0, {0: (2, 3), 1: (2, 3), 2: (0, 1), 3: (0, 1)}, stand=True)
    s.run(2.0)
    return s


def straggler() -> Stage:
    s = Stage(note="rank 2 is late round after round")
    s.run(2.0)
    for ratio in (5.5, 6.25, 6.0):
        s.say("stragglers", s.rank(2), What.STRAGGLES, ratio, detail="the others wait for it 55% of the time")
        s.run(20.0)
    s.say("stragglers", s.rank(2), What.KEEPS_UP, 1.1, INFO)
    s.run(2.0)
    return s


def two_equal_xids() -> Stage:
    s = Stage(note="the same XID twice, told by both ways it comes; no process minds")
    s.run(2.0)
    for _ in range(2):
        s.say("kernel-log", unnamed(1), What.XID, 13, detail="NVRM: Xid (PCI:0000:2b:00): 13, Graphics Exception")
        s.clock.now += 0.02
        s.say("nvml", s.gpus[1], What.XID, 13, detail="NVML event")
        s.run(5.0)
    s.run(60.0)
    return s


def fabric_failure() -> Stage:
    s = Stage(note="the fabric manager fails: every GPU of the host has the same complaint")
    s.run(2.0)
    for one in s.gpus:
        s.say("nvml", one, What.FABRIC_FAILED, "unhealthy", detail="health mask 0x5")
        s.say("nvml", one, What.NVLINK_DOWN, 18, detail="0 are active")
        s.clock.now += 0.01
    s.run(20.0)
    for one in s.gpus:
        s.say("nvml", one, What.FABRIC_FAILED, "", INFO)
        s.say("nvml", one, What.NVLINK_DOWN, 0, INFO)
    s.run(2.0)
    return s


def thermal_throttle() -> Stage:
    s = Stage(note="a GPU at its slowdown temperature for two minutes")
    s.run(2.0)
    s.say("nvml", s.gpus[2], What.HOT, 90, detail="slows down at 90 degrees Celsius")
    s.say("nvml", s.gpus[2], What.THROTTLED, "hw-slowdown,hw-thermal")
    s.run(120.0)
    s.say("nvml", s.gpus[2], What.THROTTLED, "", INFO)
    s.say("nvml", s.gpus[2], What.HOT, 82, INFO)
    s.run(2.0)
    return s


def lost_gpu_renumbered() -> Stage:
    s = Stage(gpus=5, note="GPU 1 is lost and the numbers of the others close up: the ranks keep their GPUs")
    s.run(2.0)
    s.say("nvml", s.gpus[1], What.GPU_LOST, 28, CRITICAL, detail="NVML does not list it")
    s.clock.now += 0.005
    s.leaves(1)
    s.run(1.0)
    s.say("nvml", s.gpus[2], What.THROTTLED, "power-brake")
    s.run(5.0)
    s.joins(1, on=4)
    s.run(2.0)
    return s


def pcie_degradation() -> Stage:
    s = Stage(note="the link of a GPU trains at half its width, with corrected errors in the kernel log")
    s.run(2.0)
    s.say("kernel-log", unnamed(3), What.PCIE_AER, "corrected", detail="AER: Corrected error received: 0000:4b:00.0")
    s.say("nvml", s.gpus[3], What.PCIE_DEGRADED, "8/16")
    s.say("nvml", s.gpus[3], What.PCIE_REPLAYS, 0.8)
    s.run(60.0)
    return s


def oom_neighbour() -> Stage:
    s = Stage(note="another process takes the memory; the kernel kills a rank for want of it")
    s.run(2.0)
    s.say("nvml", s.gpus[2], What.FOREIGN_PROCESS, 4711)
    s.say("processes", s.rank(2), What.MEMORY_GROWS, 210e6)
    s.run(10.0)
    s.dies(2)
    s.clock.now += 0.003
    s.leaves(2)
    s.run(3.0)
    s.joins(2, on=2)
    s.run(2.0)
    return s


def stopped_rank() -> Stage:
    s = Stage(note="SIGSTOP to rank 3 of a group that waits for it")
    s.run(2.0)
    s.run(1.0, dict.fromkeys(range(3), (3,)), mute=(3,), stand=True)
    s.say("processes", s.rank(3), What.PROCESS_STATE, "T")
    s.run(0.2, dict.fromkeys(range(3), (3,)), mute=(3,), stand=True)
    s.leaves(3)
    s.run(3.0)
    s.joins(3, on=3)
    return s


def stuck_rank() -> Stage:
    s = Stage(note="the main thread of rank 0 hangs; its agent beats on")
    s.run(2.0)
    s.run(11.0, dict.fromkeys(range(1, 4), (0,)), stand=True)
    s.leaves(0)
    s.run(3.0)
    s.joins(0, on=0)
    return s


def honest_stall() -> Stage:
    s = Stage(note="rank 1 computes for 1.4 s while the others wait; then all goes on")
    s.run(2.0)
    s.run(1.4, {0: (1,), 2: (1,), 3: (1,)}, stand=True)
    s.run(3.0)
    return s


def lost_completion() -> Stage:
    s = Stage(note="one word from rank 3 to rank 0 is lost: both wait for each other, the others wait for rank 0")
    s.run(2.0)
    s.run(0.1, {0: (3,), 3: (0,)}, stand=True)
    s.run(2.0, {0: (3,), 3: (0,), 1: (0,), 2: (0,)}, stand=True)
    s.run(3.0)
    return s


def host_cut_off() -> Stage:
    s = Stage(note="rank 3 and the other three do not hear each other any more; all beat")
    s.run(2.0)
    s.run(11.0, OTHERS | dict.fromkeys(range(3), (3,)), stand=True)
    s.leaves(3)
    s.run(3.0)
    s.joins(3, on=3)
    return s


def cut_off_within_a_step() -> Stage:
    s = Stage(
        note="rank 2 is cut off while words are under way: some wait for it, some for those who wait; then one masks it"
    )
    s.run(2.0)
    s.run(30.0, {0: (1,), 1: (2,), 2: (0, 1), 3: (1,)}, stand=True)
    s.say("liveness", s.rank(2), What.PEER_FAULT, "timeout/ep", by=1)
    s.run(0.2, {0: (1,), 2: (0, 1), 3: (1,)}, stand=True)
    s.run(3.0)
    return s


SCENARIOS: tuple[Callable[[], Stage], ...] = (
    xid_79_cascade, xid_31, sigkill, ecc_storm, remap_pending, nvml_hang, driver_upgrade, clock_jump, telemetry_outage,
    partition, straggler, two_equal_xids, fabric_failure, thermal_throttle, lost_gpu_renumbered, pcie_degradation,
    oom_neighbour, stopped_rank, stuck_rank, honest_stall, lost_completion, host_cut_off, cut_off_within_a_step,
)  # fmt: skip


def path_of(scenario: Callable[[], Stage]) -> Path:
    return FOLDER / f"{scenario.__name__.replace('_', '-')}.jsonl"


if __name__ == "__main__":
    for scenario in SCENARIOS:
        scenario().write(path_of(scenario))
