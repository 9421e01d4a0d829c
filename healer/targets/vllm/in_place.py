"""Healing inside a running vLLM group, where its ranks have the plugin (elastic/vllm): go on without ranks, and fill their slots.

Numbers here are DP ranks, which are vLLM's slots and never change while a group runs; the target's own slots are the caller's.
Epochs are the engines': the next order is above what any of them has seen, so nothing has to be kept over a restart of
the daemon.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from elastic import process
from elastic.errors import ElasticError
from elastic.vllm import driver
from elastic.vllm.client import Coordination, NoAnswer, NotInForce, RankClient
from elastic.vllm.driver import CommitFailed, Healed, Refilled, RefillFailed, RefillLimits
from elastic.vllm.records import CoordinationInfo, EngineInfo, GuardState
from healer.policy.schema import VllmTarget
from healer.targets.vllm.arguments import Arguments
from healer.targets.vllm.processes import Processes

log = structlog.get_logger("healer.vllm")

__all__ = ["CommitFailed", "InPlace", "RefillFailed", "Verdict", "environment", "interpreter", "verdict", "why_not"]

PLUGIN = "healer_in_place"
COPY_VARIABLE = "HEALER_EXPERT_COPY"
SHARED_MEMORY = Path("/dev/shm")
GUARD_S = 60.0
_GUARD = """
import json
from importlib.metadata import entry_points
from elastic.vllm import guard
groups = ("vllm.general_plugins", "vllm.platform_plugins")
names = sorted({point.name for group in groups for point in entry_points(group=group)})
print(json.dumps({"parts": guard.inspect(), "plugins": names}))
"""
LOG_NAME = "coordination"
UP_S, ASK_S, POLL_S = 60.0, 5.0, 0.2


class Verdict(msgspec.Struct, frozen=True):
    state: GuardState
    reason: str
    """Empty where the state is ready."""
    plugins: tuple[str, ...] = ()
    """Names of vLLM's general and platform plugins that are installed."""


async def verdict(target: VllmTarget, arguments: Arguments) -> Verdict:
    """Whether ranks of this target can be healed in place: first what the policy and the arguments say, then the guard, with
    vLLM's interpreter. Never raises for what it finds."""
    if why := unsupported(target, arguments):
        return Verdict(GuardState.OFF, why)
    try:
        done = await asyncio.create_subprocess_exec(
            *(interpreter(target.executable), "-c", _GUARD),
            env={**os.environ, **target.env},
            cwd="/",  # Python looks there first, and the ranks will be in another folder than this process
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(GUARD_S):
                said, words = await done.communicate()
        finally:
            if done.returncode is None:
                done.kill()
                await done.wait()
        return _judged(said, words)
    except (ElasticError, OSError) as error:
        return Verdict(GuardState.STOCK, str(error))
    except TimeoutError:
        return Verdict(GuardState.STOCK, f"the guard did not answer within {GUARD_S:g} s")


def _judged(said: bytes, words: bytes) -> Verdict:
    try:
        found = json.loads(said)
        plugins = tuple(map(str, found["plugins"]))
        for part in found["parts"].values():
            if part["state"] != GuardState.READY:
                return Verdict(GuardState(part["state"]), str(part["reason"]), plugins)
    except (ValueError, KeyError, TypeError, AttributeError):
        last = words.decode(errors="replace").strip().splitlines()
        return Verdict(GuardState.STOCK, f"healer's plugin is not beside vLLM: {last[-1] if last else 'no answer'}")
    return Verdict(GuardState.READY, "", plugins)


def unsupported(target: VllmTarget, arguments: Arguments) -> str:
    """Why the policy or the arguments leave no healing in place; empty: they do not stand in its way. Pure."""
    if target.in_place == "off":
        return "spec.target.inPlace is off"
    if target.mode != "launch" or target.load_balancing != "external":
        return "only for ranks that healer launches, one API server for each"
    for name in ("enable-elastic-ep", "enable-expert-parallel", "enable-eplb", "enable-fault-tolerance"):
        if not arguments.flag(name):
            return f"--{name} is not set"
    return ""


def environment(
    user: Mapping[str, str], *, joins: bool, coordinated: bool, installed: Sequence[str] = ()
) -> dict[str, str]:
    """What a rank is started with besides the rest. `joins`: it fills a slot. `coordinated`: it asks healer's coordination
    process, slot 0 included. `installed`: plugins that vLLM loads where the user names none; a list takes the others away."""
    given = user.get("VLLM_PLUGINS")
    named = [name for name in (installed if given is None else given.split(",")) if name]
    found = {"VLLM_PLUGINS": ",".join([*named, *([] if PLUGIN in named else [PLUGIN])])}
    if coordinated:
        found["HEALER_COORDINATION"] = "1"
    if joins:
        found["HEALER_REFILL"] = "1"
    return found


def expert_copy(run_dir: Path) -> Path:
    """Where ranks keep every expert's rows once, for those that lose theirs; this module removes it."""
    name = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]
    return SHARED_MEMORY / f"healer-experts-{name}"


async def quit(run_dir: Path) -> None:
    """The group of this folder has ended for good: nobody needs its coordination process, nor its experts' rows."""
    expert_copy(run_dir).unlink(missing_ok=True)
    try:
        await Coordination(run_dir).quit(deadline_s=ASK_S)
    except NoAnswer as error:
        log.debug("coordination.quit", error=str(error))


def interpreter(executable: str) -> str:
    """Of vLLM's command, from its first line. Raises ElasticError."""
    command = shutil.which(executable)
    try:
        with open(command or executable, "rb") as file:
            first = file.readline(1024)
    except OSError as error:
        raise ElasticError(f"spec.target.executable {executable}: {error.strerror}") from error
    words = first.removeprefix(b"#!").decode(errors="replace").split()
    if not first.startswith(b"#!") or not words:
        raise ElasticError(f"spec.target.executable {executable}: not a script that names its interpreter")
    return words[0]


def why_not(
    survivors: Sequence[int],
    *,
    least: int,
    infos: Mapping[int, EngineInfo | str],
    sticky: Collection[int] = (),
) -> str:
    """Why these ranks cannot go on by themselves, so that only a restart is left; empty: they can. Pure.

    `infos`: what each survivor's engine said, or why it said nothing. `least`: ranks that hold every expert. `sticky`: ranks
    whose CUDA context is broken.
    """
    if len(survivors) < least:
        return f"{len(survivors)} ranks are left, {least} are needed for all experts"
    if broken := [slot for slot in survivors if slot in sticky]:
        return f"ranks {broken} have a broken CUDA context"
    for slot in survivors:
        info = infos.get(slot, "it was not asked")
        if isinstance(info, str):
            return f"rank {slot}: {info}"
        if info.status == "dead":
            return f"rank {slot} has lost a worker"
    return ""


class InPlace:
    """Owned by the target, used in its loop, one order at a time."""

    def __init__(
        self,
        run_dir: Path,
        python: str,
        processes: Processes,
        *,
        host: str,
        env: Mapping[str, str],
        installed: Sequence[str] = (),
    ) -> None:
        """`python`: vLLM's interpreter. `host`: at which all ranks reach this machine. `env`: of the ranks. `installed`: as of
        `environment`."""
        self._installed, self._one = installed, asyncio.Lock()
        self._run_dir, self._python, self._processes = run_dir, python, processes
        self._host, self._env = host, env
        self._coordination = Coordination(run_dir)
        self._clients: dict[int, RankClient] = {}
        self._copy = expert_copy(run_dir)

    def variables(self, *, joins: bool) -> dict[str, str]:
        """Environment of a rank; `joins`: it fills an empty slot."""
        found = environment(self._env, joins=joins, coordinated=True, installed=self._installed)
        return found if COPY_VARIABLE in self._env else found | {COPY_VARIABLE: str(self._copy)}

    # --- the coordination process ---------------------------------------------------------------------------------------------

    async def up(self) -> CoordinationInfo:
        """It runs: adopted, or started. Raises ElasticError with its last words, at once where it has ended."""
        async with self._one:  # two would take the socket from each other
            return await self._up()

    async def _up(self) -> CoordinationInfo:
        try:
            return await self._coordination.info(deadline_s=ASK_S)
        except NoAnswer:
            log.info("coordination.start")
        command = [self._python, "-m", "elastic.vllm.coordination", str(self._run_dir), "--host", self._host]
        child = self._processes.launch(LOG_NAME, command, self._env)
        until = time.monotonic() + UP_S
        while True:
            self._processes.reap()
            ended = not process.is_alive(child.pid, child.pid_start)  # before it is asked: it may end after an answer
            try:
                return await self._coordination.info(deadline_s=ASK_S)
            except NoAnswer as error:
                if ended or time.monotonic() > until:
                    words = self._processes.last_words(LOG_NAME)
                    raise ElasticError(f"the coordination process does not come up: {words}") from error
            await asyncio.sleep(POLL_S)

    async def watch(self, count: Callable[[], int], *, warm: Callable[[], bool] = lambda: False) -> None:
        """Keep it alive, for as long as the caller lets this run. `count`: engines that are live; 0: nobody needs it. `warm`: it is to
        have a process that stands by to become the next launch's coordinator."""
        while True:
            await asyncio.sleep(ASK_S)
            if not count():
                continue
            try:
                before = await self._coordination.info(deadline_s=ASK_S)
                if before.coordinator_pid:
                    if warm():
                        await self._stand_by()
                    continue
            except NoAnswer:
                log.warning("coordination.gone")
            try:
                await self.up()
                await self._coordination.live(count(), deadline_s=ASK_S)
            except ElasticError as error:
                log.error("coordination.failed", error=str(error))

    async def _stand_by(self) -> None:
        """One that an earlier version of this program started does not know the order."""
        with contextlib.suppress(NoAnswer):
            await self._coordination.stand_by(deadline_s=ASK_S)

    async def begin(self, ranks: Sequence[int]) -> int:
        """A whole group is about to be launched: the port that its ranks must know (--data-parallel-rpc-port)."""
        await self.up()
        self._copy.unlink(missing_ok=True)  # of the launch before
        return (await self._coordination.start(list(ranks), deadline_s=ASK_S)).rpc_port

    # --- ranks ------------------------------------------------------------------------------------------------------------

    def know(self, urls: Mapping[int, str], api_key: str) -> None:
        """The ranks that there are, by number."""
        for rank, url in urls.items():
            if rank not in self._clients or self._clients[rank].url != url:
                self._clients[rank] = RankClient(url, api_key=api_key)

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.aclose()
        self._clients = {}

    async def infos(self, ranks: Sequence[int]) -> dict[int, EngineInfo | str]:
        """What each engine says of itself, or why it says nothing; a stock one says so."""

        async def one(rank: int) -> EngineInfo | str:
            try:
                return await driver.engine_info(self._clients[rank], ASK_S)
            except (NoAnswer, NotInForce) as error:
                return str(error)

        found = await asyncio.gather(*(one(rank) for rank in ranks))
        return dict(zip(ranks, found, strict=True))

    async def go_on(self, survivors: Sequence[int], ranks: driver.Ranks, *, timeout_s: float) -> Healed:
        """The survivors go on alone; with all that are live as survivors it is a retry that keeps requests. Who is not among them
        must be dead or fenced by now. Raises HealFailed, NotInForce, NoAnswer: then a restart is what is left."""
        info = await self.up()
        epoch = await self._next_epoch(survivors)
        store = (info.host, info.store_port)
        healed = await driver.heal(self._clients, ranks, survivors, store, epoch=epoch, timeout_s=timeout_s)
        await self._coordination.live(len(healed.survivors), deadline_s=ASK_S)
        return healed

    async def fill(
        self,
        live: Sequence[int],
        rank: int,
        ranks: driver.Ranks,
        launch: Callable[[int], Awaitable[str]],
        *,
        api_key: str,
        limits: RefillLimits,
    ) -> Refilled:
        """Fill one slot. `launch` starts the joiner with the port that it must know and returns its URL.

        Raises RefillFailed with nothing changed but a joiner to end; after CommitFailed call `go_on` with the live ranks first.
        """
        await self.up()

        async def started(info: CoordinationInfo) -> RankClient:
            self.know({rank: await launch(info.rpc_port)}, api_key)
            return self._clients[rank]

        epoch = await self._next_epoch(live)
        return await driver.refill(
            self._clients, ranks, self._coordination, live, rank, started, epoch=epoch, limits=limits
        )

    async def _next_epoch(self, ranks: Sequence[int]) -> int:
        found = await self.infos(ranks)
        return max((info.epoch for info in found.values() if isinstance(info, EngineInfo)), default=0) + 1
