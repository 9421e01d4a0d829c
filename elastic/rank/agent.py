"""The rank's agent: one thread with the sockets, one worker thread for everything that may block on NIXL.

The socket is the liveness signal: the kernel closes it when the process dies, so it is opened last, when device, buffers
and memory registrations exist (opened earlier it would be closed late, behind their teardown). Orders that end a wait are
carried out in the socket's thread, at once; loading and connecting go to the worker.
"""

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from elastic import process
from elastic.channel import read_frame
from elastic.config import GroupConfig
from elastic.errors import ElasticError, Unreachable
from elastic.fence import Controllers, part
from elastic.paths import unnamed_socket
from elastic.protocol import (
    PROTOCOL_VERSION,
    Abort,
    AnyMessage,
    Cancel,
    Commit,
    Done,
    Emitted,
    Failed,
    Fault,
    Heartbeat,
    Hello,
    Late,
    Leave,
    Link,
    Load,
    Parked,
    Peer,
    Prepare,
    Query,
    Refused,
    Rejected,
    Resume,
    Resumed,
    Stage,
    Status,
    Steps,
    StepsTaken,
    StopAt,
    Submit,
    Switch,
    encode,
)
from elastic.rank.address import Address
from elastic.rank.comm.base import EpBackend
from elastic.rank.engine import Engine
from elastic.rank.fatal import end_if_fatal, essential
from elastic.rank.gate import Gate, Phase, Takeover
from elastic.rank.member import Membership
from elastic.rank.weights import Weights

_Connection = asyncio.StreamWriter

Order = Prepare | Link | Stage | StopAt | Switch | Abort | Commit | Resume | Leave
"""What carries an epoch."""

FORGOTTEN = 2.0
"""Times the deadline of a join that a rank in no view waits for a controller before it ends: whoever launched it was
superseded or died, and nobody knows of it."""

DYING_S, DYING_LOOK_S = 3.0, 0.03
"""How long to wait for a dead peer's process to be gone before its connections are taken down, and how often to look."""

UNREAD_BYTES = 1 << 20
"""A controller that has left so much unread (it is stopped) is told no news; answers still go to it."""


class Agent:
    """Created by the main thread; `start` returns when the socket listens. Errors of one connection end that connection."""

    def __init__(
        self,
        config: GroupConfig,
        slot: int,
        incarnation: int,
        address: str,
        lifeline: str,
        gate: Gate,
        engine: Engine,
        ep: EpBackend,
        weights: Weights,
        membership: Membership,
        clock: Callable[[], float] = time.monotonic,
        boot_s: dict[str, float] | None = None,
    ) -> None:
        self._boot_s = boot_s or {}
        self._config, self._slot, self._incarnation, self._address = config, slot, incarnation, address
        self._lifeline = lifeline
        self._gate, self._engine, self._ep, self._weights = gate, engine, ep, weights
        self._membership, self._clock = membership, clock
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._controllers = Controllers()
        self._gateways: set[_Connection] = set()
        self._tidying: set[asyncio.Future[None]] = set()
        self._owner: dict[tuple[str, int], _Connection] = {}
        self._load = Load(waiting=-1, running=-1, max_seqs=config.max_seqs)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._listening = threading.Event()

    # --- called by the main thread --------------------------------------------------------------------------------

    def start(self, deadline_s: float = 10.0) -> None:
        self._listening.clear()
        self._thread = threading.Thread(target=essential("agent", self._run), name="agent", daemon=True)
        self._thread.start()
        if not self._listening.wait(deadline_s):
            raise ElasticError(f"{self._address}: the agent's socket could not be opened")

    def close(self) -> None:
        """End thread and socket, when nobody is connected; `start` opens them again."""
        if self._loop is not None and self._serving is not None:
            self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join()

    @property
    def watched(self) -> bool:
        """Whether a controller is connected."""
        return bool(self._controllers)

    def emit(self, messages: Sequence[Emitted | Rejected]) -> None:
        """Hand a committed step's tokens to the gateway that asked for them."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._send_emitted, messages)

    def tell(self, message: Resumed) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._resumed, message)

    # --- the agent's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._serving = asyncio.get_running_loop(), asyncio.current_task()
        # it gets its name when it listens: whoever finds it can connect
        unnamed = unnamed_socket(self._address)
        server = await asyncio.start_unix_server(self._connected, unnamed)
        try:
            # not renamed: a name that exists belongs to a process that is this rank already
            os.link(unnamed, self._address)
        except FileExistsError:
            raise ElasticError(f"{self._address}: another process is this rank already; this one ends") from None
        finally:
            os.unlink(unnamed)
        self._listening.set()
        try:
            async with server, asyncio.TaskGroup() as tasks:
                tasks.create_task(server.serve_forever())
                tasks.create_task(self._beat())
        finally:
            self._loop = None
            with contextlib.suppress(OSError):
                os.unlink(self._address)

    async def _beat(self) -> None:
        wanted = self._clock()
        while True:
            if self._controllers or self._engine.view is not None:
                wanted = self._clock()
            elif self._clock() - wanted > FORGOTTEN * self._config.prepare_deadline_s:
                print("agent: no controller has come for this rank; it ends", flush=True)
                self._gate.leave()
                return
            for peer, what, source in self._faults():
                self._send_controllers(Fault(peer=peer, what=what, source=source))
            if self._controllers.writers():
                self._send_controllers(
                    Heartbeat(
                        round=self._gate.round,
                        phase=self._gate.phase,
                        epoch=self._gate.epoch,
                        idle=self._gate.idle,
                        waiting_on=self._ep.waiting_on(),
                        counters=self._engine.counters,
                        waiting=self._engine.waiting,
                        running=self._engine.running,
                    )
                )
            self._send_load()
            await asyncio.sleep(self._config.heartbeat_s)

    def _faults(self) -> list[tuple[int, str, str]]:
        found = [(f.peer, f.what, "ep") for f in self._ep.poll_faults()]
        return found + [(f.peer, f.what, "weights") for f in self._weights.poll_faults()]

    async def _connected(self, reader: asyncio.StreamReader, writer: _Connection) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            hello = await read_frame(reader)
            if not isinstance(hello, Hello) or hello.version != PROTOCOL_VERSION or hello.group != self._config.name:
                print(f"agent: refused a connection that began with {type(hello).__name__}", flush=True)
                return
            if hello.role == "observer":
                self._controllers.observe(writer)
            elif hello.role != "controller":
                self._gateways.add(writer)
                writer.write(encode(self._load))
            elif why := self._controllers.admit(hello, writer):
                print(f"agent: refused a controller: {why}", flush=True)
                await part(reader)
                return
            while True:
                message = await read_frame(reader)
                if isinstance(message, Submit | Cancel):
                    self._serve_request(message, writer)
                    continue
                # a command that waits must not hold up the next one: an Abort ends the wait of a StopAt
                task = asyncio.create_task(self._answer(message, writer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except ElasticError as error:
            print(f"agent: closed a connection: {error}", flush=True)
        finally:
            self._controllers.discard(writer)
            self._gateways.discard(writer)
            for key in [k for k, w in self._owner.items() if w is writer]:
                # the gateway that owned the ledger is gone; nobody can take these tokens
                self._engine.inbox.append(Cancel(request=key[0], attempt=key[1]))
                del self._owner[key]
            writer.close()

    def _serve_request(self, message: Submit | Cancel, writer: _Connection) -> None:
        key = (message.request, message.attempt)
        if isinstance(message, Submit):
            self._owner[key] = writer
            # before any step has seen it: should it end this process, the gateway knows what the rank was working on
            start = len(message.tokens) - message.prompt_len
            writer.write(encode(Emitted(request=message.request, attempt=message.attempt, start=start, tokens=())))
        else:
            self._owner.pop(key, None)
        self._engine.inbox.append(message)
        self._membership.board.ring()

    def _send_emitted(self, messages: Sequence[Emitted | Rejected]) -> None:
        for message in messages:
            over = isinstance(message, Rejected) or message.finish is not None
            key = (message.request, message.attempt)
            writer = self._owner.pop(key, None) if over else self._owner.get(key)
            if writer is not None:
                writer.write(encode(message))
        self._send_load()

    def _send_load(self) -> None:
        load = Load(waiting=self._engine.waiting, running=self._engine.running, max_seqs=self._config.max_seqs)
        if load != self._load:
            self._load = load
            for writer in self._gateways:
                writer.write(encode(load))

    def _resumed(self, message: Resumed) -> None:
        self._send_controllers(message)
        # behind the first step, which it would hold up: NIXL EP takes connections down with Python's lock held
        tidying = asyncio.ensure_future(self._tidy())
        self._tidying.add(tidying)
        tidying.add_done_callback(self._tidying.discard)
        tidying.add_done_callback(lambda done: _outcome_of(done, "disconnecting"))

    async def _tidy(self) -> None:
        loop, until = asyncio.get_running_loop(), self._clock() + DYING_S
        left = await loop.run_in_executor(self._worker, self._membership.tidy)
        while left:
            await asyncio.sleep(DYING_LOOK_S)
            part = functools.partial(self._membership.part, left, wait=self._clock() < until)
            left = await loop.run_in_executor(self._worker, part)

    def _send_controllers(self, message: AnyMessage) -> None:
        for writer in self._controllers.writers():
            if writer.transport.get_write_buffer_size() < UNREAD_BYTES:
                writer.write(encode(message))

    # --- commands -------------------------------------------------------------------------------------------------

    async def _answer(self, message: AnyMessage, writer: _Connection) -> None:
        if self._controllers.observed_by(writer) and not isinstance(message, Query | Steps):
            why = "an observer gives no orders"
            writer.write(encode(Refused(id=getattr(message, "id", -1), epoch=self._gate.epoch, why=why)))
            return
        if writer not in self._controllers and not self._controllers.observed_by(writer):
            # it was superseded after this message had been read, or is no controller
            print(f"agent: ignored {type(message).__name__} of who may not give it", flush=True)
            return
        if isinstance(message, Query):
            writer.write(encode(self.status(message.id)))
            return
        if isinstance(message, Steps):
            steps, works = self._engine.steps.since(message.since), self._engine.works.since(message.since)
            writer.write(encode(StepsTaken(id=message.id, steps=steps, works=works)))
            return
        if not isinstance(message, Order):
            print(f"agent: ignored {type(message).__name__}", flush=True)
            return
        if not self._gate.fence(message.epoch):
            why = f"epoch {message.epoch} is older than {self._gate.epoch}"
            writer.write(encode(Refused(id=message.id, epoch=self._gate.epoch, why=why)))
            return
        failure: Exception | None = None
        try:
            answer = await self._carry_out(message)
        except Unreachable as error:
            answer, failure = Failed(id=message.id, why=str(error), unreachable=error.slots), error
        except ElasticError as error:
            answer, failure = Failed(id=message.id, why=str(error)), error
        except Exception as error:
            # the rank cannot say what state a bug left it in; the controller decides, with the words in hand
            answer, failure = Failed(id=message.id, why=f"{type(error).__name__}: {error}"), error
        if writer in self._controllers:
            # nobody else may be told anything: it was superseded meanwhile, or is gone
            writer.write(encode(answer))
        if failure is not None:
            end_if_fatal(failure, type(message).__name__)
        if isinstance(message, Leave):
            await writer.drain()
            self._gate.leave()

    async def _carry_out(self, message: Order) -> AnyMessage:
        loop, phase = asyncio.get_running_loop(), self._gate.phase
        if isinstance(message, Prepare):
            return await loop.run_in_executor(self._worker, self._membership.prepare, message)
        if isinstance(message, Link):
            linking = loop.run_in_executor(self._worker, self._membership.link, message)
            if message.wait:
                await linking
            else:
                # its outcome is told to whoever waits with the same order; nobody else awaits it
                linking.add_done_callback(lambda done: _outcome_of(done, "connecting"))
            return Done(id=message.id)
        if isinstance(message, Stage):
            return await loop.run_in_executor(self._worker, self._membership.stage, message)
        if isinstance(message, StopAt) and (begun := self._gate.stop_at(message.round)) is not None:
            return Late(id=message.id, round=begun)
        if isinstance(message, Switch):
            return await self._switch(message)
        if isinstance(message, Abort):
            told, in_round = self._clock(), self._gate.in_round
            self._gate.halt()
            self._ep.release([s for s in range(self._config.max_ranks) if s != self._slot])
            return await self._parked(message.id, told if in_round else 0.0)
        if isinstance(message, Commit):
            if phase not in (Phase.PARKED, Phase.READY):
                return Refused(id=message.id, epoch=self._gate.epoch, why=f"the rank is {phase}, not parked or ready")
            return await loop.run_in_executor(self._worker, self._membership.commit, message)
        if isinstance(message, Resume):
            if self._engine.view is None:
                return Refused(id=message.id, epoch=self._gate.epoch, why=f"the rank is {phase}, in no view")
            self._gate.resume()
        return Done(id=message.id)

    async def _switch(self, message: Switch) -> AnyMessage:
        loop = asyncio.get_running_loop()
        applied: asyncio.Future[bool] = loop.create_future()

        def done(outcome: bool) -> None:
            def tell() -> None:
                loop.call_soon_threadsafe(_set, applied, outcome)

            # an answer that is put together while the loop launches its step would take Python's lock from it
            self._engine.when_launched(tell) if outcome else tell()

        if not self._gate.take_over(Takeover(message.round, self._engine.switch, done)):
            why = f"the rank is {self._gate.phase} at round {self._gate.round}, round {message.round} cannot be met"
            return Refused(id=message.id, epoch=self._gate.epoch, why=why)
        if not await applied:
            return Failed(id=message.id, why=f"the view of epoch {message.epoch} was not taken over")
        return await loop.run_in_executor(self._worker, self._membership.settle, message)

    async def _parked(self, id_: int, told: float) -> AnyMessage:
        loop, wait_s = asyncio.get_running_loop(), self._config.prepare_deadline_s
        stands: asyncio.Future[bool] = loop.create_future()

        def stand() -> None:
            loop.call_soon_threadsafe(_set, stands, True)

        self._gate.when_parked(stand)
        try:
            async with asyncio.timeout(wait_s):
                await stands
        except TimeoutError:
            return Failed(id=id_, why=f"the round loop did not stop within {wait_s:g} s")
        released = max(0.0, self._engine.stood - told) if told else 0.0
        return Parked(id=id_, round=self._gate.round, contents=self._weights.contents(), released_s=released)

    def status(self, id_: int) -> Status:
        pid = os.getpid()
        return Status(
            id=id_,
            slot=self._slot,
            incarnation=self._incarnation,
            pid=pid,
            pid_start=process.start_time(pid),
            lifeline=self._lifeline,
            epoch=self._gate.epoch,
            phase=self._gate.phase,
            round=self._gate.round,
            view=self._engine.view,
            contents=self._weights.contents(),
            peer=Peer(
                slot=self._slot,
                incarnation=self._incarnation,
                ep=Address(self._ep.endpoint(), self._lifeline).encode(),
                weights=self._weights.endpoint(),
            ),
            counters=self._engine.counters,
            waiting=self._engine.waiting,
            running=self._engine.running,
            boot_s=self._boot_s,
            term=self._controllers.term,
        )


def _set(future: asyncio.Future[bool], outcome: bool) -> None:
    if not future.done():
        future.set_result(outcome)


def _outcome_of(done: asyncio.Future[None], doing: str) -> None:
    """Of work that nobody waits for."""
    if not done.cancelled() and (error := done.exception()) is not None:
        print(f"agent: {doing}: {error}", flush=True)
        end_if_fatal(error, doing)
