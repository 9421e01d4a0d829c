"""What the parts of the target tell each other: immutable records; times in seconds of the monotonic clock."""

from enum import StrEnum

import msgspec

from elastic.launch.base import Launched
from elastic.view import Member
from healer.targets.vllm.endpoints import FaultStatus, Gate, Scaling


class Role(StrEnum):
    """What a rank is to the group."""

    BOOTING = "booting"
    """Launched, not yet part of the group."""
    LIVE = "live"
    RETIRING = "retiring"
    """Scaled away; its process is to be ended."""


class Held(msgspec.Struct, frozen=True):
    """One rank, as `group.json` keeps it."""

    slot: int
    incarnation: int
    """Counts launches and retries: either loses every request that the rank has."""
    dp_rank: int
    """vLLM's own number: its place in the group, which only the highest can leave. Not the slot."""
    pid: int
    """Of the API server, which leads a session of its own; 0 where the rank is not a process that healer knows."""
    pid_start: int
    url: str
    role: Role

    @property
    def member(self) -> Member:
        return Member(self.slot, self.incarnation, self.pid, self.pid_start, self.url)

    @property
    def process(self) -> Launched:
        return Launched(self.pid, self.pid_start)


class Part(StrEnum):
    """What a process of a rank's session does."""

    API = "api"
    ENGINE = "engine"
    WORKER = "worker"
    COORDINATOR = "coordinator"
    """Of the rank with DP rank 0 only. vLLM does not notice when it dies."""
    OTHER = "other"


class Process(msgspec.Struct, frozen=True):
    pid: int
    pid_start: int
    state: str
    """Letter of /proc/<pid>/stat."""
    part: Part


class Load(msgspec.Struct, frozen=True):
    running: float
    waiting: float
    generated: float
    """Tokens, over all resets of the counter."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank said when it was last asked. An answer that did not come is None, and `why` says which."""

    at: float
    health: bool | None = None
    gate: Gate | None = None
    scaling: Scaling | None = None
    fault: FaultStatus | None = None
    """None too where fault tolerance is off."""
    load: Load | None = None
    why: str = ""
    closed: bool = False
    """It takes no connections."""

    @property
    def answers(self) -> bool:
        return self.health is not None

    @property
    def unhealthy(self) -> bool:
        return self.fault is not None and any(e.status == "unhealthy" for e in self.fault.engines)

    @property
    def dead(self) -> bool:
        """By vLLM's own word, which is right when it says so."""
        return self.health is False or (self.fault is not None and any(e.status == "dead" for e in self.fault.engines))


class Canaried(msgspec.Struct, frozen=True):
    """The last canary of a rank."""

    at: float
    ok: bool
    tokens: tuple[int, ...]
    why: str = ""
    """Of a failure."""
