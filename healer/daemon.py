"""The daemon's process: a policy, a journal, a supervisor and the API in one event loop, from start to a clean end.

Where the policy has a lease, a standby answers first, and a supervisor takes its place when the lease is won.
"""

import asyncio
import contextlib
import functools
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import structlog
from starlette.applications import Starlette

from elastic import lockfile, process
from elastic.controller.records import Event
from elastic.errors import ElasticError
from healer import __version__
from healer.address import DaemonAddress, address_path, home, journal_path, publish, published, standby_path
from healer.api import Daemon, Server, listen, make_app, read_token
from healer.authority import Authority
from healer.clock import SystemClock
from healer.journal import Journal
from healer.leaseholder import Leaseholder
from healer.machine import this_machine
from healer.policy.rules import book_of
from healer.policy.schema import Policy, VllmTarget
from healer.standby import Standby
from healer.supervisor import Supervisor
from healer.systemd import Notifier as ServiceManager
from healer.targets import Target
from healer.trace import Recorder

log = structlog.get_logger("healer")

ANNOUNCE_S = 1.0
ENDING = (signal.SIGTERM, signal.SIGINT)
TargetMaker = Callable[[Policy, Callable[[Event], None], Authority], Target]


def embedded(policy: Policy, on_event: Callable[[Event], None], authority: Authority) -> Target:
    # the executor is the largest part; commands that do not run it need not load it
    if policy.spec.dry_run:
        from healer.targets.observed import ObservedTarget

        return ObservedTarget(policy.group(), on_event)
    from healer.targets.embedded import EmbeddedTarget

    return EmbeddedTarget(policy.group(), on_event, authority=authority)


def of_kind(policy: Policy, on_event: Callable[[Event], None], authority: Authority) -> Target:
    """The target that spec.target.kind names. Raises ElasticError where it cannot be made."""
    if policy.spec.target.kind == "embedded":
        return embedded(policy, on_event, authority)
    from healer.targets.vllm import make_target

    return make_target(policy, on_event, authority)


def run(
    policy: Policy,
    make_target: TargetMaker = of_kind,
    *,
    record: Path | None = None,
    policy_file: Path | None = None,
) -> None:
    """Until SIGTERM or SIGINT (serving goes on) or POST /stop (serving ends). `record`: where to keep a trace. `policy_file`:
    read again when it changes, and at SIGHUP. Raises ElasticError when it cannot start, Superseded when the lease was
    lost: then nothing was done to serving, and the daemon should be started again."""
    # a witness of a death waits for the interpreter while the loop computes: 5 ms by default, seen in one kill of six
    sys.setswitchinterval(0.0001)
    # ... and for a core; without the right to it, the daemon runs like any other process
    process.go_first()
    asyncio.run(_Process(policy, make_target, record, policy_file).run())


class _Process:
    """What lives as long as the process: the socket of the API, and who answers there now."""

    def __init__(self, policy: Policy, make_target: TargetMaker, record: Path | None, policy_file: Path | None) -> None:
        self._policy, self._make_target, self._record, self._policy_file = policy, make_target, record, policy_file
        self._run_dir = home(Path(policy.spec.target.run_dir), dry_run=policy.spec.dry_run)
        self._clock, self._service = SystemClock(), ServiceManager()
        self._answers: Supervisor | Standby | None = None

    async def run(self) -> None:
        api = self._policy.spec.api
        # who only observes takes nothing away from those who act
        lease = None if self._policy.spec.dry_run else self._policy.spec.lease
        token = read_token(api.token_file)
        with contextlib.ExitStack() as stack:
            stack.callback(self._service.close)
            stack.enter_context(_usable(self._run_dir) if lease is not None else _locked(self._run_dir))
            sock = stack.enter_context(contextlib.closing(listen(api.host, api.port)))
            app = make_app(self._answering, token)
            if lease is None:
                supervisor = stack.enter_context(self._supervisor(Authority(), None))
                stack.enter_context(self._on_air(supervisor, sock, address_path(self._run_dir)))
                async with _served(app, sock):
                    await supervisor.run()
                return
            holder = stack.enter_context(Leaseholder(lease, self._run_dir))
            standby = Standby(
                self._policy, self._policy_file, journal_path(self._run_dir), holder, self._clock, self._service
            )
            self._answers = standby
            async with _served(app, sock):
                with self._on_air(standby, sock, standby_path(self._run_dir, os.getpid())):
                    log.info("daemon.standby", lease=holder.status().store)
                    won = await standby.run()
                if won:
                    self._policy = standby.policy
                    await self._act_under(holder, sock)

    async def _act_under(self, holder: Leaseholder, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()

        def lost() -> None:
            # in the keeper's thread; a loop that has ended needs no telling
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(disarm)

        def disarm() -> None:
            if isinstance(self._answers, Supervisor) and not authority.armed():
                self._answers.disarm(authority.over)

        authority = holder.authority(lost)
        log.info("daemon.acts", term=authority.term)
        with (
            self._supervisor(authority, holder) as supervisor,
            self._on_air(supervisor, sock, address_path(self._run_dir)),
        ):
            await supervisor.run()

    @contextlib.contextmanager
    def _supervisor(self, authority: Authority, holder: Leaseholder | None) -> Iterator[Supervisor]:
        policy, clock, target = self._policy, self._clock, self._policy.spec.target
        visible = target.visible_of if isinstance(target, VllmTarget) else lambda slot: ""
        journal = Journal.open(journal_path(self._run_dir), clock)
        journal.may_write = authority.armed
        if journal.set_aside is not None:
            log.warning("journal.set_aside", damaged=str(journal.set_aside), path=str(journal.path))
        try:
            supervisor = Supervisor(
                policy,
                lambda on_event: self._make_target(policy, on_event, authority),
                journal,
                clock,
                machine=this_machine(clock, policy.spec.sensors, self._run_dir, target.run_dir, visible),
                recorder=Recorder(self._record, policy.limits) if self._record is not None else None,
                authority=authority,
                lease=holder.status if holder is not None else lambda: None,
                policy_file=self._policy_file,
                service=self._service,
            )
            book_of(policy)
            # what is loaded by now stays: a full collection that walked it would keep a decision waiting for 45 ms
            gc.freeze()
            yield supervisor
        finally:
            if lost := journal.close():
                log.error("journal.lost", entries=lost, error=journal.error)

    def _answering(self) -> Daemon:
        assert self._answers is not None, "nobody is served before"
        return self._answers

    @contextlib.contextmanager
    def _on_air(self, who: Supervisor | Standby, sock: socket.socket, path: Path) -> Iterator[None]:
        """`who` answers, is found at `path`, and hears the signals."""
        self._answers = who
        loop = asyncio.get_running_loop()
        address = _address(self._policy, sock)
        handlers = {signum: functools.partial(who.end, stop=False, who=signum.name) for signum in ENDING}
        handlers[signal.SIGHUP] = functools.partial(who.reload)
        with published(path, address) as unpublished:
            if unpublished:
                log.error("daemon.unpublished", why=unpublished)
            announcing = loop.create_task(_announce(path, address), name="announce")
            log.info("daemon.listening", http=address.http, run_dir=str(self._run_dir), pid=address.pid)
            for signum, handler in handlers.items():
                loop.add_signal_handler(signum, handler)
            try:
                yield
            finally:
                announcing.cancel()
                for signum in handlers:
                    loop.remove_signal_handler(signum)


async def _announce(path: Path, address: DaemonAddress) -> None:
    """Until cancelled: without the file no command finds this daemon. A full disk may not take it yet, and somebody may remove
    it; that of another daemon is left alone."""
    while True:
        await asyncio.sleep(ANNOUNCE_S)
        if not path.exists() and not publish(path, address):
            log.warning("daemon.published", path=str(path))


@contextlib.asynccontextmanager
async def _served(app: Starlette, sock: socket.socket) -> AsyncIterator[None]:
    server = Server(app)
    serving = asyncio.create_task(server.serve(sockets=[sock]), name="api")
    try:
        # an API that fails is reported and missed; healing goes on without it
        serving.add_done_callback(_report)
        yield
    finally:
        server.should_exit = True
        await asyncio.wait([serving], timeout=5.0)


def _report(serving: "asyncio.Task[None]") -> None:
    if not serving.cancelled() and serving.exception() is not None:
        log.error("api.failed", error=str(serving.exception()))


@contextlib.contextmanager
def _usable(run_dir: Path) -> Iterator[None]:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ElasticError(f"{run_dir}: the run directory cannot be used: {error.strerror}") from error
    yield


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """One daemon for a run directory. The kernel drops the lock when the process ends, however it ends."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = lockfile.claim(run_dir / "healer.lock")
    except OSError as error:
        raise ElasticError(f"{run_dir}: the run directory cannot be used: {error.strerror}") from error
    except lockfile.Held as held:
        raise ElasticError(
            f"{run_dir}: another daemon runs here (pid {held.holder}); `healer status --run-dir {run_dir}` asks it"
        ) from None
    with file:
        yield


def _address(policy: Policy, sock: socket.socket) -> DaemonAddress:
    host, port = sock.getsockname()[:2]
    # a wildcard is no address to connect to
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    pid = os.getpid()
    return DaemonAddress(
        pid=pid,
        pid_start=process.start_time(pid),
        http=f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        policy=policy.metadata.name,
        token_file=policy.spec.api.token_file or "",
        version=__version__,
        started_wall=time.time(),
    )
