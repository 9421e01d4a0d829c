"""Which rank takes a request, and what follows from new routes. Pure: records in, decisions out."""

from collections.abc import Iterable, Mapping

import msgspec

from elastic.gateway.ledger import RankId
from elastic.protocol import Route


class Candidate(msgspec.Struct, frozen=True):
    """A rank as seen at the moment of a decision."""

    rank: RankId
    connected: bool
    admit: bool
    in_flight: int
    """The gateway's own requests there: exact, but blind to what others do."""
    waiting: int
    running: int
    """As the rank last said: it lags by a message."""

    @property
    def open(self) -> bool:
        return self.connected and self.admit


def choose(candidates: Iterable[Candidate], avoid: RankId | None = None) -> RankId | None:
    """The least loaded rank that admits, the lowest slot among equals; None when there is none. `avoid` (the rank that
    just failed this request) is taken only when it is the only one."""

    def cost(candidate: Candidate) -> tuple[bool, int, int, int]:
        told = candidate.waiting + candidate.running
        return candidate.rank == avoid, max(candidate.in_flight, told), candidate.in_flight, candidate.rank.slot

    best = min((candidate for candidate in candidates if candidate.open), key=cost, default=None)
    return best.rank if best else None


def to_hand_over(candidates: Iterable[Candidate]) -> list[RankId]:
    """Ranks whose requests should move elsewhere: those that drain, while another rank admits. Without one they finish
    what they have: a slow leave is better than a stop."""
    known = list(candidates)
    if not any(candidate.open for candidate in known):
        return []
    return [c.rank for c in known if not c.admit and c.in_flight]


class RouteChange(msgspec.Struct, frozen=True):
    opened: tuple[Route, ...]
    """Ranks to connect to."""
    dropped: tuple[RankId, ...]
    """Ranks that are out, or replaced by a later incarnation in their slot."""
    updated: tuple[Route, ...]
    """Known ranks, as they are now to be used."""


def compare(current: Mapping[int, Route], routes: Iterable[Route]) -> RouteChange:
    """From the current routes, by slot, to the new list. Within a slot the later incarnation wins, on both sides: an
    incarnation older than the known one is never gone back to."""
    wanted: dict[int, Route] = {}
    for route in routes:
        known = wanted.get(route.slot)
        if known is None or route.incarnation >= known.incarnation:
            wanted[route.slot] = route
    opened, dropped, updated = [], [], []
    for slot, old in current.items():
        new = wanted.get(slot)
        if new is None or new.incarnation > old.incarnation:
            dropped.append(RankId(slot, old.incarnation))
    for slot, new in sorted(wanted.items()):
        known = current.get(slot)
        if known is None or new.incarnation > known.incarnation:
            opened.append(new)
        elif new.incarnation == known.incarnation:
            updated.append(new)
    return RouteChange(tuple(opened), tuple(dropped), tuple(updated))
