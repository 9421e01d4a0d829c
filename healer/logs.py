"""Logs: events with fields, to stderr, for people (`console`) or machines (`json`). No secret is ever a field."""

import asyncio
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import structlog

from healer import log_writer
from healer.log_writer import Stream, Writer

LogFormat = Literal["console", "json"]

SOON_S = 0.05

_writers: list[Writer] = []
"""Of this process's stderr: none before `configure`."""


def dropped() -> int:
    """Lines of this process that stderr did not take in time."""
    return sum(writer.dropped for writer in _writers)


def configure(log_format: LogFormat, level: str) -> None:
    """Once, at the start of the process. Standard-library loggers (the executor's, uvicorn's) come out the same way. From then
    on nobody waits for whoever reads stderr: see `healer.log_writer`."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.MaybeTimeStamper(fmt="iso", utc=True),
    ]
    final: list[structlog.typing.Processor]
    if log_format == "json":
        final = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        final = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr is not None and sys.stderr.isatty(), exception_formatter=_plain_traceback
            )
        ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = _Handler(_unhurried_stderr())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


_plain_traceback = structlog.dev.plain_traceback


def _unhurried_stderr() -> Writer:
    # None: it is closed, and its number would soon be that of another file
    fd = sys.stderr.fileno() if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY)
    writer = Writer(fd, log_writer.MAX_BYTES)
    _writers[:] = [writer]
    sys.stderr = Stream(writer, fd)
    return writer


class _Handler(logging.Handler):
    """Says how many lines are missing where they are missing."""

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer, self._told = writer, 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            missing = self._writer.dropped - self._told
            if missing and self._writer.has_room:
                text = f"log.dropped: {missing} lines that stderr did not take in time"
                self._put(logging.LogRecord(record.name, logging.WARNING, "", 0, text, None, None))
                self._told += missing
            self._put(record)
        except Exception:
            self.handleError(record)

    def _put(self, record: logging.LogRecord) -> None:
        self._writer.put(f"{self.format(record)}\n".encode(errors="backslashreplace"))


class LateLog:
    """Lines that wait until the work is done: neither to write them nor whoever reads stderr slowly may hold up a healing. Each
    has the time at which it was said. The owner flushes."""

    def __init__(self, name: str) -> None:
        self._log = structlog.get_logger(name)
        self._lines: list[tuple[str, str, dict[str, Any]]] = []
        self._due: asyncio.TimerHandle | None = None

    def say(self, level: Literal["debug", "info", "warning", "error"], event: str, **fields: Any) -> None:
        stamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        self._lines.append((level, event, {"timestamp": stamp} | fields))

    def flush(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        lines, self._lines = self._lines, []
        for level, event, fields in lines:
            getattr(self._log, level)(event, **fields)

    def flush_soon(self) -> None:
        """Behind what the loop has to do now: a line takes up to a millisecond, and the executor's turn comes first."""
        if self._lines and self._due is None:
            self._due = asyncio.get_running_loop().call_later(SOON_S, self.flush)
