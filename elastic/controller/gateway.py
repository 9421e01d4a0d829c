"""The controller's end of the gateway: a process of its own, told who serves, asked what it holds."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

from elastic import process
from elastic.channel import Channel
from elastic.config import GroupConfig
from elastic.controller.state import GatewayProcess
from elastic.errors import ElasticError, Retryable
from elastic.launch.base import Launched, Launcher
from elastic.paths import gateway_path, gateway_socket, read_json
from elastic.protocol import GatewayQuery, GatewayStatus, Hello, Route, Routes

log = logging.getLogger(__name__)

ANSWER_S = 2.0
POLL_S = 0.02
WATCH_S, WATCH_MAX_S = 0.5, 8.0
"""Between two looks at the gateway; doubled each time that one could not be started."""
MISSES = 5
"""Questions in a row that a gateway may leave unanswered before it is replaced, and its clients must ask again."""


class GatewayLink:
    """Keeps one gateway running and informed. Lives in the executor's loop."""

    def __init__(
        self,
        config: GroupConfig,
        launcher: Launcher,
        term: int = 0,
        on_superseded: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_superseded`: told why when the gateway listens to a controller of a higher term."""
        self.process: GatewayProcess | None = None
        self.trouble = ""
        """Why clients cannot be served; empty while it answers."""
        self._config, self._launcher = config, launcher
        self._term, self._on_superseded = term, on_superseded
        self._channel: Channel | None = None
        self._routes: tuple[int, tuple[Route, ...]] | None = None
        """None until the first `route`: a gateway that is adopted keeps what it knows."""
        self._watch: asyncio.Task[None] | None = None

    async def start(self, *, deadline_s: float) -> None:
        """Adopt the running gateway or start one. Raises ElasticError with its last words (port in use)."""
        await self._ensure(deadline_s)
        self._watch = asyncio.create_task(self._keep(), name="gateway watch")

    async def adopt(self) -> None:
        """Connect to the running gateway. Where none runs, or none can be started, ranks are healed all the same: one is
        started in the background, and again until it stays."""
        with contextlib.suppress(ElasticError):
            if self._find():
                await self._connect()
        self._watch = asyncio.create_task(self._keep(), name="gateway watch")

    async def route(self, epoch: int, routes: tuple[Route, ...]) -> None:
        """Tell the gateway; a gateway that does not answer now is told when it is back."""
        self._routes = (epoch, routes)
        with contextlib.suppress(ElasticError):
            await self._send()

    async def status(self) -> GatewayStatus | None:
        channel = self._channel
        if channel is None or channel.closed:
            return None
        try:
            return await channel.call(GatewayQuery(id=channel.next_id()), GatewayStatus, deadline_s=ANSWER_S)
        except ElasticError:
            return None

    async def drained(self, slots: Collection[int], *, deadline_s: float) -> bool:
        """Wait until the gateway holds no request on these slots."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            status = await self.status()
            if status is not None and not any(status.per_slot.get(s, 0) for s in slots):
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def close(self) -> None:
        """Let go; the gateway keeps its last routes."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._channel is not None:
            await self._channel.aclose()

    async def stop(self) -> None:
        await self.close()
        if self.process is not None:
            self._launcher.end(Launched(self.process.pid, self.process.pid_start))
            gateway_path(self._config.root).unlink(missing_ok=True)
            Path(gateway_socket(self._config.root)).unlink(missing_ok=True)

    async def _ensure(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        started: Launched | None = None
        while not self._find():
            if started is None:
                started = self._launcher.launch_gateway()
            if not process.is_alive(started.pid, started.pid_start):
                raise ElasticError(f"gateway: {self._launcher.last_words('gateway')}")
            if time.monotonic() > deadline:
                self._launcher.end(started)
                raise Retryable(f"gateway: not listening within {deadline_s:g} s")
            await asyncio.sleep(POLL_S)
        await self._connect()

    def _find(self) -> bool:
        with contextlib.suppress(ElasticError):
            found = read_json(gateway_path(self._config.root), GatewayProcess)
            if process.is_alive(found.pid, found.pid_start):
                self.process = found
                return True
        return False

    async def _connect(self) -> None:
        hello = Hello(role="controller", group=self._config.name, term=self._term)
        channel = await Channel.open(gateway_socket(self._config.root), hello, "gateway", deadline_s=ANSWER_S)
        channel.start(on_close=lambda _: self._on_superseded(channel.superseded) if channel.superseded else None)
        self._channel = channel
        await self._send()

    async def _send(self) -> None:
        channel = self._channel
        if channel is None or self._routes is None:
            return
        epoch, routes = self._routes
        await channel.call(Routes(id=channel.next_id(), epoch=epoch, routes=routes), GatewayStatus, deadline_s=ANSWER_S)

    async def _keep(self) -> None:
        said, pause_s, misses = "", WATCH_S, 0
        while True:
            if self._channel is None or self._channel.closed:
                try:
                    await self._ensure(self._config.prepare_deadline_s)
                    if said or self.trouble:
                        log.warning("the gateway runs again")
                    said, pause_s, self.trouble = "", WATCH_S, ""
                except (ElasticError, OSError) as error:
                    self.trouble = f"no gateway: {error}"
                    if str(error) != said:
                        log.error("%s", self.trouble)
                    said, pause_s = str(error), min(2 * pause_s, WATCH_MAX_S)
            elif await self.status() is not None:
                misses, self.trouble = 0, ""
            elif not self._channel.closed:
                misses += 1
                self.trouble = f"the gateway has not answered for {misses * ANSWER_S:g} s"
                if misses >= MISSES and self.process is not None:
                    log.error("%s; it is replaced", self.trouble)
                    self._launcher.end(Launched(self.process.pid, self.process.pid_start))
                    misses = 0
            await asyncio.sleep(pause_s)
