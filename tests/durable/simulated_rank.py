"""A rank whose agent, gate, engine and membership are the real ones; only exchange, weights and graphs are not there.

Tokens are a function of the last token and its position, so that whoever continues an answer continues it alike. A step that
has rows waits for the peers that are unmasked, as the exchange would. Every command that the agent accepts is appended to a
file before it is carried out.
"""

import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from elastic import process
from elastic.config import GroupConfig, ModelShape, read_model_shape
from elastic.errors import ElasticError, NeedsReplan, Unreachable
from elastic.lifeline import Lifeline
from elastic.paths import config_path, read_config, socket_path
from elastic.placement import HOLE, Move, Placement
from elastic.protocol import Loaded, Source
from elastic.rank.agent import Agent
from elastic.rank.comm.base import never
from elastic.rank.comm.nixl_ep import FROZEN_AFTER_S
from elastic.rank.engine import Engine
from elastic.rank.gate import Gate
from elastic.rank.member import Membership
from elastic.rank.scheduler import Batch

STEP_S = 0.004
"""Of a step that has rows."""
POLL_S = 0.005
FAILS = "fail-boots"
"""A file in the run directory with the number of ranks that are to end while they boot."""


class Accepted(msgspec.Struct, frozen=True):
    """One line of a rank's command file."""

    kind: str
    epoch: int
    id: int
    term: int
    at: float


def commands_path(run_dir: Path, slot: int, incarnation: int) -> Path:
    return run_dir / "commands" / f"rank-{slot}.{incarnation}.jsonl"


def next_token(token: int, position: int, vocab: int) -> int:
    """What follows `token` at `position` of a sequence."""
    return (31 * token + 17 * position + 7) % vocab


def answer(prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens) - 1, vocab))
    return tokens[len(prompt) :]


def run(arguments: tuple[str, ...]) -> None:
    run_dir, slot, incarnation = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    config = read_config(config_path(run_dir))
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)
    if _is_to_fail(run_dir):
        print("error: told to fail at boot", file=sys.stderr, flush=True)
        sys.exit(1)
    address = socket_path(config.root, slot, incarnation)
    shape = read_model_shape(config.checkpoint)
    board, peers = Board(), Peers()
    ep, weights = Exchange(slot, peers, run_dir / "greetings"), Weights(config, shape, peers)
    runner = Runner(shape.vocab, ep)
    gate = Gate(board.ring)
    agents: list[Agent] = []
    fakes: Any = SimpleNamespace(runner=runner, ep=ep, board=board, weights=weights)
    engine = Engine(
        config,
        slot,
        gate,
        fakes.runner,
        fakes.ep,
        fakes.board,
        emit=lambda m: agents[0].emit(m),
        tell=lambda m: agents[0].tell(m),
    )
    membership = Membership(config, slot, gate, engine, fakes.runner, fakes.ep, fakes.board, fakes.weights)
    lifeline = Lifeline()
    agents.append(
        RecordingAgent(
            config, slot, incarnation, address, lifeline.path, gate, engine, fakes.ep, fakes.weights, membership
        )
    )
    agents[0].start()
    engine.run()
    Path(address).unlink(missing_ok=True)


def _is_to_fail(run_dir: Path) -> bool:
    path = run_dir / FAILS
    if not path.exists():
        return False
    left = int(path.read_text())
    if left > 1:
        path.write_text(str(left - 1))
    else:
        path.unlink()
    return left > 0


_term: contextvars.ContextVar[int] = contextvars.ContextVar("term", default=-1)


class RecordingAgent(Agent):
    """Writes down what it accepts, in one write each, before it acts."""

    def __init__(self, config: GroupConfig, slot: int, incarnation: int, *others: Any, **options: Any) -> None:
        super().__init__(config, slot, incarnation, *others, **options)
        path = commands_path(config.root, slot, incarnation)
        path.parent.mkdir(exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    async def _answer(self, message: Any, writer: Any) -> None:
        if writer in self._controllers:
            _term.set(self._controllers.term_of(writer))
        await super()._answer(message, writer)

    async def _carry_out(self, message: Any) -> Any:
        line = Accepted(type(message).__name__, message.epoch, message.id, _term.get(), time.monotonic())
        os.write(self._file, msgspec.json.encode(line) + b"\n")
        return await super()._carry_out(message)


class Peers:
    """Who the others are, and whether they run: a stopped process answers nobody."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}

    @staticmethod
    def endpoint() -> bytes:
        return f"{os.getpid()} {process.start_time(os.getpid())}".encode()

    def connect(self, peers: Mapping[int, bytes], deadline_s: float, give_up: Callable[[], bool]) -> None:
        for slot, raw in peers.items():
            pid, start = raw.split()
            self._known[slot] = (int(pid), int(start))
        until = time.monotonic() + deadline_s
        while silent := [s for s in peers if not self.runs(s)]:
            if time.monotonic() > until or give_up():
                raise Unreachable(f"no answer from slots {silent}", silent)
            time.sleep(POLL_S)

    def runs(self, slot: int) -> bool:
        pid, start = self._known[slot]
        return process.state(pid, start) not in (process.GONE, "Z", "x", "T", "t")


class Exchange:
    """`EpBackend`, as far as engine and membership use it. It meets its peers as NIXL EP does: a connect returns when the other end
    has connected too or has died, is not to be cut short, and ends the process where neither comes."""

    def __init__(self, slot: int, peers: Peers, greetings: Path) -> None:
        self._greetings = greetings
        self.mask_generation = 0
        self.rows = 0
        self._slot, self._peers = slot, peers
        self._masked: dict[int, bool] = {}
        self._changed = threading.Condition()
        self._waiting: tuple[int, ...] = ()

    def endpoint(self) -> bytes:
        return self._peers.endpoint()

    def connect(self, peers: Mapping[int, bytes], *, deadline_s: float, give_up: Callable[[], bool] = never) -> None:
        until = time.monotonic() + deadline_s + FROZEN_AFTER_S
        mine = self.endpoint().decode()
        for raw in peers.values():
            theirs = self._greetings / raw.decode()
            theirs.mkdir(parents=True, exist_ok=True)
            (theirs / mine).touch()
        for slot, raw in peers.items():
            greeting = self._greetings / mine / raw.decode()
            while not greeting.exists():
                pid, start = map(int, raw.split())
                if not process.is_alive(pid, start):
                    raise Unreachable(f"slot {slot} died while it connected", [slot])
                if time.monotonic() > until:
                    print(f"error: frozen in a connect to slot {slot}", file=sys.stderr, flush=True)
                    os._exit(1)
                time.sleep(POLL_S)
            greeting.unlink()
        self._peers.connect(peers, deadline_s, give_up)
        with self._changed:
            for slot in peers:
                self._masked[slot] = True

    def disconnect(self, ranks: Collection[int]) -> None:
        with self._changed:
            for slot in ranks:
                self._masked.pop(slot, None)

    def take_over(self, live: Collection[int], base: int) -> int:
        with self._changed:
            for slot in self._masked:
                self.mask_generation += self._masked[slot] != (slot not in live)
                self._masked[slot] = slot not in live
            self._changed.notify_all()
            return self.mask_generation

    def release(self, ranks: Collection[int]) -> None:
        self._mask([s for s in ranks if s in self._masked], True)

    def _mask(self, ranks: Collection[int], masked: bool) -> None:
        with self._changed:
            for slot in ranks:
                if self._masked[slot] != masked:
                    self._masked[slot] = masked
                    self.mask_generation += 1
            self._changed.notify_all()

    def begin_step(self) -> None: ...

    def end_step(self) -> None:
        if not self.rows:
            return
        with self._changed:
            while stuck := tuple(s for s, masked in self._masked.items() if not masked and not self._peers.runs(s)):
                self._waiting = stuck
                self._changed.wait(POLL_S)
            self._waiting = ()

    def clean(self, base: int) -> None: ...

    def waiting_on(self) -> tuple[int, ...]:
        return self._waiting

    def poll_faults(self) -> list[Any]:
        return []


class Board:
    """`RoundBoard` of a rank that hears no peer begin a round: it sleeps until it has work or an order itself."""

    def __init__(self) -> None:
        self._rung = threading.Condition()
        self._count = 0

    def announce(self, round_: int, has_work: bool, peers: Collection[int]) -> None: ...

    def any_work(self, round_: int, peers: Collection[int]) -> bool:
        return False

    def begun(self, round_: int, peers: Collection[int]) -> bool:
        return False

    def ticket(self) -> int:
        with self._rung:
            return self._count

    def wait(self, ticket: int, timeout_s: float) -> None:
        with self._rung:
            self._rung.wait_for(lambda: self._count != ticket, timeout_s)

    def ring(self) -> None:
        with self._rung:
            self._count += 1
            self._rung.notify_all()


class Weights:
    """What the expert buffers would hold."""

    def __init__(self, config: GroupConfig, shape: ModelShape, peers: Peers) -> None:
        self._rows = [[HOLE] * config.slots_per_rank for _ in range(shape.moe_layers)]
        self._dense = False
        self._peers = peers

    def endpoint(self) -> bytes:
        return self._peers.endpoint()

    def connect(self, peers: Mapping[int, bytes], *, deadline_s: float, give_up: Callable[[], bool] = never) -> None:
        self._peers.connect(peers, deadline_s, give_up)

    def disconnect(self, slots: Collection[int]) -> None: ...

    def load_experts(self, moves: Sequence[Move], *, deadline_s: float, give_up: Callable[[], bool] = never) -> Loaded:
        for move in moves:
            self._rows[move.layer][move.index] = move.expert
        return Loaded(disk=Source(len(moves), len(moves)))

    def load_dense(self, source: int | None, *, deadline_s: float, give_up: Callable[[], bool] = never) -> Loaded:
        self._dense = True
        return Loaded(disk=Source(1, 1))

    def drop(self, layer: int, index: int) -> None:
        self._rows[layer][index] = HOLE

    def contents(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(row) for row in self._rows)

    def poll_faults(self) -> list[Any]:
        return []


class Runner:
    runs_behind = True
    """As on a GPU: the step ends in the exchange."""

    def __init__(self, vocab: int, exchange: Exchange) -> None:
        self.vocab = vocab
        self.graphs = SimpleNamespace(captures=0, replays=0, address_changes=0)
        self._exchange = exchange
        self._placed = False

    def capture(self) -> None:
        self.graphs.captures = 1

    def stage_placement(self, placement: Placement, live: Collection[int]) -> None:
        if missing := placement.uncovered(live):
            raise NeedsReplan(f"{len(missing)} experts have no live copy")

    def switch_placement(self) -> None:
        self._placed = True

    def run(self, batch: Batch) -> None:
        if not self._placed:
            raise ElasticError("a step before any placement")
        self._exchange.rows = batch.rows
        self.graphs.replays += 1
        if batch.rows:
            time.sleep(STEP_S)

    def choose(self, batch: Batch) -> list[int]:
        return [next_token(batch.tokens[s.row], batch.positions[s.row], self.vocab) for s in batch.samples]
