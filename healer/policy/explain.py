"""Which rule of a policy answers an event, and why the others do not: for `healer policy explain`.

An event is a list of `key=value`. With a signal of `spec.load`, or `ranks` or `for`, among the keys it is about load, else
about a rank.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeVar

import msgspec

from elastic.errors import ElasticError
from healer.diagnosis import Cause, Confidence, Health, Verdict
from healer.evidence import Evidence, RankRef, Severity, What
from healer.load.decision import ScaleDecision
from healer.load.engine import Group, ScalerState, Seen, evaluate
from healer.load.plan import compile_rules
from healer.load.readings import MISSING, Known, Level
from healer.policy.match_doubts import confidences_of
from healer.policy.rules import Considered, Facts, RuleBook
from healer.policy.schedules import Calendar
from healer.policy.schema import Policy, Rung
from healer.policy.schema.base import parse_window
from healer.policy.schema.scaling import GATEWAY_METRICS
from healer.trace import LATEST_WALL

E = TypeVar("E", bound=StrEnum)

RANK_KEYS = {
    "verdict": "healthy, unhealthy or unknown; default unhealthy",
    "cause": "such as process-death, hang or xid; default process-death, or xid where xid is given",
    "confidence": "none, conclusive, quorum or deadline; default what a verdict with the cause rests on",
    "slot": "default 0",
    "host": "its name; default none",
    "xid": "its code",
    "evidence": "kinds, separated by +, such as xid+gpu-lost",
    "source": "who reports them, separated by +; default one source",
    "severity": "info, warning or critical; default critical",
    "failures": "of the slot lately; default 1",
    "live": "ranks; default target.ranks - 1",
    "lost": "ranks that are unhealthy now; default 1",
}
LOAD_KEYS = {
    "ranks": "live ranks; default target.ranks",
    "for": "how long it has been so, such as 90s; default 1h",
    "wall": "when, for schedules, such as 2026-01-31T23:00+01:00, or seconds since the epoch; default now",
}


class EventError(ElasticError):
    """An event that cannot be understood; the message says what was expected."""


class Explained(msgspec.Struct, frozen=True):
    about: str
    """`rank` or `load`."""
    rules: tuple[Considered, ...]
    """Of an event about a rank: every healing rule in order."""
    ladder: tuple[str, ...]
    """Actions of the rule that matched."""
    scaling: ScaleDecision | None
    """Of an event about load: the decision with every rule's vote."""
    missing: tuple[str, ...] = ()
    """Signals that the event did not give a value: they count as missing."""
    asks: bool = True
    """Where no rule matches, a human is asked."""
    assumed: dict[str, str] = {}
    """Of an event about a rank: what it does not give, and was taken to be."""


def explain(policy: Policy, event: str, wall: float) -> Explained:
    """`event` as "cause=xid,xid=79,slot=3" or "waiting=40,ranks=4". `wall`: seconds since the epoch, for schedules.
    Raises EventError."""
    given = _parse(event)
    load = policy.spec.load
    about_load = sorted(given.keys() & {*load.signals, *GATEWAY_METRICS, *LOAD_KEYS})
    if not about_load:
        return _rank(policy, given)
    if not load.rules and not policy.spec.schedules:
        text = f"{about_load[0]} is about load, and the policy has neither load rules nor schedules (spec.load.rules, "
        raise EventError(f"--event: {text}spec.schedules): no load changes its size")
    about_rank = sorted(given.keys() & RANK_KEYS.keys() - {*load.signals})
    if about_rank:
        text = f"{about_load[0]} is about load and {about_rank[0]} about a rank, expected keys of one of the two"
        raise EventError(f"--event: {text}")
    return _load(policy, given, wall)


def _parse(event: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in event.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise EventError(f"--event: {part[:40]!r} is not valid, expected key=value, such as cause=process-death")
        if key.strip() in found:
            raise EventError(f"--event: {key.strip()} is there twice, expected it once")
        found[key.strip()] = value.strip()
    if not found:
        raise EventError("--event: is empty, expected key=value pairs, such as cause=process-death,slot=1")
    return found


def _rank(policy: Policy, given: Mapping[str, str]) -> Explained:
    signals = policy.spec.load.signals
    unknown = given.keys() - RANK_KEYS.keys()
    if unknown:
        known = ", ".join([*RANK_KEYS, *signals])
        raise EventError(f"--event: {', '.join(sorted(unknown))[:80]}: unknown key, expected one of {known}")
    xid = _number(given, "xid", 0, int)
    health = _one_of(given, "verdict", Health, Health.UNHEALTHY)
    cause = _one_of(given, "cause", Cause, Cause.XID if xid else Cause.PROCESS_DEATH)
    usual = confidences_of(cause)[0] if health == Health.UNHEALTHY else Confidence.NONE
    confidence = _one_of(given, "confidence", Confidence, usual)
    severity = _one_of(given, "severity", Severity, Severity.CRITICAL)
    slot = _number(given, "slot", 0, int)
    if slot >= policy.spec.target.max_ranks:
        raise EventError(f"--event: slot={slot} is not valid, expected at most {policy.spec.target.max_ranks - 1}")
    kinds = given["evidence"].split("+") if "evidence" in given else ["xid" if xid else "process-state"]
    sources = given.get("source", "explain").split("+")
    whats = [_one_of({"evidence": kind}, "evidence", What, What.XID) for kind in kinds]
    rank, count = RankRef(slot, 0), max(len(whats), len(sources))
    evidence = tuple(
        Evidence(
            source=sources[i % len(sources)],
            seq=i + 1,
            subject=rank,
            what=whats[i % len(whats)],
            value=xid if whats[i % len(whats)] is What.XID else 0,
            severity=severity,
            at=0.0,
            wall=0.0,
        )
        for i in range(count)
    )
    verdict = Verdict(
        subject=rank,
        health=health,
        cause=cause,
        confidence=confidence,
        evidence=tuple(e.id for e in evidence),
        since=0.0,
        sentence="as given",
        xids=(xid,) if xid else (),
    )
    book, ranks = RuleBook(policy), policy.spec.target.ranks
    counts = {
        "failures": _number(given, "failures", 1, int),
        "live": _number(given, "live", max(0, ranks - 1), int),
        "lost": _number(given, "lost", 1 if health == Health.UNHEALTHY else 0, int),
    }
    facts = Facts(verdict, evidence, 0.0, host=given.get("host", ""), labels=book.labels(slot), target=ranks, **counts)
    told = book.explain(facts)
    matched = next((one.rule for one in told if one.outcome in ("matched", "waits")), "")
    ladder = tuple(_shown(rung) for rung in book.by_name[matched].rule.ladder) if matched else ()
    taken = {
        "verdict": health, "cause": cause, "confidence": confidence, "slot": slot, "severity": severity,
        "evidence": "+".join(kinds), **counts,
    }  # fmt: skip
    assumed = {key: str(value) for key, value in taken.items() if key not in given}
    return Explained("rank", told, ladder, None, asks=health == Health.UNHEALTHY, assumed=assumed)


def _shown(rung: Rung) -> str:
    return f"hook {rung.hook}" if rung.action == "hook" else rung.action


def _load(policy: Policy, given: Mapping[str, str], wall: float) -> Explained:
    load = policy.spec.load
    unknown = given.keys() - load.signals.keys() - LOAD_KEYS.keys()
    if unknown:
        known = ", ".join([*load.signals, *LOAD_KEYS])
        raise EventError(f"--event: {', '.join(sorted(unknown))[:80]}: unknown key, expected one of {known}")
    ranks = _number(given, "ranks", policy.spec.target.ranks, int)
    if ranks < 1:
        raise EventError(f"--event: ranks={ranks} is not valid, expected at least 1")
    levels = {name: _level(given, name) for name in load.signals}
    lasting_s = _lasting(given)
    wall = _moment(given, wall)
    seen = Seen(Group(ranks, ranks), levels, calendar=Calendar(policy.spec.schedules).at(wall))
    rules, state = compile_rules(policy), ScalerState()
    _, state = evaluate(rules, state, seen, 0.0)
    # as if the size had been the same all the while: what was held back may be done at the end
    decision, _ = evaluate(rules, msgspec.structs.replace(state, wishes=()), seen, lasting_s)
    missing = tuple(name for name in load.signals if given.get(name, "missing") == "missing")
    return Explained("load", (), (), decision, missing)


def _lasting(given: Mapping[str, str]) -> float:
    """Seconds; a plain number is seconds too."""
    text = given.get("for", "1h")
    try:
        return parse_window(text if text[-1:].isalpha() else f"{text}s")
    except ValueError:
        raise EventError(f"--event: for={text[:40]} is not valid, expected a duration such as 90s or 5m") from None


def _moment(given: Mapping[str, str], now: float) -> float:
    """Seconds since the epoch."""
    text = given.get("wall")
    if text is None:
        return now
    try:
        if text.replace(".", "", 1).isdigit():
            seconds = float(text)
        else:
            moment = datetime.fromisoformat(text)
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        seconds = -1.0
    if not 0 <= seconds <= LATEST_WALL:
        expected = "expected a time such as 2026-01-31T23:00+01:00 (without an offset UTC), or seconds since the epoch"
        raise EventError(f"--event: wall={text[:40]} is not valid, {expected}") from None
    return seconds


def _level(given: Mapping[str, str], name: str) -> Level:
    text = given.get(name, "missing")
    if text == "missing":
        return MISSING
    return Level(Known.IDLE) if text == "idle" else Level(Known.VALUE, _number(given, name, 0.0, float))


N = TypeVar("N", int, float)

LARGEST = 1e15


def _number(given: Mapping[str, str], key: str, default: N, kind: Callable[[str], N]) -> N:
    if key not in given:
        return default
    try:
        number = kind(given[key])
    except ValueError:
        number = kind("-1")
    # nothing that is told of has a negative count, and no signal is endless
    if not 0 <= number <= LARGEST:
        raise EventError(f"--event: {key}={given[key][:40]} is not valid, expected a number from 0 on") from None
    return number


def _one_of(given: Mapping[str, str], key: str, kind: type[E], default: E) -> E:
    if key not in given:
        return default
    try:
        return kind(given[key])
    except ValueError:
        expected = ", ".join(kind)
        raise EventError(f"--event: {key}={given[key][:40]} is not valid, expected one of {expected}") from None
