"""Which rule answers a verdict: the first that matches. Compiled once for each policy, with an index by cause, so that a
thousand ranks and hundreds of rules cost little; the same code tells why a rule did not match.
"""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from heapq import merge
from operator import attrgetter
from typing import NamedTuple

import msgspec

from healer.diagnosis import Cause, Health, Verdict
from healer.evidence import Evidence, RankRef, Severity, What
from healer.policy.expressions import Condition, ExpressionError, compiled
from healer.policy.schema import Match, Policy, Rule

MOST_FILED = 64
"""Slots of one rule."""

_RANK_OF = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


class Facts:
    """All that a rule can look at in one case: a verdict on a rank, and what it rests on."""

    def __init__(
        self,
        verdict: Verdict,
        evidence: tuple[Evidence, ...],
        now: float,
        *,
        host: str = "",
        labels: Mapping[str, str] | None = None,
        failures: int = 1,
        live: int = 0,
        target: int = 0,
        lost: int = 0,
    ) -> None:
        """`evidence` supports the verdict; `failures`: of the slot within the fault budget's window, this one included."""
        self.verdict, self.evidence, self.now = verdict, evidence, now
        self.host, self.labels = host, labels or {}
        self.failures, self.live, self.target, self.lost = failures, live, target, lost

    @cached_property
    def slot(self) -> int:
        return self.verdict.rank.slot

    @cached_property
    def kinds(self) -> tuple[What, ...]:
        return tuple(dict.fromkeys(e.what for e in self.evidence))

    @cached_property
    def sources(self) -> frozenset[str | RankRef]:
        """Independent sources: sensors, and ranks that report a peer."""
        return frozenset(e.reporter if e.reporter is not None else e.source for e in self.evidence)

    @cached_property
    def severity(self) -> str:
        """The worst; empty without evidence."""
        return max((e.severity for e in self.evidence), key=_RANK_OF.__getitem__, default="")

    @cached_property
    def xids(self) -> tuple[int, ...]:
        """The one to blame first; those that the verdict does not name follow, oldest first."""
        told = self.verdict.xids
        seen = (int(e.value) for e in self.evidence if e.what == What.XID)
        return tuple(dict.fromkeys((*told, *seen)))

    def recent(self, within_s: float | None) -> "Facts":
        """The same case with only the evidence that is as recent."""
        if within_s is None:
            return self
        kept = tuple(e for e in self.evidence if self.now - e.at <= within_s)
        return self if len(kept) == len(self.evidence) else Facts(self.verdict, kept, self.now)

    @cached_property
    def variables(self) -> dict[str, object]:
        """What a condition may name; `healer.policy.expressions` says what each is."""
        latest = [e for e in self.evidence if e.what == What.XID]
        xid = int(max(latest, key=lambda e: e.at).value) if latest else next(iter(self.xids), 0)
        return {
            "verdict": self.verdict.health.value,
            "cause": self.verdict.cause.value,
            "confidence": self.verdict.confidence.value,
            "severity": str(self.severity),
            "slot": self.slot,
            "host": self.host,
            "labels": dict(self.labels),
            "xid": xid,
            "evidence": [
                {
                    "what": e.what.value,
                    "source": e.source,
                    "value": e.value,
                    "severity": e.severity.value,
                    "ageSeconds": max(0.0, self.now - e.at),
                }
                for e in self.evidence
            ],
            "sources": len(self.sources),
            "failures": self.failures,
            "live": self.live,
            "target": self.target,
            "lost": self.lost,
        }


class Mismatch(msgspec.Struct, frozen=True):
    """Why a rule does not match, or does not act yet."""

    key: str
    """The key of the rule, as in the policy."""
    wanted: str
    found: str

    def __str__(self) -> str:
        return f"{self.key}: wants {self.wanted}, found {self.found}"


class Considered(msgspec.Struct, frozen=True):
    """One rule in an explanation."""

    rule: str
    outcome: str
    """`matched`, `waits` (matched, but `require` is not met), `no-match`, or `not-reached` (an earlier rule matched)."""
    because: tuple[Mismatch, ...] = ()
    """Every key that does not fit, also of rules that are not reached."""


class _Test(NamedTuple):
    """One key of a rule, ready to be asked."""

    key: str
    wanted: object
    holds: Callable[[Facts], bool]
    found: Callable[[Facts], object]
    """What a user is told in its place."""


class CompiledRule:
    """One rule, ready to be asked."""

    def __init__(self, rule: Rule, index: int) -> None:
        self.rule, self.index, self.name = rule, index, rule.name
        self._healths = frozenset(rule.match.verdict)
        self.causes = None if rule.match.cause is None else frozenset(rule.match.cause)
        self._tests = tuple(_tests(rule.match))
        """Only of the keys that are given, cheap ones first."""

    def fits_health(self, health: Health) -> bool:
        return health.value in self._healths

    def fits(self, health: Health, cause: Cause) -> bool:
        """Whether a verdict can be its business; of a rank that is well, and has not even a warning, nothing is."""
        of_none = health == Health.HEALTHY and cause == Cause.NONE
        return self.fits_health(health) and not of_none and (self.causes is None or cause.value in self.causes)

    def matches(self, facts: Facts) -> bool:
        return all(test.holds(facts) for test in self._tests)

    def mismatches(self, facts: Facts) -> tuple[Mismatch, ...]:
        """Every key of `match` that does not fit."""
        return tuple(
            Mismatch(test.key, _listed(test.wanted), _listed(test.found(facts)))
            for test in self._tests
            if not test.holds(facts)
        )

    def waits_for(self, facts: Facts) -> Mismatch | None:
        """What `require` still asks for."""
        require = self.rule.require
        if require.within_s is None and require.evidence == 1 and require.sources == 1:
            return None
        recent, within = facts.recent(require.within_s), ""
        if require.within_s is not None:
            within = f" within {require.within_s:g} s"
        if len(recent.evidence) < require.evidence:
            return Mismatch("require.evidence", f"{require.evidence}{within}", str(len(recent.evidence)))
        if len(recent.sources) < require.sources:
            return Mismatch("require.sources", f"{require.sources}{within}", str(len(recent.sources)))
        return None


def _tests(match: Match) -> Iterator[_Test]:
    healths = frozenset(match.verdict)
    yield _Test("match.verdict", match.verdict, lambda f: f.verdict.health in healths, lambda f: f.verdict.health)
    if Health.HEALTHY in healths:
        yield _Test("match.cause", "a warning", lambda f: not _is_well(f), lambda f: "none")
    if match.cause is not None:
        causes = frozenset(match.cause)
        yield _Test("match.cause", match.cause, lambda f: f.verdict.cause in causes, lambda f: f.verdict.cause)
    if match.confidence is not None:
        levels = frozenset(match.confidence)
        yield _Test(
            "match.confidence",
            match.confidence,
            lambda f: f.verdict.confidence in levels,
            lambda f: f.verdict.confidence,
        )
    if (slots := match.slot) is not None:
        yield _Test("match.slot", slots, lambda f: any(a <= f.slot <= b for a, b in slots), lambda f: f.slot)
    if (codes := match.xid) is not None:
        yield _Test(
            "match.xid", codes, lambda f: any(a <= xid <= b for a, b in codes for xid in f.xids), lambda f: f.xids
        )
    if match.evidence is not None:
        kinds = frozenset(match.evidence)
        yield _Test("match.evidence", match.evidence, lambda f: not kinds.isdisjoint(f.kinds), lambda f: f.kinds)
    if match.severity is not None:
        grades = frozenset(match.severity)
        yield _Test("match.severity", match.severity, lambda f: f.severity in grades, lambda f: f.severity or "none")
    if (hosts := match.host) is not None:
        yield _Test(
            "match.host",
            hosts,
            lambda f: any(fnmatch.fnmatchcase(f.host, pattern) for pattern in hosts),
            lambda f: f.host or "unknown",
        )
    for name, value in (match.labels or {}).items():
        yield _label(name, value)
    if match.when is not None:
        condition = compiled(match.when)
        yield _Test("match.when", match.when, lambda f: _met(condition, f) == "true", lambda f: _met(condition, f))


def _is_well(facts: Facts) -> bool:
    return facts.verdict.health == Health.HEALTHY and facts.verdict.cause == Cause.NONE


def _label(name: str, value: str) -> _Test:
    return _Test(
        f"match.labels.{name}", value, lambda f: f.labels.get(name) == value, lambda f: f.labels.get(name, "none")
    )


def _met(condition: Condition, facts: Facts) -> str:
    """`true`, `false`, or why it cannot be told, which counts as false."""
    try:
        return "true" if condition.holds(facts.variables) else "false"
    except ExpressionError as error:
        return str(error)


class RuleBook:
    """The rules of one policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rules = tuple(CompiledRule(rule, index) for index, rule in enumerate(policy.spec.healing.rules))
        self.by_name = {one.name: one for one in reversed(self.rules)}
        self._at_slot: dict[int, list[CompiledRule]] = {}
        """Rules that name few slots, by slot, in order."""
        everywhere = [one for one in self.rules if not self._names_slots(one)]
        able = {
            (health, cause): frozenset(one.index for one in self.rules if one.fits(health, cause))
            for health in Health
            for cause in Cause
        }
        self._able = able
        """Indices of the rules that verdict and cause fit."""
        self._index = {key: tuple(one for one in everywhere if one.index in fit) for key, fit in able.items()}
        """Of these, the rules for any slot."""
        self._labels: dict[int, Mapping[str, str]] = {}
        """By slot, as they are asked for: there may be a million."""

    def concerns(self, verdict: Verdict) -> bool:
        """False: no rule can match such a verdict, whatever it rests on."""
        return bool(self._able[verdict.health, verdict.cause])

    def first(self, facts: Facts) -> CompiledRule | None:
        """The rule that answers the case. Raises nothing: a condition that fails counts as no match."""
        key = facts.verdict.health, facts.verdict.cause
        candidates: Iterable[CompiledRule] = self._index[key]
        if here := self._at_slot.get(facts.slot):
            fit = self._able[key]
            candidates = merge(candidates, (one for one in here if one.index in fit), key=_index_of)
        return next((one for one in candidates if one.matches(facts)), None)

    def _names_slots(self, one: CompiledRule) -> bool:
        """Files the rule under the slots that it names; a rule for many slots is tried at each, and looks for itself."""
        spans = one.rule.match.slot
        if spans is None or sum(span.last - span.first + 1 for span in spans) > MOST_FILED:
            return False
        for slot in sorted({slot for span in spans for slot in range(span.first, span.last + 1)}):
            self._at_slot.setdefault(slot, []).append(one)
        return True

    def labels(self, slot: int) -> Mapping[str, str]:
        if slot not in self._labels:
            self._labels[slot] = self.policy.spec.target.labels_of(slot)
        return self._labels[slot]

    def explain(self, facts: Facts) -> tuple[Considered, ...]:
        """Every rule in order: which one matched, and for each other why not."""
        found, told = False, []
        for one in self.rules:
            because = one.mismatches(facts)
            outcome = "no-match"
            if found:
                outcome = "not-reached"
            elif not because:
                found, waits = True, one.waits_for(facts)
                outcome, because = ("waits", (waits,)) if waits else ("matched", ())
            told.append(Considered(one.name, outcome, because))
        return tuple(told)


_index_of = attrgetter("index")

_books: dict[int, RuleBook] = {}
_MAX_BOOKS = 8


def book_of(policy: Policy) -> RuleBook:
    """The rules of a policy, compiled at the first call."""
    book = _books.get(id(policy))
    if book is None:
        while len(_books) >= _MAX_BOOKS:
            _books.pop(next(iter(_books)))
        # the book keeps its policy alive, so that no other policy can get the same id
        book = _books[id(policy)] = RuleBook(policy)
    return book


def _listed(values: object) -> str:
    return ", ".join(map(str, values)) or "none" if isinstance(values, (tuple, list, dict)) else str(values)
