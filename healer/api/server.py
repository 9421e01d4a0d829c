"""The API's socket and its server."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from elastic.errors import ElasticError

MAX_CONNECTIONS = 200


def listen(host: str, port: int) -> socket.socket:
    """Bind before anything else is started. Raises ElasticError when the address is taken."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ElasticError(f"spec.api.host: {host!r} cannot be resolved: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ElasticError(
            f"the API cannot listen on {host}:{port}: {error.strerror}; another daemon may run, or change spec.api.port"
        ) from error
    return sock


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
        silent = min((c for c in others if c.cycle is None), key=lambda c: c.since, default=self)
        silent.transport.abort()


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
