"""A `Launcher` whose processes come from the fork server."""

import asyncio
import contextlib
import hashlib
import signal
from collections.abc import Callable
from pathlib import Path

from elastic import process
from elastic.config import GroupConfig
from elastic.launch.base import Launched
from elastic.launch.local import LocalLauncher
from elastic.paths import log_path
from tests.durable import forkserver
from tests.durable.forkserver import Order


def comm(run_dir: Path) -> str:
    """The name of a group's ranks and gateway."""
    return "sim-" + hashlib.blake2b(str(run_dir).encode(), digest_size=5).hexdigest()


def daemon_comm(run_dir: Path) -> str:
    return "dmn-" + hashlib.blake2b(str(run_dir).encode(), digest_size=5).hexdigest()


class SimulatedLauncher:
    """`passing` is called before and after each act, with what it is."""

    def __init__(self, config: GroupConfig, server: str, passing: Callable[[str], None] = lambda _: None) -> None:
        self._config, self._server, self._passing = config, server, passing
        self._comm = comm(config.root)

    def launch(self, slot: int, incarnation: int) -> Launched:
        name = f"rank-{slot}.{incarnation}"
        return self._start("rank", name, (self._config.run_dir, str(slot), str(incarnation)))

    def launch_spare(self, number: int) -> Launched:
        raise NotImplementedError

    def launch_gateway(self) -> Launched:
        c = self._config
        arguments = (
            *("--group", c.name, "--run-dir", c.run_dir, "--checkpoint", c.checkpoint, "--model", "simulated"),
            *("--max-model-len", str(c.max_model_len), "--host", "127.0.0.1", "--port", "0"),
        )
        return self._start("gateway", "gateway", arguments)

    async def build_tier(self, *, deadline_s: float) -> None: ...

    def last_words(self, name: str) -> str:
        return LocalLauncher(self._config).last_words(name)

    def end(self, process_: Launched) -> None:
        self._passing(f"before end of {process_.pid}")
        process.send_signal(process_.pid, process_.pid_start, signal.SIGKILL)
        self._passing(f"after end of {process_.pid}")

    def strays(self) -> list[Launched]:
        return [Launched(p.pid, p.pid_start) for p in forkserver.named(self._comm)]

    async def ended(self, *, deadline_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self.strays():  # noqa: ASYNC110 (others' children)
                    await asyncio.sleep(0.005)

    def _start(self, what: str, name: str, arguments: tuple[str, ...]) -> Launched:
        self._passing(f"before launch of {name}")
        order = Order(what, self._comm, str(log_path(self._config.root, name)), arguments)
        forked = forkserver.ask(self._server, order)
        self._passing(f"after launch of {name}")
        return Launched(forked.pid, forked.pid_start)
