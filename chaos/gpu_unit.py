"""Does the GPU runtime of a rank work on this machine, and how fast? One line for each check, with its figures.

    python -m chaos.gpu_unit
    python -m chaos.gpu_unit --only products,copies

Uses one GPU and no group. Ends with exit code 1 if a check fails or cannot run.
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from chaos.gpu_check import Bench, Line, kernels_of
from chaos.gpu_kernels import layers, products
from elastic.config import GroupConfig, default_capture_sizes
from elastic.errors import ElasticError
from elastic.lifeline import Lifeline, watch
from elastic.placement.maps import HOLE, Move, Placement
from elastic.protocol import Sampling, Submit
from elastic.rank.architecture import Arena, ExpertBuffers, read_architecture
from elastic.rank.arithmetic import open_arithmetic
from elastic.rank.buffers import Buffers
from elastic.rank.checkpoint import Checkpoint
from elastic.rank.comm.factory import open_backend
from elastic.rank.comm.nixl_ep import NixlEpBackend
from elastic.rank.copies import Copier
from elastic.rank.device import Device, open_device
from elastic.rank.fatal import DEVICE_ERROR_EXIT, end_if_fatal
from elastic.rank.runner import Runner
from elastic.rank.scheduler import Scheduler
from elastic.rank.tier import HostTier, build
from elastic.rank.weights import pieces_of
from elastic.tools.make_checkpoint import Options, make_checkpoint

MODEL = Options(
    layers=16, experts=8, hidden=2048, heads=16, kv_heads=4, head_dim=64, expert_intermediate=128, vocab=1024
)
KILLS = 20
COPY_SHARE = 0.7
"""Of the bandwidth of one large copy from pinned memory, wanted for weights from the host tier."""
LIFELINE_S = 0.010
"""From SIGKILL to the news, wanted at the 95th percentile, for a process that keeps its GPU busy."""


def step(bench: Bench) -> Iterator[Line]:
    """A whole rank with every peer masked: early release, captures, and the same bits whatever shares a step."""
    config, device = bench.config, bench.device
    arch = read_architecture(config.checkpoint)
    ep, _ = open_backend(
        "nixl-ep",
        rank=0,
        capacity=config.max_ranks,
        experts_per_rank=config.slots_per_rank,
        max_tokens=config.max_tokens,
        hidden=arch.hidden,
        top_k=arch.top_k,
        timeout_s=config.ep_timeout_s,
        group=config.name,
        device=device,
    )
    assert isinstance(ep, NixlEpBackend)
    yield Line("early release", ep.releases_early, "signal words found" if ep.releases_early else "words not found")
    arena, experts = Arena(arch.dense_shapes(), device), ExpertBuffers(arch, config.slots_per_rank, device)
    source = Checkpoint(config.checkpoint, arch)
    source.load_dense(arena)
    for layer in range(len(arch.moe_layers)):
        for expert in range(arch.experts):
            source.load_expert(layer, expert, experts.w13[layer, expert], experts.w2[layer, expert])
    free = torch.cuda.mem_get_info(device.place)[0]
    runner = Runner(config, arch, arena, experts, ep, Buffers(), device)
    began = time.monotonic()
    runner.capture()
    torch.cuda.synchronize()
    seconds, taken = time.monotonic() - began, free - torch.cuda.mem_get_info(device.place)[0]
    sizes = config.capture_sizes
    yield Line(
        "captures",
        runner.graphs.captures == len(sizes),
        f"{runner.graphs.captures} sizes {list(sizes)} in {seconds:.2f} s, {taken / 2**20:.0f} MiB",
    )
    row = (*range(arch.experts), *(HOLE,) * (config.slots_per_rank * config.max_ranks - arch.experts))
    rows = (row,) * len(arch.moe_layers)
    runner.stage_placement(Placement(arch.experts, config.max_ranks, config.slots_per_rank, rows), [0])
    runner.switch_placement()
    draw = random.Random(0)
    requests = [
        Submit(
            request=str(i),
            attempt=0,
            tokens=tuple(draw.randrange(arch.vocab) for _ in range(3 + 5 * i)),
            prompt_len=3 + 5 * i,
            max_tokens=24,
            sampling=Sampling(),
            stop_ids=(),
        )
        for i in range(8)
    ]
    together, took = _serve(bench, runner, ep, requests)
    worst, wrong = 0.0, 0
    for request in requests:
        alone, _ = _serve(bench, runner, ep, [request])
        for one, other in zip(alone[request.request], together[request.request], strict=True):
            worst = max(worst, float((one - other).abs().max()))
            wrong += int(one.argmax() != other.argmax())
    yield Line(
        "same bits in any batch",
        worst == 0.0 and wrong == 0,
        f"logits of 8 requests alone and together differ by at most {worst:.3g}, {wrong} tokens differ",
    )
    moved = runner.graphs.address_changes
    arithmetic = open_arithmetic(device, arch).name
    text = f"{arithmetic}, median {1e3 * took:.2f} ms with {len(requests)} requests, {1e6 * took / arch.layers:.1f} us a layer"
    counted = _count(runner, ep, runner.graphs.fit(len(requests)), arch.layers)
    yield Line("steps", moved == 0, f"{text}; {counted}; {moved} address changes")
    ep.close()


def _count(runner: Runner, ep: NixlEpBackend, size: int, layers: int) -> str:
    try:
        ep.begin_step()
        count = kernels_of(lambda: runner.graphs.replay(size))
        ep.end_step()
    except RuntimeError as error:
        return f"kernels not counted: {error}"
    return f"{count} kernels in the graph of {size} rows, {count / layers:.1f} a layer"


def _serve(
    bench: Bench, runner: Runner, ep: NixlEpBackend, requests: list[Submit]
) -> tuple[dict[str, list[torch.Tensor]], float]:
    """Logits by request and token, and the median seconds of a step."""
    config = bench.config
    scheduler = Scheduler(config.max_tokens, config.max_seqs, config.max_model_len, runner.vocab)
    for request in requests:
        scheduler.submit(request)
    logits: dict[str, list[torch.Tensor]] = {request.request: [] for request in requests}
    took: list[float] = []
    while scheduler.has_work:
        batch = scheduler.build()
        began = time.monotonic()
        ep.begin_step()
        runner.run(batch)
        ep.end_step()
        took.append(time.monotonic() - began)
        for sample, each in zip(batch.samples, runner.logits(batch), strict=True):
            logits[sample.request].append(each)
        scheduler.commit(batch, runner.choose(batch))
    return logits, statistics.median(took)


def copies(bench: Bench) -> Iterator[Line]:
    """Weights from the host tier beside one large copy from pinned memory: the ceiling."""
    device, arch = bench.device, read_architecture(bench.config.checkpoint)
    path = Path("/dev/shm") / f"gpu-unit-{bench.work.name}"
    try:
        build(bench.config.checkpoint, path, device.dtype)
        tier = HostTier.map(path, arch, device.dtype)
        experts = ExpertBuffers(arch, arch.experts, device)
        copier = Copier(device.place)
        places = [(layer, e) for layer in range(len(arch.moe_layers)) for e in range(arch.experts)]
        moves = [Move(layer, e, 0, e) for layer, e in places]
        size = len(places) * arch.expert_weights * device.dtype.itemsize

        def rate() -> float:
            best = 0.0
            for _ in range(5):
                began = time.monotonic()
                source = tier.experts()
                copier.run(pieces_of(source, experts, moves))
                best = max(best, size / (time.monotonic() - began) / 1e9)
            return best

        ceiling, pageable = host_to_gpu(device), rate()
        began = time.monotonic()
        tier.pin(device)
        pinned = tier.wait_pinned(60.0)
        seconds, rated = time.monotonic() - began, rate()
        w13, w2 = tier.expert(*places[-1])
        same = torch.equal(experts.w13[places[-1]].cpu(), w13) and torch.equal(experts.w2[places[-1]].cpu(), w2)
        yield Line(
            "host tier",
            pinned and same and rated >= COPY_SHARE * ceiling,
            f"{'pinned' if pinned else 'NOT PINNED'} {path.stat().st_size / 2**30:.2f} GiB in {seconds:.3f} s; "
            f"{2 * len(places)} tensors, {size / 1e6:.0f} MB: {rated:.1f} GB/s, {100 * rated / ceiling:.0f}% of the "
            f"ceiling {ceiling:.1f} GB/s; pageable {pageable:.1f} GB/s; bytes {'equal' if same else 'DIFFER'}",
        )
    finally:
        path.unlink(missing_ok=True)


def host_to_gpu(device: Device, size: int = 256 << 20) -> float:
    """GB/s of one large copy from pinned memory, the best of ten."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    to = torch.empty(size, dtype=torch.uint8, device=device.place)
    best = 0.0
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        to.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        best = max(best, size / (1e-3 * float(begin.elapsed_time(end))) / 1e9)
    return best


def deaths(bench: Bench) -> Iterator[Line]:
    """How soon a SIGKILL of a process with a busy GPU is seen by its lifeline."""
    seen: list[float] = []
    for _ in range(KILLS):
        child, died = _child("busy"), threading.Event()
        try:
            path = _word(child)
            at: list[float] = []

            def note(at: list[float] = at, died: threading.Event = died) -> None:
                at.append(time.monotonic())
                died.set()

            if not watch(path, note):
                yield Line("lifeline", False, f"{path} cannot be watched")
                return
            time.sleep(0.3 + 0.01 * random.random())
            killed = time.monotonic()
            child.kill()
            died.wait(10.0)
            seen.append(1e3 * (at[0] - killed) if at else 1e4)
        finally:
            child.kill()
            child.wait()
    seen.sort()
    p95 = seen[int(0.95 * (len(seen) - 1))]
    text = f"{KILLS} kills: median {statistics.median(seen):.2f} ms, p95 {p95:.2f} ms, longest {seen[-1]:.2f} ms"
    yield Line("lifeline", p95 <= 1e3 * LIFELINE_S, text)


def errors(bench: Bench) -> Iterator[Line]:
    """A process whose device fails says so and is gone."""
    child, died, began = _child("broken"), threading.Event(), 0.0
    path = _word(child)
    watched = watch(path, died.set)
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    began = time.monotonic()
    seen = watched and died.wait(60.0)
    took = time.monotonic() - began
    rest = child.communicate(timeout=60.0)[0]
    words = rest.strip().splitlines()[-1] if rest.strip() else "nothing"
    ok = seen and child.returncode == DEVICE_ERROR_EXIT and words.startswith("error: ")
    yield Line("device error", ok, f"exit code {child.returncode}, seen {1e3 * took:.0f} ms after it began; {words!r}")


def _child(what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "chaos.gpu_unit", "--child", what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _word(child: subprocess.Popen[str]) -> str:
    """The path that the child prints; what comes before it is a library's."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("/proc/"):
            return line.strip()
    raise ElasticError("the child process ended without a word")


def busy() -> None:
    """Replay a graph for ever, as a rank does."""
    a = torch.randn(4096, 4096, device="cuda")
    a @ a
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            a @ a
    print(Lifeline().path, flush=True)
    while True:
        graph.replay()
        torch.cuda.synchronize()


def broken() -> None:
    zeros = torch.zeros(4, device="cuda")
    print(Lifeline().path, flush=True)
    sys.stdin.readline()
    try:
        zeros[torch.tensor([1 << 20], device="cuda")].sum()
        torch.cuda.synchronize()
    except Exception as error:
        end_if_fatal(error, "an index out of bounds")
        raise


CHECKS: dict[str, Callable[[Bench], Iterator[Line]]] = {
    "products": products,
    "layers": layers,
    "step": step,
    "copies": copies,
    "deaths": deaths,
    "errors": errors,
}


def run(names: list[str], work: Path, max_tokens: int) -> bool:
    config = GroupConfig(
        name="gpu-unit",
        run_dir=str(work),
        checkpoint=str(work / "model"),
        ranks=1,
        max_ranks=2,
        slots_per_rank=MODEL.experts,
        ep_backend="nixl-ep",
        max_tokens=max_tokens,
        capture_sizes=default_capture_sizes(max_tokens),
    )
    bench = Bench(config, open_device(config, 0), work)
    if {"step", "copies"} & set(names):
        make_checkpoint(config.checkpoint, replace(MODEL, seed=1))
    print(f"     {torch.cuda.get_device_name(bench.device.place)}, torch {torch.__version__}", flush=True)
    well = True
    for name in names:
        try:
            with torch.inference_mode():
                for line in CHECKS[name](bench):
                    print(line, flush=True)
                    well &= line.ok
        except Exception as error:
            traceback.print_exc()
            print(Line(name, False, f"{type(error).__name__}: {error}"), flush=True)
            well = False
    return well


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.gpu_unit")
    parser.add_argument("--only", default=",".join(CHECKS), help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--max-tokens", type=int, default=32, help="the dispatch limit; its default sizes are captured")
    parser.add_argument("--child", choices=["busy", "broken"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        {"busy": busy, "broken": broken}[options.child]()
        return 0
    names = [name for name in options.only.split(",") if name]
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"unknown checks {', '.join(unknown)}, expected {', '.join(CHECKS)}")
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-unit-") as work:
            return 0 if run(names, Path(work), options.max_tokens) else 1
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
