"""The embedded target of a dry run: a group that somebody else commands, or nobody; it is watched and never touched."""

from collections.abc import Callable, Collection, Iterable
from typing import NoReturn

from elastic.config import GroupConfig
from elastic.controller.observer import Observer
from elastic.controller.records import Event, GroupStatus
from elastic.errors import Infeasible

REFUSAL = "spec.dryRun is set in the policy: this daemon only observes"


class ObservedTarget:
    """`healer.targets.Target` over `Observer`. Policies in a dry run decide upon no act, so nobody asks for one."""

    def __init__(self, config: GroupConfig, on_event: Callable[[Event], None]) -> None:
        self._observer = Observer(config, on_event)

    async def start(self) -> str:
        return await self._observer.start()

    def observe(self) -> GroupStatus:
        return self._observer.status()

    def address(self) -> str:
        return self._observer.gateway_http

    def lose(self, slots: Iterable[int], *, cause: str, detected: float, replace: bool) -> NoReturn:
        raise Infeasible(REFUSAL)

    def release(self) -> NoReturn:
        raise Infeasible(REFUSAL)

    def scale(self, target: int | Iterable[int], *, reason: str) -> NoReturn:
        raise Infeasible(REFUSAL)

    def probation(self, slots: Collection[int]) -> None:
        """Whoever starts ranks here has a view of his own on that."""

    async def close(self) -> None:
        await self._observer.close()

    async def stop(self) -> None:
        """Serving is not this daemon's to end."""
        await self._observer.close()
