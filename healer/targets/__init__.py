"""Targets: what can be kept healthy. One interface, so that the supervisor does not know what it heals.

The records are the executor's (`elastic.controller.records`): members by slot and incarnation, a target of slots, sequences.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from elastic.controller.records import Event, GroupStatus


class Target(Protocol):
    """All methods are called by the supervisor in its event loop. Those that are not `async` return at once."""

    async def start(self) -> str:
        """Once, first: adopt what runs, else start it. Returns a sentence. Raises ElasticError; then nothing is left
        running. May report events before it returns. Cancelled when the daemon is told to end meanwhile."""
        ...

    def observe(self) -> GroupStatus:
        """The group as it is known now, before `start` too. Cheap; called at every change and every second."""
        ...

    def address(self) -> str:
        """Where clients send their requests, as a URL; empty while that is not known."""
        ...

    def lose(self, slots: Iterable[int], *, cause: str, detected: float, replace: bool) -> None:
        """These live slots are lost: release the survivors, cover, and, with `replace`, refill. Begins before it returns;
        what becomes of it is reported by events. May report events from within the call."""
        ...

    def release(self) -> None:
        """The ranks wait for one that is given time: drop the step in flight and have the same ranks run it again. Begins
        before it returns. A target that cannot do this does nothing, and no policy for it may ask (`retry`)."""
        ...

    def scale(self, target: int | Iterable[int], *, reason: str) -> tuple[int, ...]:
        """Set the target and return its slots. Raises Infeasible, with nothing changed."""
        ...

    def probation(self, slots: Collection[int]) -> None:
        """All slots in which a rank that starts from now on must prove its device before it serves. A target that cannot do
        this does nothing."""
        ...

    async def close(self) -> None:
        """Let go; serving goes on. Nothing is called afterwards."""
        ...

    async def stop(self) -> None:
        """End serving. Nothing is called afterwards."""
        ...


TargetFactory = Callable[[Callable[[Event], None]], Target]
"""Given the function that takes events, in the loop, makes a target that is not started."""
