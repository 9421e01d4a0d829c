"""Kill ranks of a group on GPUs under traffic, one after the other, and print what each healing took.

    python -m chaos.gpu_kills --layers 58 --ranks 2 --kills 20

Drives the executor directly, with an owner that condemns a rank when its lifeline is cut; the checkpoint is random and kept
in `--work`. Ends with exit code 1 if any answer differs from the fault-free run.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from pathlib import Path

from elastic import process
from elastic.client import Tokens, Traffic, random_prompts
from elastic.config import GroupConfig
from elastic.controller.executor import Executor
from elastic.controller.records import Event, RankGone, SequenceEnded, SequenceReport

VOCAB, REQUESTS, TOKENS = 1024, 16, 64
SETTLE_S = 90.0


async def make_checkpoint(options: argparse.Namespace) -> Path:
    folder = Path(options.work) / f"moe-{options.layers}-{options.experts}"
    if not folder.exists():
        sizes = {"layers": options.layers, "experts": options.experts, "hidden": 2048, "expert-intermediate": 128}
        shape = {"heads": 16, "kv-heads": 4, "head-dim": 64, "vocab": VOCAB}
        arguments = [text for name, value in (sizes | shape).items() for text in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "elastic.tools.make_checkpoint", str(folder), *arguments]
        maker = await asyncio.create_subprocess_exec(*command)
        if await maker.wait():
            raise SystemExit("the checkpoint could not be made")
    return folder


async def run(options: argparse.Namespace) -> bool:
    config = GroupConfig(
        name="gpu",
        run_dir=tempfile.mkdtemp(prefix="gpu-"),
        checkpoint=str(await make_checkpoint(options)),
        ranks=options.ranks,
        max_ranks=options.ranks,
        slots_per_rank=options.slots,
        redundant_experts=options.ranks * options.slots - options.experts,
        ep_backend="nixl-ep",
        prepare_deadline_s=120.0,
    )
    reports: list[SequenceReport] = []
    same = True

    def on_event(event: Event) -> None:
        if isinstance(event, SequenceEnded):
            reports.append(event.report)
        elif isinstance(event, RankGone):
            executor.lose([event.member.slot], cause="death", detected=event.at)

    async def answers(traffic: Traffic) -> list[Tokens]:
        return [a.tokens for a in await traffic.run()]

    executor = Executor(config, on_event)
    try:
        print(await executor.start(), flush=True)
        prompts = random_prompts(REQUESTS, VOCAB, seed=7)
        want = await answers(Traffic(executor.gateway_http, prompts, TOKENS))
        for kill in range(options.kills):
            slot = kill % options.ranks
            traffic = Traffic(executor.gateway_http, prompts, TOKENS)
            running = asyncio.create_task(answers(traffic))
            await traffic.reached(300)
            member = executor.status().slots[slot].member
            assert member is not None
            sent, reports[:] = time.monotonic(), []
            process.send_signal(member.pid, member.pid_start, signal.SIGKILL)
            right = await running == want
            same &= right
            await executor.settled(deadline_s=SETTLE_S)
            show(slot, sent, right, reports)
    finally:
        await executor.stop()
    return same


def show(slot: int, sent: float, right: bool, reports: list[SequenceReport]) -> None:
    loss = next(r for r in reports if r.kind == "loss" and r.slots)
    phases = {p.name: f"{1e3 * p.seconds:.1f}" for p in loss.phases}
    stepped = max(p.end for p in loss.phases)
    pause = max(loss.pause_s.values(), default=0.0)
    print(
        f"slot {slot}: tokens {'equal' if right else 'DIFFER'}; after the kill: seen {1e3 * (loss.began - sent):.1f} ms, "
        f"every survivor stepped {1e3 * (stepped - sent):.1f} ms; pause {1e3 * pause:.1f} ms; phases (ms) {phases}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.gpu_kills")
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8, help="expert slots of a rank")
    parser.add_argument("--ranks", type=int, default=2, help="spread over the visible GPUs")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--work", default=tempfile.gettempdir(), help="where the checkpoint is kept")
    return 0 if asyncio.run(run(parser.parse_args())) else 1


if __name__ == "__main__":
    sys.exit(main())
