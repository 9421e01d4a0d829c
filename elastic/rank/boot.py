"""Puts a rank together. Order matters: the agent's socket is opened last, since it is the liveness signal."""

import contextlib
import faulthandler
import os
import signal
import sys
import traceback

import torch

from elastic.config import GroupConfig
from elastic.errors import ElasticError
from elastic.lifeline import Lifeline
from elastic.paths import tier_path
from elastic.rank.agent import Agent
from elastic.rank.architecture import Arena, ExpertBuffers, read_architecture
from elastic.rank.buffers import Buffers
from elastic.rank.checkpoint import Checkpoint
from elastic.rank.comm.factory import open_backend
from elastic.rank.device import open_device
from elastic.rank.engine import Engine
from elastic.rank.gate import Gate
from elastic.rank.member import Membership
from elastic.rank.runner import Runner
from elastic.rank.tier import HostTier
from elastic.rank.weights import Weights


def serve(config: GroupConfig, slot: int, incarnation: int, address: str) -> None:
    """Run until told to leave. Raises ElasticError when the rank cannot start."""
    # kill -USR1 writes every thread's stack to the rank's log
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    # the agent must get the interpreter within a fraction of a step, also while the loop computes
    sys.setswitchinterval(0.0005)
    arch = read_architecture(config.checkpoint)
    checkpoint = Checkpoint(config.checkpoint, arch)
    device = open_device(config, slot)
    ep, board = open_backend(
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
    )
    arena, buffers = Arena(arch.dense_shapes(), device), Buffers()
    experts = ExpertBuffers(arch, config.slots_per_rank, device)
    tier = HostTier.open(tier_path(config.root), arch, device.dtype) if config.host_tier else None
    weights = Weights(config, arch, arena, experts, slot, incarnation, tier, checkpoint)
    runner = Runner(config, arch, arena, experts, ep, buffers, device)
    gate = Gate(board.ring)
    agents: list[Agent] = []
    engine = Engine(
        config, slot, gate, runner, ep, board, emit=lambda m: agents[0].emit(m), tell=lambda m: agents[0].tell(m)
    )
    membership = Membership(config, slot, gate, engine, runner, ep, board, weights)
    lifeline = _lifeline()
    path = lifeline.path if lifeline else ""
    agents.append(Agent(config, slot, incarnation, address, path, gate, engine, ep, weights, membership))
    agents[0].start()
    print(f"rank {slot}.{incarnation} listens, pid {os.getpid()}", flush=True)
    code = 0
    try:
        engine.run()
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        os.unlink(address)
    # threads of NIXL may hang at interpreter exit, and a rank that has stopped must be gone at once
    sys.stdout.flush()
    os._exit(code)


def _lifeline() -> Lifeline | None:
    """Of the main thread, which runs the round loop."""
    try:
        return Lifeline()
    except ElasticError as error:
        print(f"{error}; the socket is the only sign of life", flush=True)
        return None
