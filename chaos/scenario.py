"""Scenarios: what is hurt, when, under which load, and what must be so afterwards.

The conventions are those of Chaos Mesh and Litmus: `kind: Scenario`, faults with a duration, probes at the start, during and at
the end. Keys are in camelCase, durations carry a unit. `chaos.scenario_file` reads them with the place of each error.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from chaos.injectors.base import STRICT, Duration, Window
from chaos.injectors.registry import AnyInjector
from chaos.records import RequestOutcome

NAME = r"^[a-z0-9]([a-z0-9-]{0,78}[a-z0-9])?$"
API_VERSION = "healer-chaos/v1"

Slots = Annotated[tuple[Annotated[int, Field(ge=0, le=4095)], ...], Field(strict=False)]


class _Model(BaseModel):
    model_config = STRICT


class Metadata(_Model):
    name: Annotated[str, Field(pattern=NAME)]
    fear: Annotated[str, Field(min_length=10, max_length=300)]
    """What one would be afraid of: one sentence."""
    tags: Annotated[tuple[Annotated[str, Field(pattern=NAME)], ...], Field(strict=False)] = ()
    """``ci``: part of the short subset."""


class Group(_Model):
    """The group that is hurt. Scenarios with the same one share it, one after the other."""

    ranks: Annotated[int, Field(ge=1, le=16)] = 4
    max_ranks: Annotated[int, Field(ge=1, le=16)] = 6
    slots_per_rank: Annotated[int, Field(ge=1, le=256)] = 8
    redundant_experts: Annotated[int, Field(ge=0, le=4096)] = 8
    ep_backend: Literal["shm", "nixl", "nixl-ep"] = "shm"
    """``nixl-ep``: on the NVIDIA GPUs of this machine."""
    spares: Annotated[int, Field(ge=0, le=16)] = 0
    host_tier: bool = True
    gpus: bool = False
    """A stand-in for NVML with one GPU for each slot, and a kernel log; a rank is on the GPU of its slot."""
    hosts: Annotated[int, Field(ge=0, le=8)] = 0
    """Network namespaces; a rank is in the one with the number of its slot modulo this. For `epBackend: nixl`."""
    disk_mb: Annotated[int, Field(ge=0, le=4096)] = 0
    """The run directory is a file system of its own of this size; needs the right to mount one."""
    fresh: bool = False
    """Share with nobody: the scenario leaves something behind."""
    policy: dict[str, Any] = Field(default_factory=dict)
    """Keys of the policy's `spec`, such as `detection` or `bounds`, instead of the defaults."""

    @model_validator(mode="after")
    def _nixl_between_hosts(self) -> "Group":
        if self.hosts and self.ep_backend != "nixl":
            raise ValueError("hosts need epBackend: nixl, since shared memory ends at the host")
        return self

    @property
    def key(self) -> str:
        return self.model_dump_json()


class Load(_Model):
    """An open loop of greedy requests: they come as a Poisson process and do not wait for answers."""

    rate_per_s: Annotated[float, Field(ge=0, le=1000, alias="ratePerSecond")] = 6.0
    prompts: Annotated[int, Field(ge=1, le=1000)] = 12
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 32
    at_least_s: Window = 2.0
    """Goes on for so long, and until the group is whole again."""
    late_after_s: Window = 0.0
    """A first token, or a gap, beyond this is late; 0s: nothing is."""


class Probe(_Model):
    """A look from outside. It holds when the answer has the status and the text, or the command ends with 0."""

    name: Annotated[str, Field(min_length=1, max_length=60)]
    mode: Literal["start", "during", "end"] = "during"
    of: Literal["gateway", "daemon"] | None = None
    path: str = "/health"
    status: Annotated[int, Field(ge=100, le=599)] = 200
    contains: str = ""
    command: Annotated[tuple[str, ...], Field(strict=False)] = ()
    every_s: Duration = 1.0
    """Of a probe during the run."""
    may_fail: Annotated[int, Field(ge=0, le=100_000)] = 0
    """So many times, all in all."""

    @model_validator(mode="after")
    def _one_kind(self) -> "Probe":
        if (self.of is None) == (not self.command):
            raise ValueError("expected either of (gateway or daemon, with path) or command")
        return self


class Expect(_Model):
    """What must be so. All of it is checked; that every answer is right, that nobody is removed without need, that survivors
    capture nothing and that the daemon lives is checked unless something else is said here."""

    allowed: Annotated[tuple[RequestOutcome, ...], Field(strict=False)] = ()
    """Ends of a request besides ``right``."""
    at_most: Annotated[int, Field(ge=0)] | None = None
    """Requests that end in one of these; absent: any number."""
    live: Slots | None = None
    """Slots that serve in the end; absent: those from the beginning."""
    replaced: Slots | None = None
    """Slots that must have another rank in the end; absent: those whose ranks a fault was done to."""
    kept: Slots = ()
    """Slots that must have the same rank in the end, though a fault was done to it."""
    whole_within_s: Duration = 40.0
    """From the last fault until every slot is live and no sequence runs."""
    causes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Of the incidents, one of these; empty: any."""
    no_action: bool = False
    """The daemon does nothing at all: no action is written down."""
    gap_below_s: Window = 0.0
    """No client is silent for longer; 0s: not checked."""
    refused_faults: Annotated[int, Field(ge=0)] = 0
    """So many faults may not come about, such as one at a state that is not reached."""


class Spec(_Model):
    group: Group = Field(default_factory=Group)
    load: Load = Field(default_factory=Load)
    faults: Annotated[tuple[AnyInjector, ...], Field(strict=False)] = ()
    settle_s: Window = 0.0
    """Nothing is injected, and the run goes on, for so long after the last fault: for what must *not* happen."""
    probes: Annotated[tuple[Probe, ...], Field(strict=False)] = ()
    expect: Expect = Field(default_factory=Expect)


class Scenario(_Model):
    api_version: Literal["healer-chaos/v1"]
    kind: Literal["Scenario"]
    metadata: Metadata
    spec: Spec

    @property
    def name(self) -> str:
        return self.metadata.name
