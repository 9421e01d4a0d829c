"""One process that stands by to become a rank (`elastic.vllm.spare`, run by vLLM's interpreter), and the socket to it."""

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.errors import ElasticError
from elastic.launch.base import Launched
from elastic.paths import log_path
from healer.targets.vllm.processes import Processes

MODULE = "elastic.vllm.spare"
ANSWER_S = 5.0
"""From an order to its answer, which is the spare's first act."""


def log_name(number: int) -> str:
    return f"spare-{number}"


class Unfit(ElasticError):
    """This module cannot be imported before the fork; the spare has ended."""

    def __init__(self, module: str) -> None:
        super().__init__(f"importing {module} initialises CUDA, so it is left out")
        self.module = module


class Spare:
    """Used in the target's loop. Whoever drops it ends its process, by `Processes.fence`."""

    def __init__(
        self, number: int, launched: Launched, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.number, self.process = number, launched
        self._reader, self._writer = reader, writer

    @classmethod
    async def start(
        cls,
        number: int,
        processes: Processes,
        python: str,
        environment: Mapping[str, str],
        without: Sequence[str] = (),
    ) -> "Spare":
        """`without`: modules that it does not import. Raises ElasticError where no process can be started."""
        ours, its = socket.socketpair()
        with its:
            try:
                command = [python, "-m", MODULE, *without]
                launched = processes.launch(log_name(number), command, environment, stdin=its.fileno())
                reader, writer = await asyncio.open_unix_connection(sock=ours)
            except BaseException:
                ours.close()  # which ends the process, where there is one
                raise
        return cls(number, launched, reader, writer)

    @property
    def gone(self) -> bool:
        return self._reader.at_eof()

    async def up(self) -> None:
        """Until all is imported. Raises Unfit; ElasticError where it has ended, or says what nobody understands."""
        said = await self._hear()
        if module := said.get("unfit"):
            raise Unfit(str(module))
        if said.get("ready") is not True:
            raise ElasticError("it has ended" if not said else f"it is no spare: it says {said}")

    async def become(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> bool:
        """Have it be the rank of this command from here on. False: it is none, and is to be ended."""
        order = json.dumps({"argv": list(command), "env": dict(environment), "log": str(log)})
        try:
            async with asyncio.timeout(ANSWER_S):
                self._writer.write(order.encode() + b"\n")
                await self._writer.drain()
                said = await self._hear()
        except (OSError, TimeoutError, ElasticError):
            return False
        return said.get("taken") is True

    def close(self) -> None:
        self._writer.close()

    async def _hear(self) -> dict[str, Any]:
        """Its next message; an empty one where it has ended. Raises ElasticError for what is none."""
        try:
            line = await self._reader.readline()
            found = json.loads(line) if line.endswith(b"\n") else {}
        except ConnectionError:
            return {}
        except ValueError as error:
            raise ElasticError(f"it is no spare: {error}") from error
        if not isinstance(found, dict):
            raise ElasticError("it is no spare: its message is no mapping")
        return found


def log_of(run_dir: Path, number: int) -> Path:
    return log_path(run_dir, log_name(number))
