"""The embedded target: a group of the elastic executor, driven in this process; its ranks are processes of their own."""

from collections.abc import Callable, Collection, Iterable

from elastic.config import GroupConfig, write_suspects
from elastic.controller.executor import Executor
from elastic.controller.records import Event, GroupStatus
from healer.authority import Authority


class EmbeddedTarget:
    """`healer.targets.Target` over `Executor`."""

    def __init__(
        self,
        config: GroupConfig,
        on_event: Callable[[Event], None],
        executor: type[Executor] = Executor,
        *,
        authority: Authority | None = None,
    ) -> None:
        """`authority`: under which the ranks are commanded."""
        self._config = config
        authority = authority or Authority()
        self._executor = executor(config, on_event, term=authority.term, armed=authority.armed)

    async def start(self) -> str:
        return await self._executor.start()

    def observe(self) -> GroupStatus:
        return self._executor.status()

    def address(self) -> str:
        return self._executor.gateway_http

    def lose(self, slots: Iterable[int], *, cause: str, detected: float, replace: bool) -> None:
        self._executor.lose(slots, cause=cause, detected=detected, replace=replace)

    def release(self) -> None:
        self._executor.release()

    def scale(self, target: int | Iterable[int], *, reason: str) -> tuple[int, ...]:
        return self._executor.scale(target, reason=reason)

    def probation(self, slots: Collection[int]) -> None:
        write_suspects(self._config.root, slots)

    async def close(self) -> None:
        await self._executor.close()

    async def stop(self) -> None:
        await self._executor.stop()
