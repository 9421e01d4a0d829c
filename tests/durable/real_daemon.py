"""`healer` with points at which it ends itself: `CRASH_POINTS=FILE python -m tests.durable.real_daemon run --policy FILE`."""

import os
from pathlib import Path

from elastic.launch.base import Launched
from elastic.launch.local import LocalLauncher
from tests.durable.crashing_daemon import install
from tests.durable.points import Points


def main() -> None:
    points = Points(Path(os.environ["CRASH_POINTS"]))
    install(points)
    launch = LocalLauncher.launch

    def launched(self: LocalLauncher, slot: int, incarnation: int) -> Launched:
        points.pass_(f"before launch of rank-{slot}.{incarnation}")
        started = launch(self, slot, incarnation)
        points.pass_(f"after launch of rank-{slot}.{incarnation}")
        return started

    LocalLauncher.launch = launched  # type: ignore[method-assign]
    from healer.cli import main as healer_main

    healer_main()


if __name__ == "__main__":
    main()
