"""The daemon's process: a policy, a journal, a supervisor and the API in one event loop, from start to a clean end."""

import asyncio
import contextlib
import fcntl
import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import structlog

from elastic import process
from elastic.controller.records import Event
from elastic.errors import ElasticError
from elastic.paths import read_json, write_json
from healer import __version__
from healer.api import Server, listen, make_app, read_token
from healer.clock import SystemClock
from healer.journal import Journal
from healer.machine import this_machine
from healer.policy.schema import Policy
from healer.supervisor import Supervisor
from healer.targets import Target
from healer.trace import Recorder

log = structlog.get_logger("healer")

TargetMaker = Callable[[Policy, Callable[[Event], None]], Target]


class DaemonAddress(msgspec.Struct, frozen=True):
    """`healer.json` in the run directory, there while a daemon runs: how the other commands find it."""

    pid: int
    pid_start: int
    http: str
    policy: str
    token_file: str
    """Empty where none is needed."""
    version: str
    started_wall: float

    @property
    def alive(self) -> bool:
        return process.is_alive(self.pid, self.pid_start)


def address_path(run_dir: Path) -> Path:
    return run_dir / "healer.json"


def journal_path(run_dir: Path) -> Path:
    return run_dir / "journal.db"


def read_address(run_dir: Path) -> DaemonAddress | None:
    """None where no daemon has ever run, or the last one ended."""
    with contextlib.suppress(ElasticError):
        found = read_json(address_path(run_dir), DaemonAddress)
        return found if found.alive else None
    return None


def embedded(policy: Policy, on_event: Callable[[Event], None]) -> Target:
    # the executor is the largest part; commands that do not run it need not load it
    from healer.targets.embedded import EmbeddedTarget

    return EmbeddedTarget(policy.group(), on_event, observe_only=policy.spec.dry_run)


def run(policy: Policy, make_target: TargetMaker = embedded, *, record: Path | None = None) -> None:
    """Until SIGTERM or SIGINT (serving goes on) or POST /stop (serving ends). `record`: where to keep a trace. Raises
    ElasticError when it cannot start."""
    asyncio.run(_run(policy, make_target, record))


async def _run(policy: Policy, make_target: TargetMaker, record: Path | None) -> None:
    run_dir, clock = Path(policy.spec.target.run_dir), SystemClock()
    api = policy.spec.api
    token = read_token(api.token_file)
    with _locked(run_dir), contextlib.closing(listen(api.host, api.port)) as sock:
        journal = Journal.open(journal_path(run_dir), clock)
        if journal.set_aside is not None:
            log.warning("journal.set_aside", damaged=str(journal.set_aside), path=str(journal.path))
        with contextlib.closing(journal):
            supervisor = Supervisor(
                policy,
                lambda on_event: make_target(policy, on_event),
                journal,
                clock,
                machine=this_machine(clock, policy.spec.sensors, run_dir),
                recorder=Recorder(record, policy.limits) if record is not None else None,
            )
            with _published(policy, run_dir, sock), _signals(supervisor):
                await _serve(supervisor, make_app(supervisor, token), sock)


async def _serve(supervisor: Supervisor, app: object, sock: socket.socket) -> None:
    server = Server(app)  # type: ignore[arg-type]
    serving = asyncio.create_task(server.serve(sockets=[sock]), name="api")
    try:
        # an API that fails is reported and missed; healing goes on without it
        serving.add_done_callback(_report)
        await supervisor.run()
    finally:
        server.should_exit = True
        await asyncio.wait([serving], timeout=5.0)


def _report(serving: "asyncio.Task[None]") -> None:
    if not serving.cancelled() and serving.exception() is not None:
        log.error("api.failed", error=str(serving.exception()))


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """One daemon for a run directory. The kernel drops the lock when the process ends, however it ends."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / "healer.lock").open("a+")
    except OSError as error:
        raise ElasticError(f"{run_dir}: the run directory cannot be used: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ElasticError(
                f"{run_dir}: another daemon runs here (pid {holder}); `healer status --run-dir {run_dir}` asks it"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextlib.contextmanager
def _published(policy: Policy, run_dir: Path, sock: socket.socket) -> Iterator[None]:
    host, port = sock.getsockname()[:2]
    # a wildcard is no address to connect to
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    http = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    pid = os.getpid()
    address = DaemonAddress(
        pid=pid,
        pid_start=process.start_time(pid),
        http=http,
        policy=policy.metadata.name,
        token_file=policy.spec.api.token_file or "",
        version=__version__,
        started_wall=time.time(),
    )
    write_json(address_path(run_dir), address)
    log.info("daemon.listening", http=http, run_dir=str(run_dir), pid=pid)
    try:
        yield
    finally:
        address_path(run_dir).unlink(missing_ok=True)


@contextlib.contextmanager
def _signals(supervisor: Supervisor) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, functools.partial(supervisor.end, stop=False, who=signum.name))
    try:
        yield
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)
