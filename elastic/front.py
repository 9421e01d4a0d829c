"""What the processes that clients talk to have in common, the gateway and the router: one of them for a place, a TCP socket,
an HTTP server that leaves signals to its owner, log lines on standard error, and a clean end."""

import asyncio
import contextlib
import errno
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from starlette.applications import Starlette

from elastic import lockfile
from elastic.errors import ElasticError

BACKLOG = 2048
CLOSE_DEADLINE_S = 2
"""For connections that have nothing more to say."""


class Server(uvicorn.Server):
    """Signals are ours: uvicorn would stop listening at once, and clients would see refused connections, not 503."""

    def __init__(self, app: Starlette) -> None:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=CLOSE_DEADLINE_S
        )
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.contextmanager
def claimed(path: Path, taken: str) -> Iterator[None]:
    """Hold the lock file at `path`, which the kernel drops with the process: a file that a killed one left never stands in
    the way. Raises ElasticError, with the words `taken` where another process holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = lockfile.claim(path)
    except OSError as error:
        raise ElasticError(f"{path}: cannot be written: {error.strerror}") from error
    except lockfile.Held:
        raise ElasticError(taken) from None
    with lock:
        yield


def listen(host: str, port: int, hint: str) -> socket.socket:
    """A bound TCP socket; port 0 picks a free one. Raises ElasticError saying what is wrong with the address, with `hint`
    where it is taken."""
    if not 0 <= port <= 65535:
        raise ElasticError(f"cannot listen on {host}:{port}: a port is 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )[0]
        # with the protocol named: asyncio turns Nagle's algorithm off only on sockets that say they are TCP, and each
        # answer would wait 40 ms for the client's delayed acknowledgement
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ElasticError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        more = f"; {hint}, or 0 for a free one" if error.errno == errno.EADDRINUSE else ""
        raise ElasticError(f"cannot listen on {host}:{port}: {error.strerror or error}{more}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT from now on, in the running loop."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    return stop


def run_to_exit_code(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a process with log lines on standard error. Returns 0, or 1 after one line that says why it cannot start."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    try:
        asyncio.run(main())
    except ElasticError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
