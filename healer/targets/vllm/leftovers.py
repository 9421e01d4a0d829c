"""What a former daemon left serving, ended without one: `healer stop` where no daemon runs."""

import asyncio
import contextlib
import signal
from pathlib import Path

from elastic import process
from elastic.errors import ElasticError
from elastic.launch.base import Launched
from elastic.paths import read_json, state_path
from healer.router.files import Announcement
from healer.targets.vllm import in_place, spares
from healer.targets.vllm.processes import Processes, sessions
from healer.targets.vllm.state import VllmState

END_S = 15.0


def are_there(run_dir: Path) -> bool:
    """Whether the state in this folder is of a vLLM group."""
    return not (run_dir / "config.json").exists() and state_path(run_dir).exists()


def end(run_dir: Path) -> int:
    """How many ranks and routers were ended. Raises ElasticError where the state cannot be read."""
    state = read_json(state_path(run_dir), VllmState)
    leaders = [one.process for one in state.ranks if one.pid]
    found = sum(bool(left) for left in sessions({one.pid for one in leaders}).values())
    with contextlib.suppress(ElasticError):
        router = read_json(run_dir / "router.json", Announcement)
        found += process.send_signal(router.pid, router.pid_start, signal.SIGTERM)
    asyncio.run(_end(run_dir, state, leaders))
    return found


async def _end(run_dir: Path, state: VllmState, leaders: list[Launched]) -> None:
    processes = Processes(run_dir)
    await spares.end_left(run_dir, processes, leaders)
    await processes.end(leaders, deadline_s=END_S)
    if state.coordinated:
        await in_place.quit(run_dir)
