import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.gateway.gateway_fakes import Harness, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gateway") / "checkpoint")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, since a Unix socket's path is limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gw") as folder:
        yield Path(folder)


@pytest.fixture
async def gateway(run_dir: Path, checkpoint: Path) -> AsyncIterator[Callable[..., Awaitable[Harness]]]:
    """Starts a gateway with the given limits and ranks in slots 0 to `ranks` - 1, all routed."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(ranks: int = 0, **limits: float) -> Harness:
            harness = Harness(run_dir, checkpoint)
            stack.push_async_callback(harness.aclose)
            await harness.start(**limits)
            for slot in range(ranks):
                await harness.rank(slot)
            if ranks:
                await harness.route(*range(ranks))
            return harness

        yield start
