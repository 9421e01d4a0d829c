"""Real rank processes that only communicate: each has a loop thread that runs steps and a control thread beside it.

Rows, routing and weights of a step follow from (seed, rank, step), so that every process can work out what all others
send, and what the right answer is without them.
"""

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from elastic.rank.comm.base import LIVE, EpBackend, Received, RoundBoard
from elastic.rank.comm.factory import open_backend

WAIT_S = 60.0


@dataclass(frozen=True)
class Shape:
    capacity: int = 4
    experts_per_rank: int = 4
    max_tokens: int = 32
    hidden: int = 64
    top_k: int = 2
    timeout_s: float = 30.0
    seed: int = 7


def rows_of(shape: Shape, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_idx and weights of one rank in one step: some rows are padding, some ranks have none at all."""
    rng = np.random.default_rng([shape.seed, rank, step])
    rows = int(rng.integers(0, shape.max_tokens + 1))
    experts = shape.capacity * shape.experts_per_rank
    x = rng.standard_normal((rows, shape.hidden), dtype=np.float32)
    idx = rng.random((rows, experts)).argsort(1)[:, : shape.top_k].astype(np.int64)
    idx[rng.random(idx.shape) < 0.1] = -1
    weights = rng.random((rows, shape.top_k), dtype=np.float32)
    return torch.from_numpy(x), torch.from_numpy(idx), torch.from_numpy(weights)


def expert(physical: int, x: torch.Tensor) -> torch.Tensor:
    return x * (1.0 + 0.37 * physical) + float(physical)


def expected_received(shape: Shape, rank: int, step: int, live: Collection[int]) -> list[torch.Tensor]:
    """Rows for each expert of `rank`: by source slot, then row."""
    found: list[list[torch.Tensor]] = [[] for _ in range(shape.experts_per_rank)]
    for source in sorted(live):
        x, idx, _ = rows_of(shape, source, step)
        for e in range(shape.experts_per_rank):
            found[e].append(x[(idx == rank * shape.experts_per_rank + e).any(1)])
    return [torch.cat(rows) for rows in found]


def expected_out(shape: Shape, rank: int, step: int, live: Collection[int]) -> torch.Tensor:
    x, idx, weights = rows_of(shape, rank, step)
    out = torch.zeros_like(x)
    for i in range(x.shape[0]):
        for k in range(shape.top_k):
            physical = int(idx[i, k])
            if physical >= 0 and physical // shape.experts_per_rank in live:
                out[i] += expert(physical, x[i]) * weights[i, k]
    return out


class Runner:
    """The commands of the loop thread."""

    def __init__(self, shape: Shape, rank: int, ep: EpBackend, board: RoundBoard) -> None:
        self.shape, self.rank, self.ep, self.board = shape, rank, ep, board
        self.done_steps = 0
        self.addresses: set[int] = set()
        self.asleep = False

    def step(self, step: int) -> tuple[Received, torch.Tensor]:
        x, idx, weights = rows_of(self.shape, self.rank, step)
        received = self.ep.dispatch(x, idx)
        self.addresses |= {received.x.data_ptr(), received.counts.data_ptr()}
        y = torch.full_like(received.x, float("nan"))
        for e, count in enumerate(received.counts.tolist()):
            y[e, :count] = expert(self.rank * self.shape.experts_per_rank + e, received.x[e, :count])
        kept = Received(received.x.clone(), received.counts.clone())
        out = torch.full_like(x, float("nan"))
        self.ep.combine(y, idx, weights, out)
        return kept, out

    def steps(self, first: int, count: int, live: Collection[int]) -> list[str]:
        """Run steps and compare each with the reference; the differences found."""
        wrong: list[str] = []
        for step in range(first, first + count):
            before = self.ep.mask_generation
            received, out = self.step(step)
            if self.ep.mask_generation != before:
                wrong.append(f"step {step}: the masks changed")
            if not torch.equal(out, expected_out(self.shape, self.rank, step, live)):
                wrong.append(f"step {step}: wrong result")
            for e, rows in enumerate(expected_received(self.shape, self.rank, step, live)):
                if not torch.equal(received.x[e, : int(received.counts[e])], rows):
                    wrong.append(f"step {step}: wrong rows for expert {e}")
            self.done_steps += 1
        return wrong

    def idle_until_begun(self, round_: int, peers: Collection[int], within_s: float) -> bool:
        """What an idle loop does: sleep until a peer has begun the round."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            ticket = self.board.ticket()
            if self.board.begun(round_, [peer for peer in peers if peer != self.rank]):
                return True
            self.board.wait(ticket, end - time.monotonic())
        return False

    def group_has_work(self, round_: int, own: bool) -> bool:
        peers = [slot for slot, mask in enumerate(self.ep.masks()) if mask == LIVE and slot != self.rank]
        return own or self.board.any_work(round_, peers)

    def sleep_once(self, timeout_s: float) -> None:
        ticket = self.board.ticket()
        self.asleep = True
        self.board.wait(ticket, timeout_s)
        self.asleep = False

    def route(self, idx: list[list[int]]) -> None:
        # as many rows as fit, since one alone may name an expert twice without harm
        rows = torch.tensor(idx).repeat(self.shape.max_tokens, 1)
        self.ep.dispatch(torch.zeros(len(rows), self.shape.hidden), rows)

    def commit(self, live: Collection[int], base: int) -> None:
        self.ep.clean(base)
        self.ep.take_over(live, base)


def _serve(connection: Connection, targets: dict[str, Any]) -> None:
    while True:
        try:
            target, name, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            found = getattr(targets[target], name)
            connection.send((True, found(*args, **kwargs) if callable(found) else found))
        except Exception as error:
            connection.send((False, (type(error).__name__, str(error), traceback.format_exc())))


def _main(name: str, shape: Shape, rank: int, group: str, loop: Connection, control: Connection) -> None:
    torch.set_num_threads(1)
    ep, board = open_backend(
        name,  # type: ignore[arg-type]
        rank=rank,
        capacity=shape.capacity,
        experts_per_rank=shape.experts_per_rank,
        max_tokens=shape.max_tokens,
        hidden=shape.hidden,
        top_k=shape.top_k,
        timeout_s=shape.timeout_s,
        group=group,
    )
    targets = {"ep": ep, "board": board, "runner": Runner(shape, rank, ep, board)}
    threading.Thread(target=_serve, args=(control, targets), daemon=True).start()
    _serve(loop, targets)
    ep.close()
    # NIXL's own threads may hang at interpreter exit
    os._exit(0)


class RemoteError(Exception):
    """A command failed in the peer; `kind` is the class name there."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


class Peer:
    """One rank process. Loop commands are sent with `begin` and answered to `finish`; control commands run meanwhile."""

    def __init__(self, context: Any, name: str, shape: Shape, rank: int, group: str) -> None:
        self.rank, self.shape = rank, shape
        self._loop, loop = context.Pipe()
        self._control, control = context.Pipe()
        self.process = context.Process(target=_main, args=(name, shape, rank, group, loop, control), daemon=True)
        self.process.start()
        loop.close()
        control.close()

    @property
    def pid(self) -> int:
        pid: int = self.process.pid
        return pid

    def begin(self, target: str, name: str, *args: Any, **kwargs: Any) -> None:
        self._loop.send((target, name, args, kwargs))

    def finish(self, within_s: float = WAIT_S) -> Any:
        return self._answer(self._loop, within_s)

    def call(self, target: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run in the control thread."""
        self._control.send((target, name, args, kwargs))
        return self._answer(self._control, WAIT_S)

    def _answer(self, connection: Connection, within_s: float) -> Any:
        if not connection.poll(within_s):
            raise TimeoutError(f"rank {self.rank} did not answer within {within_s} s")
        good, value = connection.recv()
        if not good:
            raise RemoteError(*value)
        return value

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self._loop.close()
        self._control.close()


class Group:
    def __init__(self, name: str, shape: Shape) -> None:
        self.name, self.shape = name, shape
        self.peers: dict[int, Peer] = {}
        self._ever: list[Peer] = []
        # One server imports torch once and forks the ranks: each is a process of its own, started in milliseconds.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.rank.comm_group", "nixl._api"])

    def launch(self, rank: int) -> Peer:
        peer = Peer(self._context, self.name, self.shape, rank, f"test{os.getpid()}")
        self.peers[rank] = peer
        self._ever.append(peer)
        return peer

    def connect(self, rank: int, to: Collection[int], deadline_s: float = 20.0) -> None:
        ends = {r: self.peers[r].call("ep", "endpoint") for r in to if r != rank}
        self.peers[rank].call("ep", "connect", ends, deadline_s=deadline_s)

    def form(self, ranks: Collection[int], base: int = 1) -> None:
        """Launch, connect and unmask."""
        for rank in ranks:
            self.launch(rank)
        for rank in ranks:
            self.connect(rank, ranks)
        self.commit(ranks, base)

    def commit(self, live: Collection[int], base: int) -> None:
        """What a commit does on every live rank, all of them parked."""
        for rank in live:
            self.peers[rank].begin("runner", "commit", live, base)
        for rank in live:
            self.peers[rank].finish()

    def begin(self, live: Collection[int], name: str, *args: Any) -> None:
        for rank in live:
            self.peers[rank].begin("runner", name, *args)

    def finish(self, live: Collection[int]) -> dict[int, Any]:
        return {rank: self.peers[rank].finish() for rank in live}

    def check_steps(self, first: int, count: int, live: Collection[int]) -> None:
        self.begin(live, "steps", first, count, tuple(live))
        assert self.finish(live) == {rank: [] for rank in live}

    def end(self) -> None:
        for peer in self._ever:
            peer.end()


@contextmanager
def a_group(name: str, shape: Shape) -> Iterator[Group]:
    group = Group(name, shape)
    try:
        yield group
    finally:
        group.end()
