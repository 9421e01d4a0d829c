"""A candidate for the lease of a group: waits until it is elected, drives the group while it is, and lets go when it is not.

An executor with an owner that replaces whatever dies, and nothing of the daemon: what fences it is what is tested.
"""

import asyncio
import sys
from pathlib import Path

from elastic.config import GroupConfig
from elastic.controller.executor import Executor
from elastic.controller.records import Event, Fenced, RankGone, SequenceEnded
from elastic.errors import Superseded
from elastic.paths import read_json
from healer.lease.election import Role, Timing
from healer.lease.folder import FolderStore
from healer.lease.keeper import Keeper
from tests.durable.crashing_daemon import install
from tests.durable.points import Points
from tests.durable.simulated_launcher import SimulatedLauncher

TIMING = Timing(ttl_s=2.5, renew_s=0.2, call_deadline_s=0.6, margin_s=0.5)


def run(arguments: tuple[str, ...]) -> None:
    asyncio.run(_run(*arguments))


async def _run(config_path: str, page: str, server: str, name: str) -> None:
    config = read_json(Path(config_path), GroupConfig)
    points = Points(Path(page))
    install(points)
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    store = FolderStore(Path(config_path).with_name("lease"))
    keeper = Keeper(store, TIMING, lambda _: loop.call_soon_threadsafe(changed.set), name=name)
    keeper.start()
    while keeper.role is not Role.HOLDER:
        await changed.wait()
        changed.clear()
    _say(f"holds term {keeper.term}")

    def on_event(event: Event) -> None:
        if isinstance(event, RankGone):
            executor.lose([event.member.slot], cause="death", detected=event.at)
        elif isinstance(event, SequenceEnded):
            _say(f"{event.report.kind} {event.report.outcome}: {event.report.reason}")
        elif isinstance(event, Fenced):
            _say(f"fenced: {event.why}")
            changed.set()

    launcher = SimulatedLauncher(config, server, points.pass_)
    executor = Executor(config, on_event, launcher, term=keeper.term, armed=keeper.armed)
    try:
        _say(await executor.start())
        while keeper.role is Role.HOLDER and not executor.status().fenced:
            await changed.wait()
            changed.clear()
    except Superseded as why:
        _say(f"superseded: {why}")
    await executor.close()
    keeper.close()
    _say("let go")


def _say(text: str) -> None:
    print(text, flush=True)
    sys.stdout.flush()
