"""Who starts and ends ranks: this host's processes, or hooks of the site for ranks that run elsewhere."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import structlog

from elastic.errors import ElasticError
from elastic.launch.base import Launched
from elastic.paths import log_path
from healer.hooks import HookFacts, call
from healer.policy.schema import Hook, VllmTarget
from healer.targets.vllm import commands
from healer.targets.vllm.log_lines import LogTail
from healer.targets.vllm.processes import Processes, log_name, sessions
from healer.targets.vllm.records import Held, Part, Process
from healer.targets.vllm.spares import Spares

log = structlog.get_logger("healer.vllm")


class Starter(Protocol):
    """Called by the target, in its loop."""

    @property
    def fences(self) -> bool:
        """Whether a rank is gone for certain after `fence`."""
        ...

    async def start(self, slots: Sequence[int], launch: "Launch") -> dict[int, Launched]:
        """Start the ranks of these slots at once. Raises ElasticError; then none of them is left."""
        ...

    async def fence(self, ranks: Collection[Held]) -> None:
        """End them at once and for certain, whatever state they are in. Raises ElasticError where that cannot be done."""
        ...

    async def end(self, ranks: Collection[Held], *, deadline_s: float) -> None:
        """End them in order."""
        ...

    def processes(self, ranks: Collection[Held]) -> dict[int, list[Process]]:
        """Of each slot's session; nothing where they are not on this host."""
        ...

    def tail(self, rank: Held) -> LogTail | None: ...

    def last_words(self, rank: Held) -> str: ...

    def ended(self, rank: Held) -> bool:
        """Its API server is known to have ended."""
        ...


class Launch:
    """What all ranks of one launch share."""

    def __init__(
        self,
        ranks: Mapping[int, int],
        incarnations: Mapping[int, int],
        *,
        size: int,
        rpc_port: int,
        joins: bool,
        redundant: int | None = None,
        variables: Mapping[str, str] | None = None,
        spares: bool = True,
    ):
        """`ranks`: DP rank by slot. `variables`: further environment. `spares`: processes that stand by may become these ranks."""
        self.ranks, self.incarnations = ranks, incarnations
        self.size, self.rpc_port, self.joins = size, rpc_port, joins
        self.redundant, self.variables, self.spares = redundant, variables or {}, spares


class LocalStarter:
    """`vllm serve` on this host."""

    fences = True

    def __init__(
        self,
        target: VllmTarget,
        processes: Processes,
        api_key: str,
        variables: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`variables`: further environment of ranks, as of now, for spares."""
        self._target, self._processes, self._api_key = target, processes, api_key
        self.spares = Spares(target, processes, variables=variables) if target.spares else None

    async def start(self, slots: Sequence[int], launch: Launch) -> dict[int, Launched]:
        started: dict[int, Launched] = {}
        try:
            for slot in slots:
                command = commands.command(
                    self._target,
                    slot=slot,
                    dp_rank=launch.ranks[slot],
                    size=launch.size,
                    rpc_port=launch.rpc_port,
                    redundant=launch.redundant,
                )
                environment = commands.environment(
                    self._target, os.environ, slot=slot, joins=launch.joins, api_key=self._api_key
                )
                environment |= launch.variables
                self._processes.tidy_logs(slot)
                name = log_name(slot, launch.incarnations[slot])
                warm = None
                if self.spares is not None and launch.spares:
                    warm = await self.spares.become(command, environment, name)
                started[slot] = warm or self._processes.launch(name, command, environment)
        except BaseException:
            await self._processes.fence(started.values())
            raise
        return started

    async def fence(self, ranks: Collection[Held]) -> None:
        await self._processes.fence([rank.process for rank in ranks])

    async def end(self, ranks: Collection[Held], *, deadline_s: float) -> None:
        await self._processes.end([rank.process for rank in ranks], deadline_s=deadline_s)

    def processes(self, ranks: Collection[Held]) -> dict[int, list[Process]]:
        self._processes.reap()
        found = sessions({rank.pid for rank in ranks})
        return {rank.slot: found[rank.pid] for rank in ranks}

    def tail(self, rank: Held) -> LogTail | None:
        return LogTail(log_path(Path(self._target.run_dir), log_name(rank.slot, rank.incarnation)))

    def last_words(self, rank: Held) -> str:
        return self._processes.last_words(log_name(rank.slot, rank.incarnation))

    def ended(self, rank: Held) -> bool:
        found = sessions({rank.pid}).get(rank.pid, [])
        return not any(
            one.part == Part.API and one.pid_start == rank.pid_start and one.state not in "ZXx" for one in found
        )


class Onlooker:
    """Looks at the ranks of another starter, and starts and ends nobody: for a dry run."""

    fences = False

    def __init__(self, starter: Starter) -> None:
        self._starter = starter

    async def start(self, slots: Sequence[int], launch: Launch) -> dict[int, Launched]:
        raise ElasticError("a dry run starts no ranks")

    async def fence(self, ranks: Collection[Held]) -> None: ...

    async def end(self, ranks: Collection[Held], *, deadline_s: float) -> None: ...

    def processes(self, ranks: Collection[Held]) -> dict[int, list[Process]]:
        return self._starter.processes(ranks)

    def tail(self, rank: Held) -> LogTail | None:
        return self._starter.tail(rank)

    def last_words(self, rank: Held) -> str:
        return self._starter.last_words(rank)

    def ended(self, rank: Held) -> bool:
        return self._starter.ended(rank)


class HookStarter:
    """Ranks that others run: nothing is known of their processes."""

    def __init__(self, target: VllmTarget, hooks: Mapping[str, Hook]) -> None:
        self._target, self._hooks = target, hooks

    @property
    def fences(self) -> bool:
        return self._target.hooks.stop is not None

    async def start(self, slots: Sequence[int], launch: Launch) -> dict[int, Launched]:
        names = self._target.hooks
        if names.start is not None:
            for slot in slots:
                await self._call(names.start, slot, "join" if launch.joins else "start")
        elif names.restart is not None and not launch.joins:
            await self._call(names.restart, 0, "restart")
        elif launch.joins:
            raise ElasticError("no ranks can join: spec.target.hooks.start names no hook that starts them")
        else:
            log.warning("ranks.awaited", slots=list(slots), why="spec.target.hooks has no hook that starts them")
        return dict.fromkeys(slots, Launched(0, 0))

    async def fence(self, ranks: Collection[Held]) -> None:
        """Without a hook nothing is ended: the ranks are as they are, and must prove themselves again."""
        if self._target.hooks.stop is not None:
            for rank in ranks:
                await self._call(self._target.hooks.stop, rank.slot, "fence")

    async def end(self, ranks: Collection[Held], *, deadline_s: float) -> None:
        await self.fence(ranks)

    def processes(self, ranks: Collection[Held]) -> dict[int, list[Process]]:
        return {}

    def tail(self, rank: Held) -> LogTail | None:
        return None

    def last_words(self, rank: Held) -> str:
        return f"its log is not on this host; ask {rank.url}"

    def ended(self, rank: Held) -> bool:
        return False

    async def _call(self, name: str, slot: int, cause: str) -> None:
        result = await call(self._hooks.get(name), HookFacts(hook=name, slot=slot, rule="", cause=cause))
        log.info("hook.ended", hook=name, slot=slot, ok=result.ok, text=result.text)
        if not result.ok:
            raise ElasticError(f"hook {name} for slot {slot}: {result.text}")
