"""What the benchmark writes: raw samples by part. Times in seconds; moments since the fault or the request."""

from typing import Any

import msgspec

from chaos.machine import Machine
from elastic.controller.records import Joiner
from elastic.protocol import Source


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """From the end of one committed step of a rank to the end of the next, and where the time went."""

    at: float
    """When the later step had ended."""
    took_s: float
    settle_s: float
    """Behind the earlier step: its tokens chosen, committed, handed out."""
    stand_s: float
    """Between the two rounds."""
    build_s: float
    """The rows of the later step put together."""
    launch_s: float
    wait_s: float
    """From its launch until the device was done."""
    works: tuple[tuple[str, float, float], ...]
    """What other threads of the rank did meanwhile: name, begin, seconds."""


class Survivor(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that was there before and after an operation, by its own records."""

    slot: int
    captures: tuple[int, int]
    """Step graphs captured in its life: before, after."""
    address_changes: tuple[int, int]
    step_before_s: float | None
    """Median from one committed step to the next, before the operation."""
    step_after_s: float | None
    """The same when all was over."""
    longest_gap_s: float | None
    """Longest time between two committed steps from the end of the loss (or the request) until all was over, the
    background work of others included."""
    longest: Gap | None = None
    """That gap."""


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of the executor, from its report."""

    kind: str
    outcome: str
    slots: tuple[int, ...]
    phases: dict[str, tuple[float, float]]
    """By name: begin, and seconds that it took."""
    pause_s: dict[int, float]
    """By survivor: from its last committed step before the change (or the fault) to its first under the new view."""
    first_step_s: dict[int, float]
    """By survivor: when its first step after the commit had ended."""
    gaps: dict[int, Gap]
    """By survivor: where the time went between its last committed step and its first under the new view."""
    moved: dict[str, Source]
    """Weights loaded, by source: peer, host, disk."""
    copy_s: float
    """The longest that one rank loaded weights."""
    joiners: dict[int, Joiner]
    joined_s: dict[int, tuple[float, float]] = {}
    """By joiner: when its first step was launched, and when it had ended."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One fault or one request, and all that followed from it."""

    what: str
    slots: tuple[int, ...]
    at: float
    """The moment of it; everything else counts from here."""
    seen_s: float | None
    """Evidence of the fault; None for a request."""
    capacity_s: float
    """When the last sequence had ended: full size again, or the new size."""
    sequences: tuple[Sequence, ...]
    survivors: tuple[Survivor, ...]
    spares_booting: int = 0
    """Spares that were on their way when it began."""
    idle_gap_s: float | None = None
    """Longest time between two committed steps of any rank from then until the next fault or request: nothing happens but
    that spares come up."""
    tokens_equal: bool | None = None
    """Of all answers that were under way meanwhile; None where no client watched."""
    answers: int = 0
    wrong: tuple[str, ...] = ()


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the benchmark, whole or as far as it came."""

    name: str
    title: str
    config: dict[str, Any]
    budget_s: float
    began: str
    took_s: float
    wanted: int
    """Samples that were asked for; fewer are there when the budget was spent."""
    samples: tuple[Sample, ...]
    figures: dict[str, Any]
    """What is no sample: names end in their unit."""
    error: str
    """Why it ended early; empty: it did not."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    gpus: tuple[str, ...]
    versions: dict[str, str]
    began: str
    seed: int
    cpu: bool
    """Run without GPUs: sizes and times say nothing about a GPU."""
    checkpoints_s: dict[str, float]
    """What it took to make each."""
    took_s: float
    parts: tuple[Part, ...]


class Spread(msgspec.Struct, frozen=True):
    n: int
    p50: float
    p95: float
    max: float
