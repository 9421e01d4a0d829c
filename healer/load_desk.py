"""The load rules of the policy in force, if it has any: made, changed and ended with it.

Reading signals costs start-up time and memory that most policies save, so what does it is loaded where it is needed.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from healer.policy.schema import Policy
from healer.status import ScalingStatus

if TYPE_CHECKING:
    from healer.scaling import Scaling


class LoadDesk:
    """Owned by the supervisor's loop."""

    def __init__(self, policy: Policy, make: Callable[[Policy], "Scaling"]) -> None:
        """`make`: called for policies that have load rules or schedules."""
        self._policy, self._make = policy, make
        self._scaling = self._made(policy)
        self._leaving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        if self._scaling is not None:
            self._scaling.start()

    def tick(self, now: float) -> None:
        if self._scaling is not None:
            self._scaling.tick(now)

    def adopt(self, policy: Policy) -> None:
        """Rules and schedules that did not change keep their windows and histories."""
        before, self._policy = self._policy.spec, policy
        if (before.load, before.schedules) == (policy.spec.load, policy.spec.schedules):
            if self._scaling is not None:
                self._scaling.adopt(policy)
            return
        self._let_go()
        self._scaling = self._made(policy)
        self.start()

    async def stop(self) -> None:
        self._let_go()
        if self._leaving:
            await asyncio.wait(self._leaving)

    def status(self) -> ScalingStatus | None:
        return self._scaling.status() if self._scaling is not None else None

    def _let_go(self) -> None:
        if self._scaling is not None:
            task = asyncio.create_task(self._scaling.stop(), name="former load rules")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        self._scaling = None

    def _made(self, policy: Policy) -> "Scaling | None":
        return self._make(policy) if policy.spec.load.rules or policy.spec.schedules else None
