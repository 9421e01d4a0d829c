"""The socket on which the controller names the ranks. Whoever speaks otherwise is cut off, with a line in the log."""

import asyncio
import contextlib
from pathlib import Path

import msgspec
import structlog

from elastic.channel import read_frame
from elastic.errors import ElasticError, NeedsReplan
from elastic.fence import Controllers, part
from elastic.gateway.dispatcher import Dispatcher
from elastic.protocol import PROTOCOL_VERSION, AnyMessage, GatewayQuery, Hello, Refused, Routes, encode

log = structlog.get_logger("elastic.gateway")

HELLO_DEADLINE_S = 5.0
ANSWER_DEADLINE_S = 5.0


class ControlServer:
    """`bind` first, `start` once the dispatcher runs, `aclose` at the end. A controller that leaves changes nothing."""

    def __init__(self, path: Path, group: str, dispatcher: Dispatcher) -> None:
        self._path, self._group, self._dispatcher = path, group, dispatcher
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._controllers = Controllers()

    async def bind(self) -> None:
        """Raises ElasticError when the socket cannot be made. Replaces the socket file of an earlier gateway."""
        try:
            self._server = await asyncio.start_unix_server(self._serve, str(self._path), start_serving=False)
            self._path.chmod(0o600)
        except OSError as error:
            raise ElasticError(f"{self._path}: cannot listen for the controller: {error}") from error

    async def start(self) -> None:
        assert self._server is not None, "bind first"
        await self._server.start_serving()

    async def aclose(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._talk(reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            log.info("controller_gone")
        except (ElasticError, TimeoutError) as error:
            log.warning("control_connection_closed", why=str(error) or "silent")
        finally:
            self._controllers.discard(writer)
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HELLO_DEADLINE_S):
            hello = await read_frame(reader)
        if not isinstance(hello, Hello) or hello.role != "controller":
            raise ElasticError(f"the first message must be a controller's Hello, not {hello}")
        if (hello.group, hello.version) != (self._group, PROTOCOL_VERSION):
            raise ElasticError(
                f"group {hello.group!r} with protocol {hello.version}, "
                f"this is group {self._group!r} with protocol {PROTOCOL_VERSION}"
            )
        if why := self._controllers.admit(hello, writer):
            await part(reader)
            raise ElasticError(why)
        log.info("controller_connected", term=hello.term)
        while True:
            message = await read_frame(reader)
            if writer not in self._controllers:
                log.warning(
                    "control_message_ignored", message=type(message).__name__, why="its controller is superseded"
                )
                continue
            answer = self._answer(message)
            writer.write(encode(answer))
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                await writer.drain()

    def _answer(self, message: AnyMessage) -> AnyMessage:
        match message:
            case Routes():
                try:
                    self._dispatcher.set_routes(message.epoch, message.routes)
                except NeedsReplan as stale:
                    return Refused(id=message.id, epoch=self._dispatcher.epoch, why=str(stale))
            case GatewayQuery():
                pass
            case _:
                raise ElasticError(f"{type(message).__name__} is no command for a gateway")
        return msgspec.structs.replace(self._dispatcher.status(message.id), term=self._controllers.term)
