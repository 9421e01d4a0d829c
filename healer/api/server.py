"""The API's socket and its server."""

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from elastic.errors import ElasticError


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


class Server(uvicorn.Server):
    """Serves until `should_exit`; signals are the daemon's business."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="h11",
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
