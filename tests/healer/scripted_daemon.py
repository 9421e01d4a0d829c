"""The command `healer` over the scripted executor, as a process."""

import elastic.controller.executor as seam
from tests.healer.scripted import ScriptedExecutor

seam.Executor = ScriptedExecutor  # type: ignore[assignment,misc]

if __name__ == "__main__":
    from healer.cli import main

    main()
