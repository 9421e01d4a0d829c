"""What does the death of a GPU process hold up in others, and how long? Survivors of a kill are sometimes late by tens of
milliseconds; this finds out where, without an executor.

    python -m chaos.gpu_teardown --out teardown.json

Victims with a CUDA context, GPU memory and pinned host memory are killed one after the other on GPU 0. Meanwhile probes,
each a process of its own, do one thing again and again and note each time that took longer than a millisecond:

    timer     sleeps 0.2 ms                                  late: the processor
    system    calls stat on a file                           late: the kernel
    driver    asks the driver how much memory is free        late: the driver's locks
    kernel    launches an empty kernel and waits for it      late: the survivor's GPU
    peer      copies 4 KB from the GPU where the victims are late: the link, or that GPU
    imported  copies 4 KB from memory of the victim's own    the same, through a mapping of what dies

Ways to die: `plain`; `held`, with a copy of each of the victim's descriptors of the driver kept by this process for half a
second; `pinned`, with victims and probes on cores of their own. Without GPUs only `timer` and `system` run. Exit code: 0;
1 an error.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from chaos.machine import machine, versions

WAYS = ("plain", "held", "pinned")
PAUSE_S, WINDOW_S, HELD_S, READY_S = 0.4, 0.15, 0.5, 90.0
NOTED_S = 0.001
VICTIM_GPU, PROBE_GPU = 0, 1
GPU_BYTES, PINNED_BYTES = 8 << 30, 2 << 30
SYS_PIDFD_GETFD = 438


class Late(NamedTuple):
    at: float
    """Monotonic seconds: when it began."""
    took_s: float
    cpu: int
    """The core on which it ended."""


def _cpu() -> int:
    return int(ctypes.CDLL(None).sched_getcpu())


def _victim(pipe: Connection, gpus: int, cores: Sequence[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    if gpus:
        import torch

        device = torch.device("cuda", VICTIM_GPU)
        memory = torch.zeros(GPU_BYTES // 4, dtype=torch.float32, device=device)
        pinned = torch.zeros(PINNED_BYTES // 4, dtype=torch.float32, pin_memory=True)
        shared = torch.ones(1024, dtype=torch.float32, device=device)
        torch.cuda.synchronize(device)
        from torch.multiprocessing.reductions import reduce_tensor

        pipe.send((os.getpid(), reduce_tensor(shared)))  # type: ignore[no-untyped-call]
        while True:
            memory[: 1 << 20].add_(1.0)
            pinned[: 1 << 18].copy_(memory[: 1 << 18])
            torch.cuda.synchronize(device)
    held = bytearray(PINNED_BYTES // 8)
    pipe.send((os.getpid(), None))
    while True:
        held[::4096] = b"x" * len(held[::4096])


def _ask_the_kernel(imported: Any) -> None:
    os.stat("/proc/self/stat")
    time.sleep(0.0002)


def _action(what: str) -> Callable[[Any], None]:
    if what == "timer":
        return lambda imported: time.sleep(0.0002)
    if what == "system":
        return _ask_the_kernel
    import torch

    gpu = torch.device("cuda", PROBE_GPU if torch.cuda.device_count() > 1 else VICTIM_GPU)
    here = torch.zeros(1024, dtype=torch.float32, device=gpu)
    there = torch.zeros(1024, dtype=torch.float32, device=torch.device("cuda", VICTIM_GPU))

    def driver(imported: Any) -> None:
        torch.cuda.mem_get_info(gpu)
        time.sleep(0.0002)

    def kernel(imported: Any) -> None:
        here.add_(1.0)
        torch.cuda.synchronize(gpu)

    def peer(imported: Any) -> None:
        here.copy_(there)
        torch.cuda.synchronize(gpu)

    def mapped(imported: Any) -> None:
        if imported is not None:
            here.copy_(imported)
            torch.cuda.synchronize(gpu)
        else:
            time.sleep(0.0002)

    return {"driver": driver, "kernel": kernel, "peer": peer, "imported": mapped}[what]


def _probe(what: str, pipe: Connection, stop: Event, cores: Sequence[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    action, found, imported = _action(what), list[Late](), None
    for _ in range(20):
        action(None)
    pipe.send("ready")
    while not stop.is_set():
        if pipe.poll():
            # what the next victim shares; what the last one shared is let go, as a survivor does
            said = pipe.recv()
            imported = said[0](*said[1]) if said is not None else None
            pipe.send("taken")
            continue
        began = time.monotonic()
        action(imported)
        took_s = time.monotonic() - began
        if took_s > NOTED_S:
            found.append(Late(began, took_s, _cpu()))
    pipe.send(found)


def _hold(pid: int) -> list[int]:
    """Copies of a process's descriptors of the driver."""
    pidfd, held = os.pidfd_open(pid), []
    libc = ctypes.CDLL(None, use_errno=True)
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            fd = libc.syscall(SYS_PIDFD_GETFD, pidfd, int(name), 0)
            if fd >= 0:
                held.append(fd)
    os.close(pidfd)
    return held


def measure(way: str, kills: int, batch: int, gpus: int) -> dict[str, Any]:
    """One way to die."""
    spawn = multiprocessing.get_context("spawn")
    everyone = sorted(os.sched_getaffinity(0))
    half = len(everyone) // 2 if way == "pinned" and len(everyone) > 3 else 0
    victims_cores, probes_cores = everyone[:half], everyone[half:] if half else []
    names = ["timer", "system"] + (["driver", "kernel", "peer", "imported"] if gpus else [])
    stop, probes = spawn.Event(), {}
    for name in names:
        mine, other = spawn.Pipe()
        process = spawn.Process(target=_probe, args=(name, other, stop, probes_cores), daemon=True)
        process.start()
        probes[name] = (process, mine)
    for _, pipe in probes.values():
        _expect(pipe, "a probe")
    died: list[dict[str, Any]] = []
    while len(died) < kills:
        victims = []
        for _ in range(min(batch, kills - len(died))):
            mine, other = spawn.Pipe()
            process = spawn.Process(target=_victim, args=(other, gpus, victims_cores), daemon=True)
            process.start()
            victims.append((process, mine))
        for process, pipe in victims:
            pid, shared = _expect(pipe, "a victim")
            if "imported" in probes:
                probes["imported"][1].send(shared)
                _expect(probes["imported"][1], "the mapping")
            time.sleep(PAUSE_S)
            held = _hold(pid) if way == "held" else []
            at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            process.join(10.0)
            gone_s = time.monotonic() - at
            time.sleep(HELD_S)
            released = time.monotonic()
            for fd in held:
                os.close(fd)
            closing_s = time.monotonic() - released
            died.append({"at": at, "gone_s": gone_s, "held": len(held), "released": released, "closing_s": closing_s})
            time.sleep(PAUSE_S)
            if "imported" in probes:
                probes["imported"][1].send(None)
                _expect(probes["imported"][1], "the mapping")
    stop.set()
    late = {name: [Late(*one) for one in _expect(pipe, name)] for name, (_, pipe) in probes.items()}
    for process, _ in probes.values():
        process.join(10.0)
    return {"way": way, "died": died, "probes": {name: _judge(found, died) for name, found in late.items()}}


def _expect(pipe: Connection, who: str) -> Any:
    if not pipe.poll(READY_S):
        raise TimeoutError(f"{who} did not answer within {READY_S:g} s")
    return pipe.recv()


def _judge(found: Sequence[Late], died: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def worst(begin: float) -> float:
        inside = [one for one in found if one.at < begin + WINDOW_S and one.at + one.took_s > begin]
        return max((one.took_s for one in inside), default=0.0) * 1000

    after = [worst(one["at"]) for one in died]
    calm = [worst(one["at"] - WINDOW_S - 0.05) for one in died]
    let_go = [worst(one["released"]) for one in died]
    return {
        "after_ms": _spread(after),
        "calm_ms": _spread(calm),
        "after_letting_go_ms": _spread(let_go),
        "each_after_ms": [round(value, 2) for value in after],
        "late": [[round(one.at, 4), round(one.took_s * 1000, 2), one.cpu] for one in found][:400],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 2),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 2),
        "max": round(ordered[-1], 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.gpu_teardown", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--kills", type=int, default=12, help="of each way; default: %(default)s")
    parser.add_argument("--batch", type=int, default=6, help="victims that are ready at a time; default: %(default)s")
    given = parser.parse_args(arguments)
    gpus = _gpus()
    ways = [measure(way, given.kills, given.batch, gpus) for way in given.ways]
    for one in ways:
        gone = _spread([died["gone_s"] * 1000 for died in one["died"]])
        print(f"{one['way']}: gone after p50 {gone['p50']} ms, max {gone['max']} ms")
        for name, probe in one["probes"].items():
            print(
                f"  {name:9} calm {probe['calm_ms']}  after {probe['after_ms']}  let go {probe['after_letting_go_ms']}"
            )
    facts = {"machine": msgspec.to_builtins(machine()), "versions": versions(), "gpus": gpus, "ways": ways}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def _gpus() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    sys.exit(main())
