"""Logs: events with fields, to stderr, for people (`console`) or machines (`json`). No secret is ever a field."""

import logging
import sys
from typing import Any, Literal

import structlog

LogFormat = Literal["console", "json"]


def configure(log_format: LogFormat, level: str) -> None:
    """Once, at the start of the process. Standard-library loggers (the executor's, uvicorn's) come out the same way."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final: list[structlog.typing.Processor]
    if log_format == "json":
        final = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        final = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_plain_traceback)]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
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


class LateLog:
    """Lines that wait until the work is done: whoever reads stderr slowly must not hold up a healing. The owner flushes."""

    def __init__(self, name: str) -> None:
        self._log = structlog.get_logger(name)
        self._lines: list[tuple[str, str, dict[str, Any]]] = []

    def say(self, level: Literal["debug", "info", "warning", "error"], event: str, **fields: Any) -> None:
        self._lines.append((level, event, fields))

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        for level, event, fields in lines:
            getattr(self._log, level)(event, **fields)
