"""Puts a rank together, in two steps: what is the same for every slot (`prepare`), then the rank itself (`assemble`).

A spare does the first step ahead of time and waits for its slot in between. Order matters: the agent's socket is opened
last, since it is the liveness signal.
"""

import contextlib
import faulthandler
import gc
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from elastic import process
from elastic.config import GroupConfig, is_suspect
from elastic.errors import ElasticError
from elastic.lifeline import Lifeline
from elastic.paths import fault_path, steps_path, tier_path
from elastic.protocol import Emitted, Rejected
from elastic.rank import faults
from elastic.rank.agent import Agent
from elastic.rank.architecture import Architecture, Arena, ExpertBuffers, read_architecture
from elastic.rank.buffers import Buffers
from elastic.rank.checkpoint import Checkpoint
from elastic.rank.comm.base import EpBackend, RoundBoard
from elastic.rank.comm.factory import open_backend
from elastic.rank.comm.links import FaultyNixlAgent, Links
from elastic.rank.device import Device, open_device
from elastic.rank.engine import Engine
from elastic.rank.gate import Gate
from elastic.rank.member import Membership
from elastic.rank.nixl_agent import NixlAgent
from elastic.rank.probe import probe
from elastic.rank.recorder import StepRecorder
from elastic.rank.runner import Runner
from elastic.rank.tier import HostTier
from elastic.rank.weights import Weights


class Stopwatch:
    """Seconds by part of a boot."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent_s[name] = self.spent_s.get(name, 0.0) + time.monotonic() - began


@dataclass
class Base:
    """What a rank has before it has a slot."""

    config: GroupConfig
    arch: Architecture
    checkpoint: Checkpoint
    device: Device
    tier: HostTier | None
    weights_agent: NixlAgent
    links: Links | None
    """The faults that may be put between this rank and its peers; None: none may."""
    slot: int
    """The slot that `ep` was opened for."""
    ep: EpBackend
    board: RoundBoard
    watch: Stopwatch


@dataclass
class Rank:
    """The parts of a rank, not yet running."""

    arena: Arena
    experts: ExpertBuffers
    gate: Gate
    engine: Engine
    runner: Runner
    ep: EpBackend
    board: RoundBoard
    weights: Weights
    membership: Membership
    agents: list[Agent] = field(default_factory=list)
    """One, once it exists: engine and agent know each other."""


def prepare(config: GroupConfig, slot: int, device: Device | None = None) -> Base:
    """All that takes time and is the same for every slot, and the EP back end for the slot that is the most likely.

    `device`: where it is not that of the slot. Raises ElasticError when this process cannot become a rank.
    """
    # kill -USR1 writes every thread's stack to the rank's log
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    # agent and loop must get the interpreter from each other within a fraction of a step; at 0.5 ms a commit pause was that
    # much longer whenever the agent held it
    sys.setswitchinterval(0.0001)
    watch = Stopwatch()
    watch.spent_s["process"] = _age_s()
    arch = read_architecture(config.checkpoint)
    checkpoint = Checkpoint(config.checkpoint, arch)
    with watch.part("device"):
        device = device or open_device(config, slot)
    with watch.part("weights"):
        tier = HostTier.open(tier_path(config.root), arch, device.dtype) if config.host_tier else None
        if tier is not None:
            tier.pin(device)
        name = f"{config.name}/weights/{secrets.token_hex(8)}"
        links = Links() if config.fault_injection else None
        weights_agent = NixlAgent(name) if links is None else FaultyNixlAgent(name, links)
    with watch.part("exchange"):
        ep, board = _open_exchange(config, arch, device, slot, links)
    # the libraries are here to stay: to look through their objects now and then would hold every thread up for 50 ms
    gc.collect()
    gc.freeze()
    return Base(config, arch, checkpoint, device, tier, weights_agent, links, slot, ep, board, watch)


def _age_s() -> float:
    """Of this process, to a clock tick (10 ms)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_time(os.getpid()) / os.sysconf("SC_CLK_TCK")


def _open_exchange(
    config: GroupConfig, arch: Architecture, device: Device, slot: int, links: Links | None
) -> tuple[EpBackend, RoundBoard]:
    return open_backend(
        config.ep_backend,
        rank=slot,
        capacity=config.max_ranks,
        experts_per_rank=config.slots_per_rank,
        max_tokens=config.max_tokens,
        hidden=arch.hidden,
        top_k=arch.top_k,
        timeout_s=config.ep_timeout_s,
        group=config.name,
        device=device,
        early_release=config.early_release,
        links=links,
    )


def assemble(base: Base, slot: int, incarnation: int) -> Rank:
    """The rank for a slot: its memory, registered, and all that works on it. Raises ElasticError."""
    config, arch, device = base.config, base.arch, base.device
    if slot != base.slot:
        with base.watch.part("exchange"):
            base.ep.close()
            base.ep, base.board = _open_exchange(config, arch, device, slot, base.links)
            base.slot = slot
    with base.watch.part("weights"):
        arena, buffers = Arena(arch.dense_shapes(), device), Buffers()
        experts = ExpertBuffers(arch, config.slots_per_rank, device)
        weights = Weights(
            config, arch, arena, experts, slot, incarnation, base.tier, base.checkpoint, agent=base.weights_agent
        )
    with base.watch.part("model"):
        runner = Runner(config, arch, arena, experts, base.ep, buffers, device)
    gate = Gate(base.board.ring)
    agents: list[Agent] = []
    recorder: StepRecorder | None = None
    if config.fault_injection:
        recorder = StepRecorder(
            steps_path(config.root, slot),
            slot,
            incarnation,
            base.ep,
            gate,
            buffers,
            runner.graphs,
            weights.contents,
        )
    engine = Engine(
        config,
        slot,
        gate,
        runner,
        base.ep,
        base.board,
        emit=lambda m: _emit(agents[0], recorder, m),
        tell=lambda m: agents[0].tell(m),
    )
    engine.recorder = recorder
    base.weights_agent.on_long_poll = engine.works.add
    membership = Membership(config, slot, gate, engine, runner, base.ep, base.board, weights)
    return Rank(arena, experts, gate, engine, runner, base.ep, base.board, weights, membership, agents)


def _emit(agent: Agent, recorder: StepRecorder | None, messages: Sequence[Emitted | Rejected]) -> None:
    if recorder is not None:
        recorder.emitting(messages)
    agent.emit(messages)


def serve(base: Base, slot: int, incarnation: int, address: str) -> None:
    """Run until told to leave. Raises ElasticError when the rank cannot start."""
    config = base.config
    if config.fault_injection:
        place = faults.Place(lambda: base.device.place, lambda: base.ep, base.links)
        faults.arm(fault_path(config.root, slot, incarnation), place)
    if is_suspect(config.root, slot):
        _prove(base)
    rank = assemble(base, slot, incarnation)
    lifeline = _lifeline()
    agent = Agent(
        config,
        slot,
        incarnation,
        address,
        lifeline.path if lifeline else "",
        rank.gate,
        rank.engine,
        rank.ep,
        rank.weights,
        rank.membership,
        boot_s=base.watch.spent_s,
    )
    rank.agents.append(agent)
    rank.engine.works.watch_garbage()
    gc.freeze()
    agent.start()
    print(f"rank {slot}.{incarnation} listens, pid {os.getpid()}", flush=True)
    code = 0
    try:
        rank.engine.run()
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        os.unlink(address)
    # threads of NIXL may hang at interpreter exit, and a rank that has stopped must be gone at once
    sys.stdout.flush()
    os._exit(code)


def _prove(base: Base) -> None:
    """Before anything of the device is trusted. Raises ElasticError naming what is wrong with it."""
    with base.watch.part("probe"):
        report = probe(base.device)
    speeds = f", {report.to_device_gb_s:.1f} GB/s to the device, {report.to_host_gb_s:.1f} back"
    print(
        f"probe: the device is sound: {report.memory_bytes >> 20} MiB in {report.seconds:.2f} s"
        f"{speeds if base.device.is_gpu else ''}",
        flush=True,
    )


def _lifeline() -> Lifeline | None:
    try:
        return Lifeline()
    except ElasticError as error:
        print(f"{error}; the socket is the only sign of life", flush=True)
        return None
