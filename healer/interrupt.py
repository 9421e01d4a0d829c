"""Runs that start processes of their own: a signal ends them in order, never in the middle of their cleaning up."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal ended the run; `exit_code` is what a shell expects then."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(f"ended by {signum.name}")
        self.exit_code = 128 + signum


def run_to_its_end(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, where the first of SIGINT, SIGTERM and SIGHUP cancels `main` and any further one is ignored: its
    `finally` blocks run undisturbed. Raises Interrupted once they have, and what `main` raises."""
    return asyncio.run(_guard(main))


async def _guard(main: Coroutine[Any, Any, T]) -> T:
    loop, got = asyncio.get_running_loop(), list[signal.Signals]()
    task = loop.create_task(main)

    def interrupt(signum: signal.Signals) -> None:
        if not got:
            got.append(signum)
            task.cancel()

    for signum in SIGNALS:
        loop.add_signal_handler(signum, interrupt, signum)
    await asyncio.wait([task])
    if task.cancelled() and got:
        raise Interrupted(got[0])
    return task.result()
