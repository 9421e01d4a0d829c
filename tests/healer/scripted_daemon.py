"""The command `healer` over the scripted executor, as a process."""

import os

import elastic.controller.executor as seam
from healer import log_writer
from tests.healer.scripted import ScriptedExecutor

seam.Executor = ScriptedExecutor  # type: ignore[assignment,misc]

log_writer.MAX_BYTES = int(os.environ.get("LOG_BYTES", log_writer.MAX_BYTES))

if __name__ == "__main__":
    from healer.cli import main

    main()
