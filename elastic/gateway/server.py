"""The gateway process: claims the run directory, listens, announces itself in `gateway.json`, ends cleanly.

A second gateway for the same run directory is refused by a lock that the kernel drops with the process, so a file left
by a killed one never stands in the way.
"""

import asyncio
import os
import random
import socket
from pathlib import Path

import msgspec
import structlog

from elastic import process
from elastic.config import read_model_shape
from elastic.front import Server, claimed, listen, url_of
from elastic.gateway.api import create_app
from elastic.gateway.completions import Service
from elastic.gateway.control import ControlServer
from elastic.gateway.dispatcher import Dispatcher
from elastic.gateway.metrics import GatewayMetrics
from elastic.gateway.text import load_tokenizer, read_eos_ids
from elastic.paths import gateway_path, gateway_socket, write_json

log = structlog.get_logger("elastic.gateway")

PORT_HINT = "choose another with --port (in a policy: spec.target.gateway.port)"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    group: str
    run_dir: str
    checkpoint: str
    model: str
    host: str = "127.0.0.1"
    port: int = 0
    max_queued: int = 256
    max_model_len: int = 0
    """Prompt and answer together; 0: what the model allows."""
    request_timeout_s: float = 300.0
    grace_s: float = 30.0
    """After SIGTERM: how long requests in flight may take to end."""


class Announcement(msgspec.Struct, frozen=True):
    """The content of `gateway.json`."""

    pid: int
    pid_start: int
    http: str
    """Base URL."""


async def serve(options: Options, *, stop: asyncio.Event, ready: asyncio.Event | None = None) -> None:
    """Run until `stop` is set. `ready` is set once `gateway.json` is written. Raises ElasticError for whatever keeps it
    from starting."""
    shape = read_model_shape(options.checkpoint)
    if options.max_model_len:
        shape = msgspec.structs.replace(shape, max_position=min(shape.max_position, options.max_model_len))
    tokenizer, eos_ids = load_tokenizer(options.checkpoint), read_eos_ids(options.checkpoint)
    run_dir = Path(options.run_dir)
    taken = f"{run_dir}: another gateway runs here; gateway.json there names it"
    with claimed(run_dir / "gateway.lock", taken), listen(options.host, options.port, PORT_HINT) as listener:
        metrics = GatewayMetrics()
        dispatcher = Dispatcher(
            options.group,
            max_queued=options.max_queued,
            request_timeout_s=options.request_timeout_s,
            metrics=metrics,
        )
        entropy = random.SystemRandom()
        service = Service(
            model=options.model,
            shape=shape,
            tokenizer=tokenizer,
            eos_ids=eos_ids,
            dispatcher=dispatcher,
            metrics=metrics,
            request_timeout_s=options.request_timeout_s,
            draw_seed=lambda: entropy.getrandbits(63),
        )
        control = ControlServer(Path(gateway_socket(run_dir)), options.group, dispatcher)
        await control.bind()
        try:
            await _run(options, service, control, listener, stop, ready)
        finally:
            await control.aclose()
            gateway_path(run_dir).unlink(missing_ok=True)


async def _run(
    options: Options,
    service: Service,
    control: ControlServer,
    listener: socket.socket,
    stop: asyncio.Event,
    ready: asyncio.Event | None,
) -> None:
    server = Server(create_app(service))
    async with asyncio.TaskGroup() as tasks:
        links = tasks.create_task(service.dispatcher.run(), name="dispatcher")
        await control.start()
        http = tasks.create_task(server.serve(sockets=[listener]), name="http")
        await server.listening.wait()
        url = url_of(listener)
        pid = os.getpid()
        write_json(gateway_path(Path(options.run_dir)), Announcement(pid, process.start_time(pid), url))
        log.info("gateway_listens", http=url, group=options.group, model=options.model)
        if ready is not None:
            ready.set()
        await stop.wait()
        log.info("gateway_stops", in_flight=len(service.dispatcher.ledger), grace_s=options.grace_s)
        await service.dispatcher.drain(options.grace_s)
        server.should_exit = True
        await http
        links.cancel()
