"""A spare: a process that has done all of a boot that needs no slot, and waits to become a rank.

It holds no weights and takes part in nothing. Its socket answers Query (who are you) and Adopt (become this rank); when
it has become one, it is a rank like any other, under the rank's own socket and log.
"""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog
import torch

from elastic import process
from elastic.channel import read_frame
from elastic.config import GroupConfig
from elastic.cores import confine_rank
from elastic.errors import ElasticError
from elastic.fence import Controllers, part
from elastic.paths import log_path, socket_path, spare_socket, unnamed_socket
from elastic.protocol import PROTOCOL_VERSION, Adopt, Done, Hello, Query, SpareStatus, encode
from elastic.rank.architecture import Arena, ExpertBuffers
from elastic.rank.boot import Base, Stopwatch, prepare, serve
from elastic.rank.buffers import Buffers
from elastic.rank.device import gpu_of, open_device
from elastic.rank.fatal import end_if_fatal
from elastic.rank.runner import Runner

log = structlog.get_logger("elastic.spare")


def stand_by(config: GroupConfig, number: int) -> None:
    """Run until told to become a rank, then as that rank. Raises ElasticError when the process cannot become one."""
    base, slots = _ready(config, number)
    order = asyncio.run(_Waiting(config, number, base, slots).adopted())
    name = f"rank-{order.slot}.{order.incarnation}"
    path = log_path(config.root, name)
    with path.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    confine_rank(config, order.slot)
    base.watch = Stopwatch()
    serve(base, order.slot, order.incarnation, socket_path(config.root, order.slot, order.incarnation))


def _ready(config: GroupConfig, number: int) -> tuple[Base, tuple[int, ...]]:
    device, slots = open_device(config, number % config.max_ranks), tuple(range(config.max_ranks))
    if config.on_gpu:
        if config.spare_gpus:
            gpu = config.spare_gpus[number % len(config.spare_gpus)]
            device = open_device(msgspec.structs.replace(config, gpus=(gpu,)), 0)
        slots = slots_of_gpu(config, device.place.index, torch.cuda.device_count())
    own = prepared_for(config, number, slots)
    base = prepare(config, own, device)
    with base.watch.part("kernels"):
        _load_kernels(base)
    return base, (own, *(slot for slot in slots if slot != own))


def prepared_for(config: GroupConfig, number: int, slots: tuple[int, ...]) -> int:
    """The slot whose exchange spare `number` opens, of those that it may take: all of them have one before any has two."""
    if not config.spare_gpus:
        return number % config.max_ranks
    gpus = config.spare_gpus
    before = sum(gpus[n % len(gpus)] == gpus[number % len(gpus)] for n in range(number))
    return slots[before % len(slots)]


def slots_of_gpu(config: GroupConfig, gpu: int, count: int) -> tuple[int, ...]:
    """The slots that a spare on this GPU may take, of `count` visible ones: those of the GPU; all, where it is no slot's
    GPU, so that no two ranks come to share one that were apart."""
    slots = tuple(range(config.max_ranks))
    return tuple(s for s in slots if gpu_of(config, s, count) == gpu) or slots


def _load_kernels(base: Base) -> None:
    """Run the step of a model of one layer, all peers masked: libraries and kernels are loaded by their first use."""
    config = base.config
    small = replace(base.arch, layers=1, moe_layers=(0,))
    try:
        arena, buffers = Arena(small.dense_shapes(), base.device), Buffers()
        experts = ExpertBuffers(small, config.slots_per_rank, base.device)
        Runner(config, small, arena, experts, base.ep, buffers, base.device).capture()
    except Exception as error:
        end_if_fatal(error, "loading kernels")
        # a spare all the same, a slower one
        log.warning("kernels are loaded at their first use", why=f"{type(error).__name__}: {error}")


class _Waiting:
    """The socket of a spare, until somebody adopts it."""

    def __init__(self, config: GroupConfig, number: int, base: Base, slots: tuple[int, ...]) -> None:
        self._config, self._number = config, number
        self._boot_s, self._slots = base.watch.spent_s, slots
        self._order: asyncio.Future[Adopt] | None = None
        self._controllers = Controllers()

    async def adopted(self) -> Adopt:
        self._order = asyncio.get_running_loop().create_future()
        address = spare_socket(self._config.root, self._number)
        unnamed = unnamed_socket(address)
        Path(unnamed).unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._connected, unnamed)
        os.rename(unnamed, address)
        print(f"spare {self._number} waits for one of slots {list(self._slots)}, pid {os.getpid()}", flush=True)
        order = await self._order
        # not waited for: whoever else is connected may stay
        server.close()
        Path(address).unlink(missing_ok=True)
        return order

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._order is not None
        try:
            hello = await read_frame(reader)
            if not isinstance(hello, Hello) or hello.version != PROTOCOL_VERSION or hello.group != self._config.name:
                return
            if why := self._controllers.admit(hello, writer):
                print(f"spare: refused a controller: {why}", flush=True)
                await part(reader)
                return
            while True:
                message = await read_frame(reader)
                if writer not in self._controllers:
                    continue
                if isinstance(message, Query):
                    writer.write(encode(self._status(message.id)))
                elif isinstance(message, Adopt) and not self._order.done():
                    writer.write(encode(Done(id=message.id)))
                    await writer.drain()
                    self._order.set_result(message)
                    return
        except (asyncio.IncompleteReadError, OSError):
            pass
        except ElasticError as error:
            print(f"spare: closed a connection: {error}", flush=True)
        finally:
            self._controllers.discard(writer)
            writer.close()

    def _status(self, id_: int) -> SpareStatus:
        pid = os.getpid()
        return SpareStatus(
            id=id_,
            number=self._number,
            pid=pid,
            pid_start=process.start_time(pid),
            slots=self._slots,
            boot_s=self._boot_s,
        )
