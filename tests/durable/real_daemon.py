"""`healer` with points at which it ends or stops itself: `CRASH_POINTS=FILE python -m tests.durable.real_daemon run --policy FILE`.

With `RECORDING_RANKS` set, its ranks write down what they accept (`real_rank`).
"""

import os
from pathlib import Path

from elastic.launch.base import Launched
from elastic.launch.local import LocalLauncher
from tests.durable.crashing_daemon import install
from tests.durable.points import Points


def main() -> None:
    points = Points(Path(os.environ["CRASH_POINTS"]))
    install(points)
    launch, end, spawn = LocalLauncher.launch, LocalLauncher.end, LocalLauncher._spawn

    def launched(self: LocalLauncher, slot: int, incarnation: int) -> Launched:
        points.pass_(f"before launch of rank-{slot}.{incarnation}")
        started = launch(self, slot, incarnation)
        points.pass_(f"after launch of rank-{slot}.{incarnation}")
        return started

    def ended(self: LocalLauncher, process_: Launched) -> None:
        points.pass_(f"before end of {process_.pid}")
        end(self, process_)
        points.pass_(f"after end of {process_.pid}")

    def spawned(self: LocalLauncher, name: str, arguments: list[str]) -> Launched:
        recorded = ["tests.durable.real_rank"] if arguments[0] == "elastic.rank" else []
        return spawn(self, name, recorded + arguments)

    LocalLauncher.launch = launched  # type: ignore[method-assign]
    LocalLauncher.end = ended  # type: ignore[method-assign]
    if "RECORDING_RANKS" in os.environ:
        LocalLauncher._spawn = spawned  # type: ignore[method-assign]
    from healer.cli import main as healer_main

    healer_main()


if __name__ == "__main__":
    main()
