"""Latency of one dispatch and combine, by transport and number of ranks: `python -m elastic.rank.comm.bench --json`.

Every rank is a process of its own and does nothing but dispatch and combine, so with more ranks than cores the latency
contains the time that a rank waits for a core. `cpu_ms` is the processor time of one rank for a pair, all its threads
together; `release_ms` the time from `release` in another thread to the return of the dispatch that was waiting.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, get_args

import torch

from elastic.config import EpBackendName
from elastic.errors import Retryable
from elastic.rank.comm.base import EpBackend
from elastic.rank.comm.factory import open_backend

EXPERTS, HIDDEN, TOP_K = 16, 64, 2
ANSWER_S = 120.0
TIMEOUT_S = 30.0


class Case(NamedTuple):
    transport: EpBackendName
    ranks: int
    rows: int
    pairs: int
    warm_up: int
    seed: int


def _rank(case: Case, rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    ep, _ = open_backend(
        case.transport,
        rank=rank,
        capacity=case.ranks,
        experts_per_rank=EXPERTS // case.ranks,
        max_tokens=case.rows,
        hidden=HIDDEN,
        top_k=TOP_K,
        timeout_s=TIMEOUT_S,
        group=f"bench{os.getppid()}",
    )
    pipe.send(ep.endpoint())
    ep.connect(pipe.recv(), deadline_s=TIMEOUT_S)
    ep.clean(1)
    ep.take_over(range(case.ranks), 1)
    pipe.send(None)
    pipe.recv()

    random = torch.Generator().manual_seed(case.seed + rank)
    x = torch.randn(case.rows, HIDDEN, generator=random)
    idx = torch.rand(case.rows, EXPERTS, generator=random).argsort(1)[:, :TOP_K].contiguous()
    weights, out = torch.rand(case.rows, TOP_K, generator=random), torch.empty(case.rows, HIDDEN)
    taken: list[float] = []
    cpu = 0.0
    for pair in range(case.warm_up + case.pairs):
        if pair == case.warm_up:
            cpu = time.process_time()
        start = time.perf_counter()
        ep.combine(ep.dispatch(x, idx).x, idx, weights, out)
        taken.append(time.perf_counter() - start)
    cpu = time.process_time() - cpu
    released = _release(ep, x, idx, case.ranks) if rank == 0 else 0.0
    faults = [f"{fault.what} of rank {fault.peer}" for fault in ep.poll_faults()]
    pipe.send((taken[case.warm_up :], cpu / case.pairs, released, faults))
    pipe.recv()
    # NIXL's own threads may hang at interpreter exit
    os._exit(0)


def _release(ep: EpBackend, x: torch.Tensor, idx: torch.Tensor, ranks: int) -> float:
    """Seconds from `release` in another thread to the return of a dispatch that waits for peers that are not coming."""
    called: list[float] = []

    def release() -> None:
        while not ep.waiting_on():
            time.sleep(0.001)
        time.sleep(0.05)
        called.append(time.perf_counter())
        ep.release(range(ranks))

    thread = threading.Thread(target=release)
    thread.start()
    ep.dispatch(x, idx)
    returned = time.perf_counter()
    thread.join()
    return returned - called[0]


def measure(case: Case) -> dict[str, Any]:
    """Start the ranks, measure, end them. Raises Retryable where a rank does not answer or a peer was masked."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for rank in range(case.ranks):
            here, there = context.Pipe()
            processes.append(context.Process(target=_rank, args=(case, rank, there), daemon=True))
            processes[-1].start()
            there.close()
            pipes.append(here)
        ends = dict(enumerate(_answers(pipes)))
        _tell(pipes, ends)
        _answers(pipes)
        _tell(pipes, None)
        results = _answers(pipes)
        _tell(pipes, None)
    finally:
        for process in processes:
            process.join(1)
            process.kill()
            process.join()
    if faults := [fault for *_, found in results for fault in found]:
        raise Retryable(f"{case.transport}, {case.ranks} ranks: not a clean run: {', '.join(faults)}")
    taken = sorted(1e3 * t for times, *_ in results for t in times)
    return {
        "transport": case.transport,
        "ranks": case.ranks,
        "rows_per_rank": case.rows,
        "pairs": case.pairs,
        "p50_ms": round(statistics.median(taken), 3),
        "p95_ms": round(taken[int(0.95 * (len(taken) - 1))], 3),
        "max_ms": round(taken[-1], 3),
        "cpu_ms": round(1e3 * statistics.fmean(cpu for _, cpu, *_ in results), 3),
        "release_ms": round(1e3 * results[0][2], 3),
    }


def _answers(pipes: list[Connection]) -> list[Any]:
    answers: list[Any] = []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(ANSWER_S):
            raise Retryable(f"rank {rank} of the benchmark did not answer within {ANSWER_S:g} s")
        try:
            answers.append(pipe.recv())
        except EOFError:
            raise Retryable(f"rank {rank} of the benchmark ended early; its error is above") from None
    return answers


def _tell(pipes: list[Connection], what: Any) -> None:
    for pipe in pipes:
        pipe.send(what)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--transports", default="shm,nixl")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rows", type=int, default=32, help="rows of each rank")
    parser.add_argument("--pairs", type=int, default=300, help="pairs of calls that are measured")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    transports, ranks = args.transports.split(","), [int(n) for n in args.ranks.split(",")]
    if unknown := set(transports) - set(get_args(EpBackendName)):
        parser.error(f"--transports: {', '.join(sorted(unknown))} is none of {', '.join(get_args(EpBackendName))}")
    if uneven := [n for n in ranks if n < 1 or EXPERTS % n]:
        parser.error(f"--ranks: {uneven[0]} does not divide the {EXPERTS} experts")
    results = [
        measure(Case(transport, count, args.rows, args.pairs, max(10, args.pairs // 10), args.seed))
        for transport in transports
        for count in ranks
    ]
    if args.json:
        machine = {"cpu": _cpu(), "cores": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()[0]}
        versions = {"python": platform.python_version()} | {p: _version(p) for p in ("torch", "numpy", "nixl")}
        shape = {"experts": EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "dtype": "float32"}
        print(
            json.dumps(
                {"machine": machine, "versions": versions, "seed": args.seed, "shape": shape, "results": results}
            )
        )
        return
    columns = ("p50_ms", "p95_ms", "max_ms", "cpu_ms", "release_ms")
    print(f"{'transport':<10}{'ranks':>6}" + "".join(f"{c:>12}" for c in columns))
    for r in results:
        print(f"{r['transport']:<10}{r['ranks']:>6}" + "".join(f"{r[c]:>12}" for c in columns))


def _cpu() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
