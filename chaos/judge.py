"""Whether a run was as its scenario expects, by what clients, probes and the daemon saw: a pure function. What must be so in every
run is for `chaos.invariants` to check."""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from chaos.records import (
    Expectation,
    Fault,
    JournalEntry,
    ProbeResult,
    Request,
)
from chaos.scenario import Expect, Probe
from elastic.view import Member


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner saw."""

    expect: Expect
    base: tuple[int, ...]
    """Slots that serve at the beginning."""
    before: dict[int, Member]
    after: dict[int, Member]
    live: tuple[int, ...]
    """At the end, as the daemon says."""
    whole_after_s: float | None
    """From the last fault, or its end, until the group was whole; None: it was not within the time."""
    what_is_open: str
    """Why it was not whole, in the daemon's words."""
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    probes: tuple[ProbeResult, ...]
    asked: tuple[Probe, ...]
    journal: tuple[JournalEntry, ...]
    daemon_ended: str
    """How the daemon ended though nobody ended it; empty: it lives."""


def judge(found: Found) -> tuple[Expectation, ...]:
    """Every expectation, held or not."""
    return (*_requests(found), *_group(found), *_daemon(found), *_faults(found), *_probes(found))


def _requests(found: Found) -> Iterable[Expectation]:
    expect = found.expect
    outcomes = Counter(request.outcome for request in found.requests)
    others = {name: count for name, count in outcomes.items() if name != "right"}
    bad = {name: count for name, count in others.items() if name not in expect.allowed}
    limit = expect.at_most
    too_many = limit is not None and sum(others.values()) > limit
    allowed = (
        f"or {', '.join(expect.allowed)}{f' ({limit} at most)' if limit is not None else ''}" if expect.allowed else ""
    )
    first = next((r for r in found.requests if r.outcome in bad), None)
    why = f"; request {first.n}: {first.error or f'differs at token {first.differs_at}'}" if first else ""
    yield Expectation(
        name="requests",
        expected=f"every answer right {allowed}".strip(),
        found=f"{len(found.requests)} sent: "
        + (", ".join(f"{n} {k}" for k, n in sorted(outcomes.items())) or "none")
        + why,
        ok=not bad and not too_many,
    )
    gap_s = max((request.longest_gap_s for request in found.requests), default=0.0)
    if expect.gap_below_s:
        yield Expectation(
            name="gap",
            expected=f"no client is silent for {expect.gap_below_s:g} s",
            found=f"{gap_s:.3f} s",
            ok=gap_s < expect.gap_below_s,
        )


def _group(found: Found) -> Iterable[Expectation]:
    expect = found.expect
    live = found.base if expect.live is None else tuple(sorted(expect.live))
    yield Expectation(
        name="live", expected=f"slots {list(live)} serve", found=f"slots {list(found.live)}", ok=found.live == live
    )
    took = found.whole_after_s
    yield Expectation(
        name="whole-within",
        expected=f"{expect.whole_within_s:g} s after the last fault",
        found=f"{took:.2f} s" if took is not None else f"not at all: {found.what_is_open}",
        ok=took is not None and took <= expect.whole_within_s,
    )
    hurt = {m.slot for f in found.faults if f.must_be_replaced for m in f.members if found.before.get(m.slot) == m}
    wanted = (hurt if expect.replaced is None else set(expect.replaced)) - set(expect.kept)
    same = sorted(s for s in wanted if s in live and found.after.get(s) == found.before.get(s))
    if wanted:
        yield Expectation(
            name="replaced",
            expected=f"slots {sorted(wanted)} have another rank",
            found="they have" if not same else f"slots {same} have the same",
            ok=not same,
        )
    if expect.kept:
        gone = sorted(s for s in expect.kept if found.after.get(s) != found.before.get(s))
        yield Expectation(
            name="kept",
            expected=f"slots {sorted(expect.kept)} keep their ranks",
            found="they do" if not gone else f"slots {gone} have others",
            ok=not gone,
        )


def _daemon(found: Found) -> Iterable[Expectation]:
    yield Expectation(
        name="daemon", expected="it lives", found=found.daemon_ended or "it does", ok=not found.daemon_ended
    )
    if found.expect.no_action:
        acts = [e.body for e in found.journal if e.kind == "action"]
        yield Expectation(
            name="no-action",
            expected="the daemon does nothing",
            found=f"{len(acts)} actions"
            + (f", the first: {acts[0].get('step')} {acts[0].get('slots')}" if acts else ""),
            ok=not acts,
        )
    if found.expect.causes:
        causes = sorted(_causes(found.journal))
        yield Expectation(
            name="causes",
            expected=f"a decision on {' or '.join(found.expect.causes)}",
            found=", ".join(causes) or "none",
            ok=bool(set(causes) & set(found.expect.causes)),
        )


def _causes(journal: Iterable[JournalEntry]) -> set[str]:
    """Of decisions, and of verdicts that say unhealthy."""
    causes = {str(e.body["cause"]) for e in journal if e.kind == "decision" and "cause" in e.body}
    verdicts = [e.body["verdict"] for e in journal if e.kind == "verdict"]
    causes |= {str(v["cause"]) for v in verdicts if v.get("health") == "unhealthy"}
    return causes - {"none"}


def _faults(found: Found) -> Iterable[Expectation]:
    refused = [f for f in found.faults if f.refused]
    yield Expectation(
        name="faults",
        expected="all are injected"
        + (f", but for {found.expect.refused_faults}" if found.expect.refused_faults else ""),
        found=f"{len(found.faults) - len(refused)} of {len(found.faults)}"
        + (f"; {refused[0].id}: {refused[0].refused}" if refused else ""),
        ok=len([f for f in refused if "probability" not in f.refused]) <= found.expect.refused_faults,
    )


def _probes(found: Found) -> Iterable[Expectation]:
    failed: Counter[str] = Counter(result.name for result in found.probes if not result.ok)
    looked: Mapping[str, int] = Counter(result.name for result in found.probes)
    for probe in found.asked:
        first = next((r.found for r in found.probes if r.name == probe.name and not r.ok), "")
        yield Expectation(
            name=f"probe:{probe.name}",
            expected="holds" + (f", but for {probe.may_fail} times" if probe.may_fail else ""),
            found=f"{looked.get(probe.name, 0) - failed[probe.name]} of {looked.get(probe.name, 0)}{f'; {first}' if first else ''}",
            ok=failed[probe.name] <= probe.may_fail and looked.get(probe.name, 0) > 0,
        )
