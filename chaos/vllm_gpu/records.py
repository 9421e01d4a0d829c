"""What the scenario writes: one record for each part, times in seconds."""

from typing import Any

import msgspec

from chaos.machine import Machine
from chaos.vllm_gpu.load import LoadReport


class Phase(msgspec.Struct, frozen=True):
    name: str
    at_s: float
    """Its begin, since the event of the part."""
    took_s: float


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of healer, from its journal. Moments since the event of the part."""

    kind: str
    outcome: str
    reason: str
    began_s: float
    ended_s: float
    phases: tuple[Phase, ...]


class Gap(msgspec.Struct, frozen=True):
    """A stretch of a rank's start in which its log is silent."""

    process: str
    """That ends it."""
    at_s: float
    """Since the rank was launched."""
    took_s: float
    then: str
    """What the next line says."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """The start of one rank, from its log, to a second."""

    slot: int
    incarnation: int
    gaps: tuple[Gap, ...]
    """The longest, in their order."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    began_s: float
    """Since the scenario began."""
    took_s: float
    event_at_s: float
    """When the fault or the request of the part was made, since its load began."""
    figures: dict[str, Any]
    """Names end in their unit."""
    load: LoadReport | None
    sequences: tuple[Sequence, ...]
    boots: tuple[Boot, ...]
    error: str
    """Why it ended early, or what it missed; empty: nothing."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    gpus: tuple[str, ...]
    versions: dict[str, str]
    """vllm, torch and nixl: of the ranks."""
    profile: str
    args: tuple[str, ...]
    sizes: dict[str, Any]
    streams: int
    tokens: int
    began: str
    took_s: float
    parts: tuple[Part, ...]
