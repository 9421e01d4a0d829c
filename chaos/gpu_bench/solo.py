"""One rank by itself, all peers masked: what can be measured without a group.

    python -m chaos.gpu_bench.solo recapture|agent|serve|copy RUN_DIR

Reads RUN_DIR/config.json; prints lines of JSON. Weights are left at zero: no time here depends on them.
"""

import argparse
import itertools
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from elastic import process
from elastic.client import random_prompts
from elastic.config import GroupConfig, read_model_shape
from elastic.errors import ElasticError
from elastic.lifeline import Lifeline
from elastic.paths import config_path, read_config, socket_path
from elastic.placement import initial
from elastic.protocol import Cancel, Sampling, Submit
from elastic.rank.agent import Agent
from elastic.rank.boot import Base, Rank, assemble, prepare
from elastic.rank.buffers import Buffers
from elastic.rank.device import open_device
from elastic.rank.runner import Runner
from elastic.view import View

RECAPTURES = 3
STEPS, CPU_STEPS = 400, 60
"""Of a block, with or without the agent."""
BLOCK_DEADLINE_S = 40.0
SKIP = 20
"""Steps at the start of a block that are not counted."""
COPY_BYTES, COPIES = 1 << 30, 8
CPU_COPY_BYTES = 1 << 26


def say(**values: Any) -> None:
    print(msgspec.json.encode(values).decode(), flush=True)


def recapture(config: GroupConfig, base: Base, rank: Rank) -> None:
    """What a design pays that does not keep its graphs: warm up and capture the same sizes again, in a process that has
    done so before. A runner of its own each time, since a pool whose graphs are gone takes no new ones."""
    began = time.monotonic()
    rank.runner.capture()
    first_s = time.monotonic() - began
    took_s = []
    for _ in range(RECAPTURES):
        runner = Runner(config, base.arch, rank.arena, rank.experts, rank.ep, Buffers(), base.device)
        began = time.monotonic()
        runner.capture()
        if base.device.is_gpu:
            torch.cuda.synchronize(base.device.place)
        took_s.append(time.monotonic() - began)
    say(first_s=first_s, recapture_s=took_s, sizes=config.capture_sizes)


def _alone(config: GroupConfig, rank: Rank) -> None:
    """Capture, and take a view of this rank only."""
    shape = read_model_shape(config.checkpoint)
    placement = initial(
        experts=shape.experts,
        layers=shape.moe_layers,
        capacity=config.max_ranks,
        slots_per_rank=config.slots_per_rank,
        live=(0,),
        redundant=0,
    )
    rank.runner.capture()
    rank.engine.take_view(View(1, (0,), placement), 1, rank.ep.mask_generation)
    rank.gate.adopt(0)
    rank.gate.resume()


def _feed(config: GroupConfig, rank: Rank, vocab: int) -> list[str]:
    """As many requests as there is room for; their names."""
    now = time.monotonic_ns()
    names = [f"solo-{now}-{i}" for i in range(config.max_seqs)]
    for name, prompt in zip(names, random_prompts(config.max_seqs, vocab, seed=0), strict=True):
        rank.engine.inbox.append(
            Submit(
                request=name,
                attempt=1,
                tokens=tuple(prompt),
                prompt_len=len(prompt),
                max_tokens=config.max_model_len - len(prompt),
                sampling=Sampling(),
                stop_ids=(),
            )
        )
    rank.board.ring()
    return names


def _agent(config: GroupConfig, rank: Rank, lifeline: str) -> Agent:
    agent = Agent(
        config,
        0,
        1,
        socket_path(config.root, 0, 1),
        lifeline,
        rank.gate,
        rank.engine,
        rank.ep,
        rank.weights,
        rank.membership,
    )
    rank.agents.append(agent)
    return agent


def agent(config: GroupConfig, base: Base, rank: Rank, blocks: int) -> None:
    """Decode steps with and without the agent's thread, in turn; with it a controller is connected, as in a group: it comes
    when a block begins, and hangs up when it is over."""
    _alone(config, rank)
    one = _agent(config, rank, "")
    errors: list[str] = []

    def measure() -> None:
        try:
            for _ in range(blocks):
                for on in (False, True):
                    say(**_block(config, base, rank, one, on))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        rank.gate.leave()

    thread = threading.Thread(target=measure)
    thread.start()
    rank.engine.run()
    thread.join()
    if errors:
        raise ElasticError(errors[0])


def _block(config: GroupConfig, base: Base, rank: Rank, one: Agent, on: bool) -> dict[str, Any]:
    if on:
        one.start()
        say(block="begins")
        _wait(lambda: one.watched, "a controller is connected")
    names = _feed(config, rank, base.arch.vocab)
    began, until = time.monotonic(), rank.gate.round + SKIP + (STEPS if base.device.is_gpu else CPU_STEPS)
    _wait(lambda: rank.gate.round > until, "the block's steps are done", BLOCK_DEADLINE_S)
    steps = rank.engine.steps.since(began)
    if on:
        say(block="is over")
        _wait(lambda: not one.watched, "the controller has hung up")
        one.close()
    rank.engine.inbox.extend(Cancel(request=name, attempt=1) for name in names)
    _wait(lambda: rank.engine.running + rank.engine.waiting == 0, "all requests have ended")
    gaps = [b.end - a.end for a, b in itertools.pairwise(steps)][SKIP:]
    return {
        "agent": on,
        "steps": len(gaps),
        "round_s": statistics.median(gaps),
        "step_s": statistics.median(step.launch_s + step.wait_s for step in steps[SKIP:]),
    }


def serve(config: GroupConfig, base: Base, rank: Rank) -> None:
    """Step until killed."""
    _alone(config, rank)
    lifeline = Lifeline()
    one = _agent(config, rank, lifeline.path)
    one.start()

    def feed() -> None:
        while True:
            if rank.engine.running + rank.engine.waiting == 0:
                _feed(config, rank, base.arch.vocab)
            time.sleep(0.05)

    threading.Thread(target=feed, daemon=True).start()
    pid = os.getpid()
    say(pid=pid, pid_start=process.start_time(pid), lifeline=lifeline.path, address=socket_path(config.root, 0, 1))
    rank.engine.run()


def copy(config: GroupConfig) -> None:
    """The ceiling for loading from host memory: large copies from pinned memory to the GPU (on a CPU: within memory)."""
    device = open_device(config, 0)
    size = COPY_BYTES if device.is_gpu else CPU_COPY_BYTES
    source = torch.ones(size, dtype=torch.uint8, pin_memory=device.is_gpu)
    target = torch.zeros(size, dtype=torch.uint8, device=device.place)
    rates = []
    for _ in range(COPIES):
        began = time.monotonic()
        target.copy_(source, non_blocking=True)
        if device.is_gpu:
            torch.cuda.synchronize(device.place)
        rates.append(size / (time.monotonic() - began))
    # the first sets things up
    say(bytes=size, bytes_per_s=rates[1:])


def _wait(condition: Any, what: str, deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise ElasticError(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos.gpu_bench.solo")
    parser.add_argument("mode", choices=("recapture", "agent", "serve", "copy"))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--blocks", type=int, default=6, help="of `agent`: pairs without and with it")
    options = parser.parse_args()
    try:
        config = read_config(config_path(options.run_dir))
        if options.mode == "copy":
            torch.set_num_threads(1)
            copy(config)
        else:
            base = prepare(config, 0)
            rank = assemble(base, 0, 1)
            if options.mode == "recapture":
                recapture(config, base, rank)
            elif options.mode == "agent":
                agent(config, base, rank, options.blocks)
            else:
                serve(config, base, rank)
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    sys.stdout.flush()
    # as in a rank: threads of NIXL may hang at interpreter exit
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
