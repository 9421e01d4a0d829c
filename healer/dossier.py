"""The standing evidence: the newest word of each source on each rank, with what later evidence took back removed."""

from collections.abc import Collection, Iterable

from healer.evidence import Evidence, RankRef, What

_Key = tuple[RankRef, What, RankRef | None]

RETRACTS: dict[What, tuple[What, ...]] = {
    What.BEAT_HEARD: (What.SILENCE, What.TELEMETRY_LOST, What.SOCKET_CLOSED),
    What.SILENCE: (What.BEAT_HEARD, What.TELEMETRY_LOST),
    What.TELEMETRY_LOST: (What.BEAT_HEARD, What.SILENCE, What.NO_PROGRESS, What.PROGRESS, What.WAITED_ON),
    What.PROGRESS: (What.NO_PROGRESS,),
    What.WAIT_ENDED: (What.WAITED_ON,),
}
"""By evidence, what it takes back about the same rank. WAIT_ENDED speaks for its reporter only."""

_TRANSIENT = frozenset({What.PROGRESS, What.WAIT_ENDED})


class Dossier:
    """Owned by the supervisor's loop; bounded by live ranks x kinds x reporters."""

    def __init__(self) -> None:
        self._standing: dict[_Key, Evidence] = {}

    def add(self, evidence: Evidence) -> None:
        taken_back = RETRACTS.get(evidence.what, ())
        for key in [k for k in self._standing if k[0] == evidence.subject and k[1] in taken_back]:
            if evidence.what != What.WAIT_ENDED or key[2] == evidence.reporter:
                del self._standing[key]
        if evidence.what not in _TRANSIENT:
            self._standing[evidence.subject, evidence.what, evidence.reporter] = evidence

    def keep(self, live: Collection[RankRef]) -> None:
        """Forget evidence about, or by, ranks that are not live."""
        alive = set(live)
        self._standing = {k: e for k, e in self._standing.items() if k[0] in alive and (k[2] is None or k[2] in alive)}

    def standing(self) -> tuple[Evidence, ...]:
        return tuple(self._standing.values())

    def extend(self, evidence: Iterable[Evidence]) -> None:
        for one in evidence:
            self.add(one)
