import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.durable.simulated_group import SimulatedGroup

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[str]:
    """Address of a process that starts the processes of simulated groups."""
    with tempfile.TemporaryDirectory(prefix="fork-", dir="/tmp") as folder:
        address = f"{folder}/sock"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.durable.forkserver", address],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
        )
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n", "the fork server did not start"
            yield address
        finally:
            server.kill()
            server.wait()


@pytest.fixture
async def simulated(fork_server: str) -> AsyncIterator[SimulatedGroup]:
    """A simulated group, settled on slots 0 to 3."""
    group = SimulatedGroup(fork_server)
    try:
        group.spawn()
        await group.settled(range(4))
        yield group
    finally:
        await group.end()
