"""The router process: reads the file, listens, announces itself, reads the file again at SIGHUP, ends cleanly at SIGTERM.

A second router for the same file is refused by a lock that the kernel drops with the process.
"""

import asyncio
import os
import socket
from pathlib import Path

import structlog

from elastic import process
from elastic.errors import ElasticError
from elastic.front import Server, claimed, listen, url_of
from elastic.paths import read_json, write_json
from healer.router.app import create_app
from healer.router.config import RouterConfig, check_update, read_config
from healer.router.files import Announcement, ProxyFiles
from healer.router.metrics import RouterMetrics
from healer.router.pool import Pool

log = structlog.get_logger("healer.router")

PORT_HINT = "name another port in the file"
KNOWN_S = 2.0
"""Between two looks at the announcement."""


class Router:
    """One process's worth of it. `reload` may be called at any time once `serve` runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = read_config(path)
        self._pool = Pool(RouterMetrics())
        self._lists = ProxyFiles()
        self._announce = Path(self._config.announce or path.with_name("router.json"))
        self._url, self._refused = "", ""

    def reload(self) -> None:
        """Read the file again. One that is wrong or old is refused, said in the log and in the announcement, and changes
        nothing."""
        try:
            config = read_config(self._path)
            check_update(self._config, config)
        except ElasticError as error:
            log.error("file_refused", why=str(error), epoch=self._config.epoch)
            self._pool.metrics.reloads.labels("refused").inc()
            self._say_on(str(error))
            return
        self._take(config)

    def _take(self, config: RouterConfig) -> None:
        self._config = config
        self._pool.apply(config)
        self._pool.metrics.reloads.labels("taken").inc()
        self._say_on()

    def _say(self, refused: str = "") -> None:
        """Raises ElasticError."""
        self._refused, pid = refused, os.getpid()
        said = Announcement(pid, process.start_time(pid), self._url, self._pool.epoch, refused)
        try:
            write_json(self._announce, said)
        except OSError as error:
            raise ElasticError(f"{self._announce}: cannot be written: {error.strerror}") from None

    def _say_on(self, refused: str = "") -> None:
        """While clients are served a disk that is full ends nothing."""
        try:
            self._say(refused)
        except ElasticError as error:
            log.error("not_announced", why=str(error))

    def _announced(self) -> bool:
        """The announcement is there, and this router's."""
        try:
            return read_json(self._announce, Announcement).pid == os.getpid()
        except ElasticError:
            return False

    async def _stay_known(self) -> None:
        """A router whose announcement was removed would hold its lock unseen, and the daemon would start others in vain for ever."""
        while True:
            await asyncio.sleep(KNOWN_S)
            if not self._announced():
                log.warning("announced_again", path=str(self._announce))
                self._say_on(self._refused)

    async def serve(self, stop: asyncio.Event, ready: asyncio.Event | None = None) -> None:
        """Run until `stop` is set; `ready` is set once the announcement is written. Raises ElasticError for whatever keeps
        it from starting."""
        config = self._config
        lock, taken = (
            self._path.with_name(f"{self._path.name}.lock"),
            f"{self._path}: another router runs with this file",
        )
        with claimed(lock, taken), listen(config.host, config.port, PORT_HINT) as listener:
            self._url = url_of(listener)
            # once before anything runs: where it cannot be written the router does not start
            self._say()
            try:
                await self._serve(listener, stop, ready)
            finally:
                if self._announced():
                    self._announce.unlink(missing_ok=True)

    async def _serve(self, listener: socket.socket, stop: asyncio.Event, ready: asyncio.Event | None) -> None:
        pool = self._pool
        server = Server(create_app(pool))
        pool.on_change = lambda: self._lists.update(self._config.files, pool.ranks)
        async with asyncio.TaskGroup() as tasks:
            started = asyncio.Event()
            probes = tasks.create_task(pool.run(started), name="pool")
            await started.wait()
            http = tasks.create_task(server.serve(sockets=[listener]), name="http")
            await server.listening.wait()
            known = tasks.create_task(self._stay_known(), name="announcement")
            self._take(self._config)
            log.info("router_listens", http=self._url, epoch=self._config.epoch)
            if ready is not None:
                ready.set()
            await stop.wait()
            known.cancel()
            log.info("router_stops", in_flight=pool.in_flight, grace_s=pool.limits.grace_s)
            await pool.drain(pool.limits.grace_s)
            server.should_exit = True
            await http
            probes.cancel()
