"""The seam between the executor and whatever starts processes."""

from typing import NamedTuple, Protocol


class Launched(NamedTuple):
    pid: int
    pid_start: int


class Launcher(Protocol):
    """Called by the executor only, in its event loop; must not block."""

    def launch(self, slot: int, incarnation: int) -> Launched:
        """Start a rank process that survives its starter. Raises ElasticError when it cannot be started."""
        ...

    def launch_spare(self, number: int) -> Launched:
        """Start a process that waits to become a rank; as `launch`."""
        ...

    def launch_gateway(self) -> Launched: ...

    async def build_tier(self, *, deadline_s: float) -> None:
        """Fill the host-memory tier, once a host. Raises ElasticError with the builder's own words (bad checkpoint)."""
        ...

    def last_words(self, name: str) -> str:
        """Why a process ended: its `error: …` line, else the end of its log. `name` as in its log file."""
        ...

    def end(self, process: Launched) -> None:
        """SIGKILL exactly this process, if it still runs."""
        ...

    def strays(self) -> list[Launched]:
        """All processes of this group's run directory, whoever started them."""
        ...

    async def ended(self, *, deadline_s: float) -> None:
        """Wait until no process of this group's run directory is left; at the deadline, go on."""
        ...
