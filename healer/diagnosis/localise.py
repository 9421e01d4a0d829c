"""Where a fault sits, from who no longer hears whom: a rank, a link, a partition, or it cannot be told. Pure.

The input is the matrix of suspicions: reporter -> peer -> since when the reporter has missed the peer (it waits for it
within one round, or has masked it). All ranks of a group run every exchange together, so one fault soon makes everybody
wait for everybody's neighbour: only the suspicions that began with the first one, within `together_s`, are read, later ones
are its consequences.

A rank is named only if that is the one explanation left:
* the ranks that can be asked and are not named themselves are more than half of all, and each of them misses each named
  rank and nobody else;
* and the named ranks were heard neither by them nor by the daemon (dead, hung), or were heard and miss nobody (slow: the
  others are ready and wait). Ranks that were heard and miss others too are ends of a link, or one half of a partition.

So two ranks are never enough to name one of them, and one half of a group never names the other.
"""

from collections.abc import Mapping
from enum import StrEnum
from itertools import combinations

import msgspec

from healer.evidence import RankRef


class Kind(StrEnum):
    NOTHING = "nothing"
    """Nobody misses anybody."""
    RANKS = "ranks"
    LINKS = "links"
    PARTITION = "partition"
    CANNOT_TELL = "cannot-tell"


class Suspicions(msgspec.Struct, frozen=True):
    ranks: frozenset[RankRef]
    heard: frozenset[RankRef]
    """Ranks whose word is known and fresh; a rank that the daemon does not hear tells nothing."""
    since: Mapping[RankRef, Mapping[RankRef, float]]
    """Reporter -> peer -> monotonic time from which the reporter has missed the peer."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    ranks: tuple[RankRef, ...] = ()
    links: tuple[tuple[RankRef, RankRef], ...] = ()
    """(from, to): what `from` sends does not arrive at `to`."""
    parts: tuple[tuple[RankRef, ...], ...] = ()
    """Each part hears itself and none of the others."""
    reason: str


NOWHERE = Finding(kind=Kind.NOTHING, reason="nobody misses anybody")


def localise(suspicions: Suspicions, together_s: float) -> Finding:
    missed = _first(suspicions, together_s)
    if not any(missed.values()):
        return NOWHERE
    return (
        _ranks(suspicions, missed)
        or _partition(suspicions, missed)
        or _links(suspicions, missed)
        or Finding(kind=Kind.CANNOT_TELL, reason=f"no single fault explains it: {_shown(missed)}")
    )


_Missed = Mapping[RankRef, frozenset[RankRef]]
"""By reporter that is heard, whom it misses."""


def _first(suspicions: Suspicions, together_s: float) -> _Missed:
    known = {
        reporter: {
            peer: at
            for peer, at in suspicions.since.get(reporter, {}).items()
            if peer in suspicions.ranks and peer != reporter
        }
        for reporter in sorted(suspicions.heard & suspicions.ranks)
    }
    begin = min((at for row in known.values() for at in row.values()), default=0.0)
    return {
        reporter: frozenset(p for p, at in row.items() if at <= begin + together_s) for reporter, row in known.items()
    }


def _ranks(suspicions: Suspicions, missed: _Missed) -> Finding | None:
    named = _missed_by_all_others(missed)
    if not named:
        return None
    witnesses = [r for r in missed if r not in named]
    if 2 * len(witnesses) <= len(suspicions.ranks) or any(missed[w] != named for w in witnesses):
        return None
    # of those that are heard only the ones that are ready and wait for nobody can be told from the end of a link
    if any(missed.get(rank) for rank in named):
        return None
    who = ", ".join(str(r) for r in sorted(named))
    reason = f"all {len(witnesses)} others that are heard miss {who}, and nobody else"
    return Finding(kind=Kind.RANKS, ranks=tuple(sorted(named)), reason=reason)


def _missed_by_all_others(missed: _Missed) -> frozenset[RankRef]:
    """Of the sets that somebody misses, the one that fits all who are not in it."""
    for candidate in sorted(set(missed.values()), key=len):
        if candidate and all(row == candidate for reporter, row in missed.items() if reporter not in candidate):
            return candidate
    return frozenset()


def _partition(suspicions: Suspicions, missed: _Missed) -> Finding | None:
    parts: list[set[RankRef]] = []
    for rank in missed:
        hears = [part for part in parts if any(_hear_each_other(missed, rank, other) for other in part)]
        parts = [part for part in parts if part not in hears]
        parts.append({rank}.union(*hears))
    if len(parts) < 2:
        return None
    for one, two in combinations(parts, 2):
        if any(b not in missed[a] or a not in missed[b] for a in one for b in two):
            return None
    if any(b in missed[a] for part in parts for a in part for b in part):
        return None
    # two ranks that do not hear each other are as well the two ends of one dead link
    if len(missed) == 2:
        return None
    shown = " | ".join(", ".join(str(r) for r in sorted(part)) for part in sorted(parts, key=min))
    unheard = len(suspicions.ranks) - len(missed)
    reason = f"these parts hear themselves and not each other: {shown}" + (f"; {unheard} not heard" if unheard else "")
    found = tuple(tuple(sorted(part)) for part in sorted(parts, key=min))
    return Finding(kind=Kind.PARTITION, parts=found, reason=reason)


def _hear_each_other(missed: _Missed, one: RankRef, two: RankRef) -> bool:
    return two not in missed[one] and one not in missed[two]


def _links(suspicions: Suspicions, missed: _Missed) -> Finding | None:
    """Pairs that miss each other while most others hear both."""
    links = tuple((peer, reporter) for reporter, row in missed.items() for peer in sorted(row))
    for rank in {end for link in links for end in link}:
        others = [r for r in missed if r != rank]
        hear = sum(rank not in missed[r] and r not in missed.get(rank, frozenset()) for r in others)
        # a rank that is itself not heard may be dead, and nobody else has noticed yet
        if rank not in missed or 2 * hear <= len(others):
            return None
    shown = ", ".join(f"{sender} to {receiver}" for sender, receiver in links)
    return Finding(kind=Kind.LINKS, links=links, reason=f"most others hear both ends: {shown}")


def _shown(missed: _Missed) -> str:
    rows = [f"{reporter} misses {', '.join(str(p) for p in sorted(row))}" for reporter, row in missed.items() if row]
    return "; ".join(rows)
