"""The process: sockets, stores and the coordinator child, driven by orders over a Unix socket, one JSON object a line.

{"do": "info"}                                    and every order answers with CoordinationInfo, or {"error": …}
{"do": "start", "slots": […]}                     a whole group starts: fresh stores, fresh coordinator
{"do": "live", "count": 3}                        so many engines would subscribe to a coordinator that starts now
{"do": "stand-by"}                                have a process that can become the next coordinator at once
{"do": "refill", "order": {…}, "size": 4, "redundant_experts": 8, "max_size": 8}
{"do": "answer"}                                  tell the joiners where to go
{"do": "end", "keep": true}                       of a refill; its store stays if it was committed
{"do": "quit"}
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from elastic.vllm.coordination.coordinator import Coordinators
from elastic.vllm.coordination.handshake import Addresses, Handshake, Shared
from elastic.vllm.records import Bootstrap, CoordinationInfo
from elastic.vllm.worker.interface import ORDER_KEY, order_of

STATE_NAME, SOCKET_NAME = "coordination.json", "coordination.sock"
AGAIN_S = 0.5
"""Before a coordinator that has ended is started again."""
BIND_S = 1.0
PORTS = 5
"""Master ports that vLLM hands on to its groups (core_client.py: get_open_ports_list)."""


class Ports(msgspec.Struct, frozen=True):
    """`coordination.json`: where a process that is started again must listen."""

    host: str
    rpc: int
    store: int
    waves: tuple[int, int, int]
    pid: int


def free_ports(host: str, count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((host, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def make_store(port: int = 0) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


class Host:
    def __init__(self, run_dir: Path, host: str) -> None:
        self._run_dir, self._path = run_dir, run_dir / STATE_NAME
        known = self._known()
        if known is None:
            rpc, *waves = free_ports(host, 4)
            self._ports = Ports(host, rpc, 0, (waves[0], waves[1], waves[2]), os.getpid())
        else:
            self._ports = msgspec.structs.replace(known, pid=os.getpid())
        self._store = make_store(self._ports.store)
        self._handshake: Handshake | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._context = zmq.asyncio.Context()
        self._refill_store: Any = None
        self._kept_store: Any = None
        self._refill: Bootstrap | None = None
        self._refill_epoch = 0
        self._count = 0
        self._coordinators = Coordinators()
        self._waves: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._fresh = False
        """The next coordinator is a new group's first: nobody can have called one that died."""
        self._quit = asyncio.Event()
        self._again = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._save()

    def _known(self) -> Ports | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._path.read_bytes(), type=Ports)
        return None

    def _save(self) -> None:
        self._ports = msgspec.structs.replace(self._ports, store=self._store.port)
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(self._ports))
        fresh.replace(self._path)

    @property
    def addresses(self) -> Addresses:
        host = self._ports.host
        return Addresses(*(f"tcp://{host}:{port}" for port in self._ports.waves))

    # --- orders -----------------------------------------------------------------------------------------------------------

    def info(self) -> CoordinationInfo:
        shake, ports, waves = self._handshake, self._ports, self._waves
        expected = shake.expected if shake is not None else ()
        keys: tuple[str, ...] = ()
        if self._refill is not None and self._refill_store is not None:
            order = order_of(json.loads(self._refill_store.get(ORDER_KEY)))
            names = [f"eep_ready/{slot}" for slot in order.members]
            keys = tuple(name for name in names if self._refill_store.check([name]))
        addresses = self.addresses
        return CoordinationInfo(
            pid=os.getpid(),
            host=ports.host,
            rpc_port=ports.rpc,
            store_port=self._store.port,
            coordinator_addresses=(addresses.front_publish, addresses.back_output, addresses.back_publish),
            coordinator_pid=waves.pid if waves is not None and self._waves_run else 0,
            coordinator_starts=self._starts,
            expected=expected,
            hello=tuple(sorted(shake.hello)) if shake is not None else (),
            answered=tuple(sorted(shake.answered)) if shake is not None else (),
            ready=tuple(sorted(shake.ready)) if shake is not None else (),
            trouble=shake.trouble if shake is not None else "",
            refill=self._refill,
            refill_epoch=self._refill_epoch,
            refill_keys=keys,
        )

    async def obey(self, order: dict[str, Any]) -> None:
        """Raises ValueError, KeyError or TypeError for what is no order."""
        match order.get("do"):
            case "info":
                pass
            case "start":
                await self._start([int(slot) for slot in order["slots"]])
            case "live":
                self._count = int(order["count"])
                if not self._waves_run:  # of a process that was started again itself
                    self._again.set()
            case "stand-by":
                await self._coordinators.stand_by()
            case "refill":
                self._open_refill(order)
            case "answer":
                await self._answer()
            case "end":
                self._end_refill(keep=bool(order["keep"]))
            case "quit":
                self._quit.set()
            case other:
                raise ValueError(f"unknown order {other!r}")

    async def _start(self, slots: list[int]) -> None:
        # keys of an earlier group, such as dp_master_port, would be read by this one
        self._store = make_store()
        self._save()
        self._end_refill(keep=False)
        self._kept_store = None
        self._count, self._fresh = len(slots), True
        await self._stop_waves()
        host = self._ports.host
        port, *ports = free_ports(host, PORTS)
        shared = Shared(len(slots), host, port, tuple(ports), self._store.port)
        self._listen(Handshake(tuple(sorted(slots)), self.addresses, shared))
        self._again.set()

    def _open_refill(self, given: dict[str, Any]) -> None:
        host = self._ports.host
        self._end_refill(keep=False)
        self._refill_store = make_store()
        port, *ports = free_ports(host, PORTS)
        found = order_of(given["order"] | {"store_host": host, "store_port": self._refill_store.port})
        self._refill_store.set(ORDER_KEY, json.dumps(found._asdict()).encode())
        size = int(given["size"])
        self._refill = Bootstrap(size, host, port, tuple(ports), self._refill_store.port)
        self._refill_epoch = found.epoch
        shared = Shared(size, host, port, tuple(ports), self._refill_store.port)
        redundant, most = int(given["redundant_experts"]), int(given["max_size"])
        self._listen(Handshake(found.joiners, self.addresses, shared, redundant, most))

    async def _answer(self) -> None:
        if self._handshake is None or self._socket is None:
            raise ValueError("no refill is open")
        for reply in self._handshake.answer(list(self._handshake.expected)):
            await self._socket.send_multipart(reply)

    def _end_refill(self, *, keep: bool) -> None:
        if keep and self._refill_store is not None:
            self._kept_store = self._refill_store  # the group's coordination store from now on
        self._refill_store = self._refill = None
        self._hush()

    # --- handshake --------------------------------------------------------------------------------------------------------

    def _listen(self, handshake: Handshake) -> None:
        self._hush()
        self._handshake = handshake
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._bind(self._socket)
        self._tasks.append(asyncio.create_task(self._shake(handshake, self._socket)))

    def _bind(self, listener: zmq.asyncio.Socket) -> None:
        """One that was closed just now leaves the port a moment later. Raises ZMQError where somebody else has it."""
        until = time.monotonic() + BIND_S
        while True:
            try:
                listener.bind(f"tcp://{self._ports.host}:{self._ports.rpc}")
                return
            except zmq.ZMQError:
                if time.monotonic() > until:
                    raise
                time.sleep(BIND_S / 100)

    def _hush(self) -> None:
        """The port is free while nobody is expected: vLLM's own scaling listens there, in rank 0."""
        if self._socket is not None:
            self._socket.close(linger=1000)
        self._socket = None

    async def _shake(self, handshake: Handshake, listener: zmq.asyncio.Socket) -> None:
        with contextlib.suppress(zmq.ZMQError):  # closed by `_hush`
            while not handshake.done:
                identity, *_, payload = await listener.recv_multipart()
                for reply in handshake.on_message(identity, payload):
                    await listener.send_multipart(reply)
        if listener is self._socket:
            self._hush()

    # --- the coordinator --------------------------------------------------------------------------------------------------

    @property
    def _waves_run(self) -> bool:
        return self._waves is not None and self._waves.returncode is None

    async def _stop_waves(self) -> None:
        waves, self._waves = self._waves, None
        if waves is not None and waves.returncode is None:
            waves.kill()
            await waves.wait()

    async def _keep_waves(self) -> None:
        while True:
            await self._again.wait()
            self._again.clear()
            if self._count and not self._waves_run:
                addresses, wake = self.addresses, () if self._fresh else ("--wake",)
                self._fresh = False
                given = (addresses.front_publish, addresses.back_output, addresses.back_publish, *wake)
                waves = await self._coordinators.start((str(self._count), *given))
                self._waves, self._starts = waves, self._starts + 1
                self._tasks.append(asyncio.create_task(self._watch_waves(waves)))

    async def _watch_waves(self, waves: asyncio.subprocess.Process) -> None:
        await waves.wait()
        if waves is self._waves and not self._quit.is_set():
            sys.stderr.write(f"coordinator {waves.pid} has ended with {waves.returncode}; started again\n")
            await asyncio.sleep(AGAIN_S)
            self._again.set()

    # --- running ----------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self._quit.set()

    async def run(self) -> None:
        path = self._run_dir / SOCKET_NAME
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, path)
        self._tasks.append(asyncio.create_task(self._keep_waves()))
        try:
            await self._quit.wait()
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._stop_waves()
            await self._coordinators.aclose()
            self._hush()
            self._context.destroy(linger=0)
            path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                try:
                    await self.obey(json.loads(line))
                    answer = msgspec.json.encode(self.info())
                except Exception as error:  # one bad order must not end what the group hangs on
                    answer = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
                writer.write(answer + b"\n")
                await writer.drain()
        writer.close()
