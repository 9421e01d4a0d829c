"""What the benchmark writes. Moments and durations in seconds; moments since the signal, unless said otherwise."""

from typing import Any

import msgspec

from chaos.machine import Machine
from chaos.vllm_gpu.load import LoadReport
from chaos.vllm_gpu.records import Sequence


class Silence(msgspec.Struct, frozen=True):
    """The longest stretch in which a rank's clients got no token."""

    at_s: float
    took_s: float

    @property
    def ended_s(self) -> float:
        return self.at_s + self.took_s


class Survivor(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that goes on, as its own clients see it."""

    slot: int
    right: int
    wrong: int
    errors: int
    heal: Silence | None
    """Around the heal; its end is the first token after it. None: nobody asked."""
    refill: Silence | None
    """Around the commit of the refill."""
    same_process: bool
    captures: int
    """Of graphs, from the signal on: none is right."""
    modes: dict[str, int]
    """Steps by graph mode, from the signal on; empty where vLLM does not say."""
    reloaded: int = 0
    """Experts that the group had lost and loaded again, of all layers."""
    reloaded_mb: float = 0.0
    """That this rank loaded, from the host copy."""
    memory_mb: float
    """Resident and anonymous, of engine and workers, after the refill."""
    shared_mb: float = 0.0
    """Resident pages of files and of shared memory: each rank touches more of the host copy of experts as they move."""
    threads: int = 0
    files: int = 0
    """Open ones."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One death: of the engine and the workers of a slot."""

    slot: int
    under_load: bool
    in_round: bool = False
    """The signal was sent when a round of vLLM's balancer had begun."""
    second: int | None = None
    """Another slot that was killed while this one was being filled: moments are told since then."""
    second_after_s: float = 0.0
    """Since the others had begun to prepare for the joiner."""
    killed: int
    """Processes of `slot`."""
    healed_s: float
    """Until the daemon says that the others are the group."""
    answered_s: float
    """Until every survivor has given another right answer, which takes a request's own time."""
    filled_s: float
    """Until the slot serves again."""
    from_spare: bool = False
    """The new rank in `slot` was a warm spare before."""
    survivors: tuple[Survivor, ...]
    victim_errors: int
    """Of clients that ask the dead rank itself."""
    router: LoadReport | None
    """Clients at the router, which replays what the dead rank had."""
    sequences: tuple[Sequence, ...]
    gpu_memory_mb: tuple[int, ...]
    """Used on each GPU, after the refill."""
    problems: tuple[str, ...]


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of load on one group."""

    plugin: bool
    tokens_per_s: float
    median_wait_ms: float
    """Of a client for its next chunk."""
    p99_wait_ms: float


class Compared(msgspec.Struct, frozen=True):
    """With the plugin relative to stock, pair by pair."""

    ratio: float
    low: float
    """95 % of the interval of the mean."""
    high: float


class Part(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    began_s: float
    """Since the run began."""
    took_s: float
    figures: dict[str, Any]
    """Names end in their unit."""
    cases: tuple[Case, ...] = ()
    windows: tuple[Window, ...] = ()
    compared: dict[str, Compared] = {}
    load: LoadReport | None = None
    sequences: tuple[Sequence, ...] = ()
    error: str = ""
    """Why it ended early, or what it missed; empty: nothing."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    gpus: tuple[str, ...]
    versions: dict[str, str]
    profile: str
    ranks: int
    spares: int
    args: tuple[str, ...]
    """Of the ranks with the plugin."""
    env: dict[str, str] = {}
    """What was changed in the environment of the ranks of both groups."""
    streams: int
    tokens: int
    began: str
    took_s: float
    parts: tuple[Part, ...]
