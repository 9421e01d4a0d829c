"""Healing inside a running vLLM group, where its ranks have the plugin (elastic/vllm): go on without ranks, and fill their slots.

Numbers here are DP ranks, which are vLLM's slots and never change while a group runs; the target's own slots are the caller's.
Epochs are the engines': the next order is above what any of them has seen, so nothing has to be kept over a restart of
the daemon.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path

import structlog

from elastic.errors import ElasticError
from elastic.vllm import driver
from elastic.vllm.client import Coordination, NoAnswer, NotInForce, RankClient
from elastic.vllm.driver import CommitFailed, Healed, Refilled, RefillFailed, RefillLimits
from elastic.vllm.records import CoordinationInfo, EngineInfo
from healer.targets.vllm.processes import Processes

log = structlog.get_logger("healer.vllm")

__all__ = ["CommitFailed", "InPlace", "RefillFailed", "environment", "interpreter", "why_not"]

PLUGIN = "healer_in_place"
LOG_NAME = "coordination"
UP_S, ASK_S, POLL_S = 60.0, 5.0, 0.2


def environment(user: Mapping[str, str], *, joins: bool, coordinated: bool) -> dict[str, str]:
    """What a rank is started with besides the rest. `joins`: it fills a slot. `coordinated`: it asks healer's coordination
    process, slot 0 included."""
    named = [name for name in user.get("VLLM_PLUGINS", "").split(",") if name]
    found = {"VLLM_PLUGINS": ",".join([*named, *([] if PLUGIN in named else [PLUGIN])])}
    if coordinated:
        found["HEALER_COORDINATION"] = "1"
    if joins:
        found["HEALER_REFILL"] = "1"
    return found


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

    def __init__(self, run_dir: Path, python: str, processes: Processes, *, host: str, env: Mapping[str, str]) -> None:
        """`python`: vLLM's interpreter. `host`: at which all ranks reach this machine. `env`: of the ranks."""
        self._run_dir, self._python, self._processes = run_dir, python, processes
        self._host, self._env = host, env
        self._coordination = Coordination(run_dir)
        self._clients: dict[int, RankClient] = {}

    # --- the coordination process ---------------------------------------------------------------------------------------------

    async def up(self) -> CoordinationInfo:
        """It runs: adopted, or started. Raises ElasticError with its last words."""
        try:
            return await self._coordination.info(deadline_s=ASK_S)
        except NoAnswer:
            log.info("coordination.start")
        command = [self._python, "-m", "elastic.vllm.coordination", str(self._run_dir), "--host", self._host]
        self._processes.launch(LOG_NAME, command, self._env)
        until = time.monotonic() + UP_S
        while True:
            try:
                return await self._coordination.info(deadline_s=ASK_S)
            except NoAnswer as error:
                if time.monotonic() > until:
                    words = self._processes.last_words(LOG_NAME)
                    raise ElasticError(f"the coordination process does not come up: {words}") from error
            await asyncio.sleep(POLL_S)

    async def watch(self, count: Callable[[], int]) -> None:
        """Keep it alive, for as long as the caller lets this run. `count`: engines that are live."""
        while True:
            await asyncio.sleep(ASK_S)
            try:
                before = await self._coordination.info(deadline_s=ASK_S)
                if before.coordinator_pid:
                    continue
            except NoAnswer:
                log.warning("coordination.gone")
            try:
                await self.up()
                await self._coordination.live(count(), deadline_s=ASK_S)
            except ElasticError as error:
                log.error("coordination.failed", error=str(error))

    async def begin(self, ranks: Sequence[int]) -> int:
        """A whole group is about to be launched: the port that its ranks must know (--data-parallel-rpc-port)."""
        await self.up()
        return (await self._coordination.start(list(ranks), deadline_s=ASK_S)).rpc_port

    async def quit(self) -> None:
        """The group has ended for good."""
        try:
            await self._coordination.quit(deadline_s=ASK_S)
        except NoAnswer as error:
            log.debug("coordination.quit", error=str(error))

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
