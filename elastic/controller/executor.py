"""stub while the modules are built in parallel: the public surface of the executor."""

from collections.abc import Callable, Iterable

from elastic.config import GroupConfig
from elastic.controller.records import Event, GroupStatus


class Executor:
    """Drives one group towards its target slots; runs one sequence at a time; a loss pre-empts everything else."""

    def __init__(self, config: GroupConfig, on_event: Callable[[Event], None]) -> None: ...

    async def start(self) -> str:
        """Adopt the group that runs in `config.run_dir`, else form it (launch, load, first commit). Also starts the
        gateway where none runs. Returns a sentence: what was found, what was done. Raises ElasticError (bad checkpoint,
        ranks that die at every start, another controller holds the group); nothing is left running by a failed form."""
        raise NotImplementedError

    def lose(self, slots: Iterable[int], *, cause: str, detected: float, replace: bool = True) -> None:
        """The owner's verdict: these live slots are lost. Their processes are ended (fenced) if they still run. The loss
        sequence begins at once, superseding any sequence under way; with `replace` the slots stay in the target and are
        refilled afterwards, otherwise they leave the target."""

    def scale(self, target: int | Iterable[int], *, reason: str) -> tuple[int, ...]:
        """Set the target: a number of ranks, or the very slots. Returns the new target slots; raises Infeasible with the
        numbers (below 1, above max_ranks, too few expert slots), nothing changed. The sequences run in the background."""
        raise NotImplementedError

    async def settled(self, *, deadline_s: float) -> None:
        """Wait until live equals target and no sequence runs. Raises Retryable with what is still open."""

    def status(self) -> GroupStatus:
        raise NotImplementedError

    async def close(self) -> None:
        """Let go: ranks and gateway go on serving."""

    async def stop(self) -> None:
        """End the group: gateway and every rank, by pid and start time."""
