"""A fault injected on purpose, and what became of it: for the demo and for benchmarks.

Every figure comes from whoever knows it: the injector's clock (the moment of the fault), the journal (evidence, phases,
pauses, weights moved), the gateway's counters (replays) and the clients' chunks (silence). All on this host's monotonic
clock.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from elastic.client import Answer
from elastic.controller.records import SequenceReport
from elastic.errors import ElasticError
from elastic.protocol import Loaded, Source
from healer.deployment import Deployment, eventually

SOURCES = ("peer", "host", "disk")


class Step(msgspec.Struct, frozen=True):
    """One phase of the healing. Those of the refill start with "refill: "; one of a sequence that was not committed names
    its outcome in parentheses."""

    name: str
    at_s: float
    """Its begin, since the fault."""
    took_s: float


class Healing(msgspec.Struct, frozen=True, kw_only=True):
    """One healed incident. Moments are in seconds since the fault."""

    incident: str
    slots: tuple[int, ...]
    cause: str
    evidence: str
    """The sentence of the verdict that the first decision was made on."""
    detect_s: float
    """When the evidence was seen that condemned the rank."""
    verdict_s: float
    """When the verdict was given on it."""
    coverage_s: float
    """When every survivor had committed a step again with every expert covered."""
    capacity_s: float
    """When the replacement served."""
    pause_s: dict[int, float]
    """Longest gap between two committed steps, by survivor; absent where it was idle."""
    steps: tuple[Step, ...]
    """By begin."""
    cover: dict[str, Source]
    """Weights moved by the loss sequence, by source: peer, host, disk. An expert counts as one tensor."""
    refill: dict[str, Source]
    """The same for the replacement: experts and dense weights."""


def healing_of(summary: dict[str, Any], entries: Iterable[dict[str, Any]], fault_at: float) -> Healing:
    """Read a healed incident, as `/history/{incident}` answers. Raises ElasticError where no commit covers the experts or
    no replacement joined."""
    reports, evidence, detected, judged = [], "", 0.0, 0.0
    for entry in entries:
        body = entry["body"]
        if "report" in body:
            reports.append(msgspec.convert(body["report"], SequenceReport, str_keys=True))
        elif entry["kind"] == "verdict" and body["verdict"]["health"] == "unhealthy" and not evidence:
            evidence, detected = body["verdict"]["sentence"], body["verdict"]["since"]
            judged = entry["monotonic"]
    done = [r for r in reports if r.outcome == "committed"]
    commits = [r for r in done if any(p.name == "commit" for p in r.phases)]
    joins = [r for r in done if r.kind in ("join", "form")]
    if not (evidence and commits and joins):
        kinds = ", ".join(f"{r.kind} {r.outcome}" for r in reports) or "no sequence"
        raise ElasticError(f"incident {summary['id']} is {summary['outcome']} without a commit and a refill: {kinds}")
    losses = [r for r in done if r.kind == "loss"]
    steps = [Step("detect", 0.0, detected - fault_at), *(s for r in reports for s in _steps(r, fault_at))]
    return Healing(
        incident=summary["id"],
        slots=tuple(summary["slots"]),
        cause=", ".join(summary["causes"]),
        evidence=evidence,
        detect_s=detected - fault_at,
        verdict_s=judged - fault_at,
        coverage_s=_end_of(commits[0]) - fault_at,
        capacity_s=_end_of(joins[-1]) - fault_at,
        pause_s=_longest(r.pause_s for r in reports),
        steps=tuple(sorted(steps, key=lambda s: s.at_s)),
        cover=_moved(losses),
        refill=_moved(joins),
    )


def _steps(report: SequenceReport, fault_at: float) -> Iterable[Step]:
    prefix = "refill: " if report.kind in ("join", "form") else ""
    suffix = "" if report.outcome == "committed" else f" ({report.outcome})"
    for phase in report.phases:
        # the report counts from the evidence on: what it calls detection is the way from there to the sequence
        name = "decide" if phase.name == "detect" else phase.name.split()[0]
        yield Step(prefix + name + suffix, phase.start - fault_at, phase.seconds)


def _end_of(report: SequenceReport) -> float:
    return max(p.end for p in report.phases)


def _longest(pauses: Iterable[dict[int, float]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for by_slot in pauses:
        for slot, pause_s in by_slot.items():
            found[slot] = max(pause_s, found.get(slot, 0.0))
    return dict(sorted(found.items()))


def _moved(reports: Iterable[SequenceReport]) -> dict[str, Source]:
    loads: list[Loaded] = [loaded for r in reports for loaded in r.loaded.values()]
    found = {}
    for name in SOURCES:
        parts = [getattr(loaded, name) for loaded in loads]
        found[name] = Source(sum(p.tensors for p in parts), sum(p.bytes for p in parts))
    return found


async def incidents(deployment: Deployment) -> set[str]:
    """The ids of those that are known now."""
    return {one["id"] for one in await deployment.get("/incidents")}


async def healed(
    deployment: Deployment, known: set[str], fault_at: float, deadline_s: float, progress: Callable[[str], None]
) -> Healing:
    """Wait until the incident that is not in `known` is closed. `progress` is told what the group is at. Raises
    ElasticError when that is not so in time."""

    async def probe() -> dict[str, Any] | None:
        progress((await deployment.get("/status"))["group"]["sequence"] or "")
        fresh = [one for one in await deployment.get("/incidents") if one["id"] not in known]
        return fresh[0] if fresh and all(one["outcome"] != "open" for one in fresh) else None

    summary = await eventually(probe, "the incident is closed", deadline_s)
    found = await deployment.get(f"/incidents/{summary['id']}")
    return healing_of(found["incident"], found["entries"], fault_at)


async def replays(deployment: Deployment) -> int:
    """Requests that the gateway has moved to another rank so far."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(deployment.gateway() + "/metrics", timeout=10)).raise_for_status().text
    families = text_string_to_metric_families(text)
    return int(sum(s.value for f in families for s in f.samples if s.name == "elastic_gateway_replays_total"))


def in_flight(answers: Iterable[Answer], at: float) -> int:
    """Requests that had begun to answer and had not ended."""
    return sum(1 for a in answers if a.times and a.times[0] <= at < a.times[-1])


def longest_gap_s(answers: Iterable[Answer], since: float, until: float) -> float:
    """The longest silence of any client between two chunks, of those silences that overlap the span."""
    gaps = (b - a for answer in answers for a, b in pairwise(answer.times) if b > since and a < until)
    return max(gaps, default=0.0)


def wrong(answers: Sequence[Answer], expected: Sequence[list[int]]) -> list[str]:
    """What is not as it should be, a line for each request; empty: all are complete and the same token by token."""
    found = []
    for i, (answer, want) in enumerate(zip(answers, expected, strict=True)):
        if answer.error is not None or answer.finish is None:
            found.append(f"request {i} did not complete: {answer.error or 'it has no end'}")
        elif answer.tokens != want:
            same = next((n for n, (a, b) in enumerate(zip(answer.tokens, want, strict=False)) if a != b), None)
            place = f"from token {same} on" if same is not None else f"in length: {len(answer.tokens)}, not {len(want)}"
            found.append(f"request {i} differs from the fault-free run {place}")
    return found
