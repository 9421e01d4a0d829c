"""Real processes that own weights and do what they are told over a pipe."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from elastic.config import GroupConfig
from elastic.placement.maps import Move
from elastic.rank.architecture import Arena, ExpertBuffers, read_architecture
from elastic.rank.checkpoint import Checkpoint
from elastic.rank.nixl_agent import NixlAgent
from elastic.rank.tier import HostTier
from elastic.rank.weights import Weights

WAIT_S = 60.0
WIDTH = 8


class Rank:
    """The weights of one rank, as the rank process puts them together."""

    def __init__(self, checkpoint: Path, slot: int, incarnation: int = 1, tier: Path | None = None) -> None:
        torch.set_num_threads(1)
        self.arch = read_architecture(checkpoint)
        self.config = GroupConfig(
            name="test", run_dir="/run", checkpoint=str(checkpoint), ranks=1, max_ranks=8, slots_per_rank=WIDTH
        )
        self.arena, self.experts = Arena(self.arch.dense_shapes()), ExpertBuffers(self.arch, WIDTH)
        self.checkpoint = Checkpoint(checkpoint, self.arch)
        mapped = None if tier is None else HostTier.map(tier, self.arch)
        self.weights = Weights(
            self.config, self.arch, self.arena, self.experts, slot, incarnation, mapped, self.checkpoint
        )

    def fill(self, layer: int, index: int, expert: int) -> None:
        self.weights.load_experts([Move(layer, expert, 0, index)], deadline_s=WAIT_S)


class Remote:
    """A process that can be killed and stopped."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        assert self.pipe.poll(WAIT_S), "the other process does not answer"
        return self.pipe.recv()

    def ask(self, *command: Any) -> Any:
        self.pipe.send(command)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join(WAIT_S)
        if number == signal.SIGSTOP:
            # until all its threads stand; before, it may still answer
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)
        self.pipe.close()


@contextmanager
def remotes(*starts: tuple[Any, ...]) -> Iterator[list[Remote]]:
    """Start them at once; end them all, whatever happened to them."""
    started: list[Remote] = []
    try:
        for start in starts:
            started.append(Remote(*start))
        yield started
    finally:
        for remote in started:
            remote.end()


def serve_rank(pipe: Connection, checkpoint: Path, slot: int, incarnation: int = 1, dense: bool = False) -> None:
    """Load from disk what it is told to; the first answer is the endpoint."""
    rank = Rank(checkpoint, slot, incarnation)
    if dense:
        rank.weights.load_dense(None, deadline_s=WAIT_S)
    pipe.send(rank.weights.endpoint())
    while True:
        what, *arguments = pipe.recv()
        if what == "fill":
            for layer, index, expert in arguments[0]:
                rank.fill(layer, index, expert)
        elif what == "drop":
            rank.weights.drop(*arguments)
        elif what == "alternate":
            # answer first, then overwrite one buffer with one expert after the other until told to stop
            pipe.send(None)
            layer, index, experts = arguments
            while not pipe.poll(0):
                for expert in experts:
                    rank.fill(layer, index, expert)
            continue
        pipe.send(None)


def serve_memory(pipe: Connection, name: str, size: int, value: int) -> None:
    """An agent with `size` bytes of `value`; the answers are (metadata, address), then notifications as they come."""
    torch.set_num_threads(1)
    memory = torch.full((size,), value, dtype=torch.uint8)
    agent = NixlAgent(name)
    agent.register(memory)
    pipe.send((agent.metadata(), memory.data_ptr()))
    while True:
        for note in agent.notifications():
            pipe.send((note, int(memory[0]), int(memory[-1])))
        if pipe.poll(0.001):
            pipe.recv()
            pipe.send(agent.notifications())


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {WAIT_S} s: {what}"
        time.sleep(0.001)
