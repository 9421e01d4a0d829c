"""Membership records: a rank is the incarnation that holds a slot; a view is who serves, by which map, since which epoch."""

import msgspec

from elastic.placement.maps import Placement


class Member(msgspec.Struct, frozen=True):
    """One incarnation of a rank. Equal only if it is the same process."""

    slot: int
    incarnation: int
    pid: int
    pid_start: int
    """Field 22 of /proc/<pid>/stat, clock ticks since boot: with the pid it names one process for ever."""
    address: str
    """Path of the agent's Unix socket."""
    host: str = "localhost"

    def __str__(self) -> str:
        return f"rank {self.slot}.{self.incarnation} (pid {self.pid})"


class View(msgspec.Struct, frozen=True):
    """What all live ranks agree on. Changed only by a commit, which raises the epoch."""

    epoch: int
    live: tuple[int, ...]
    """Live slots, ascending."""
    placement: Placement
    """Only live slots hold experts."""

    @property
    def hash(self) -> str:
        return self.placement.hash
