"""The API's socket and its server."""

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from elastic.errors import ElasticError

MAX_CONNECTIONS = 200
PATIENCE_S = 0.5
"""For a port that is in use."""


def listen(host: str, port: int) -> socket.socket:
    """Bind before anything else is started. Raises ElasticError when the address is taken."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ElasticError(f"spec.api.host: {host!r} cannot be resolved: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(sock, address)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ElasticError(
            f"the API cannot listen on {host}:{port}: {error.strerror}; another daemon may run, or change spec.api.port"
        ) from error
    return sock


def _bind(sock: socket.socket, address: Any) -> None:
    """Raises OSError. A daemon that was killed this instant may still have the port."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            sock.bind(address)
            sock.listen(128)
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise
        time.sleep(0.01)


class _Connection(H11Protocol):
    """One of a bounded number: a client that opens many and says nothing must not take the daemon's file descriptors, which
    healing needs, and must not keep others out."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = time.monotonic()
        others = [
            c for c in self.connections if isinstance(c, _Connection) and c is not self and not c.transport.is_closing()
        ]
        if len(others) < MAX_CONNECTIONS:
            return
        # whoever has asked nothing for longest; where all are being answered, the newcomer
        silent = min((c for c in others if c.idle), key=lambda c: c.since, default=self)
        silent.transport.abort()

    @property
    def idle(self) -> bool:
        """Nothing is being answered: there is no whole request yet, or the last one was answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.more_body or cycle.response_complete


class Server(uvicorn.Server):
    """Serves until `should_exit`; signals are the daemon's business."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
