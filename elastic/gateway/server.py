"""The gateway process: claims the run directory, listens, announces itself in `gateway.json`, ends cleanly.

A second gateway for the same run directory is refused by a lock that the kernel drops with the process, so a file left
by a killed one never stands in the way.
"""

import asyncio
import contextlib
import fcntl
import os
import random
import socket
from collections.abc import Generator, Iterator
from pathlib import Path

import msgspec
import structlog
import uvicorn

from elastic import process
from elastic.config import read_model_shape
from elastic.errors import ElasticError
from elastic.gateway.api import create_app
from elastic.gateway.completions import Service
from elastic.gateway.control import ControlServer
from elastic.gateway.dispatcher import Dispatcher
from elastic.gateway.metrics import GatewayMetrics
from elastic.gateway.text import load_tokenizer, read_eos_ids

log = structlog.get_logger("elastic.gateway")

CLOSE_DEADLINE_S = 2
"""For connections that have nothing more to say."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    group: str
    run_dir: str
    checkpoint: str
    model: str
    host: str = "127.0.0.1"
    port: int = 0
    max_queued: int = 256
    request_timeout_s: float = 300.0
    grace_s: float = 30.0
    """After SIGTERM: how long requests in flight may take to end."""


class Announcement(msgspec.Struct, frozen=True):
    """The content of `gateway.json`."""

    pid: int
    pid_start: int
    http: str
    """Base URL."""
    control: str
    """Path of the control socket."""


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would stop listening at once, and clients would see refused connections, not 503."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.contextmanager
def _claim(run_dir: Path) -> Iterator[None]:
    path = run_dir / "gateway.lock"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise ElasticError(f"{path}: cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ElasticError(f"{run_dir}: another gateway runs here; gateway.json there names it") from None
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        hint = "; choose another with --port, or 0 for a free one" if error.errno == 98 else ""
        raise ElasticError(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}") from error
    except OverflowError:
        raise ElasticError(f"cannot listen on {host}:{port}: a port is 0 to 65535") from None


def _announce(path: Path, announcement: Announcement) -> None:
    """Readers see the old file or the whole new one."""
    draft = path.with_suffix(".tmp")
    draft.write_bytes(msgspec.json.encode(announcement) + b"\n")
    draft.rename(path)


async def serve(options: Options, *, stop: asyncio.Event, ready: asyncio.Event | None = None) -> None:
    """Run until `stop` is set. `ready` is set once `gateway.json` is written. Raises ElasticError for whatever keeps it
    from starting."""
    shape = read_model_shape(options.checkpoint)
    tokenizer, eos_ids = load_tokenizer(options.checkpoint), read_eos_ids(options.checkpoint)
    run_dir = Path(options.run_dir)
    with _claim(run_dir), _listen(options.host, options.port) as listener:
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
        control = ControlServer(run_dir / "gateway.sock", options.group, dispatcher)
        await control.bind()
        try:
            await _run(options, service, control, listener, stop, ready)
        finally:
            await control.aclose()
            (run_dir / "gateway.json").unlink(missing_ok=True)


async def _run(
    options: Options,
    service: Service,
    control: ControlServer,
    listener: socket.socket,
    stop: asyncio.Event,
    ready: asyncio.Event | None,
) -> None:
    server = _Server(
        uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=CLOSE_DEADLINE_S,
        )
    )
    async with asyncio.TaskGroup() as tasks:
        links = tasks.create_task(service.dispatcher.run(), name="dispatcher")
        await control.start()
        http = tasks.create_task(server.serve(sockets=[listener]), name="http")
        await server.listening.wait()
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        pid = os.getpid()
        path = Path(options.run_dir) / "gateway.sock"
        _announce(path.with_suffix(".json"), Announcement(pid, process.start_time(pid), url, str(path)))
        log.info("gateway_listens", http=url, group=options.group, model=options.model)
        if ready is not None:
            ready.set()
        await stop.wait()
        log.info("gateway_stops", in_flight=len(service.dispatcher.ledger), grace_s=options.grace_s)
        await service.dispatcher.drain(options.grace_s)
        server.should_exit = True
        await http
        links.cancel()
