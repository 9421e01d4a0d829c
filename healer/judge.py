"""From evidence to verdicts: keeps what stands, asks the diagnosis, and says what is new. The same for the daemon, which
feeds it as evidence comes, and for a recorded trace."""

import math
from collections.abc import Collection, Iterable

import msgspec

from healer.diagnosis import Cause, Departed, Diagnosis, Hardware, Health, Limits, Refined, Verdict, diagnose, refine
from healer.dossier import Dossier
from healer.evidence import Evidence, GpuRef, RankRef, Subject

MAX_DEPARTED = 64
ENDED = frozenset({Cause.PROCESS_DEATH, Cause.XID})
"""Verdicts on ranks after which an XID of their GPU may be theirs: a death, or what was put down to an XID already."""


class Judgement(msgspec.Struct, frozen=True):
    diagnosis: Diagnosis
    changed: tuple[Verdict, ...]
    """Those that do not say what they said before. The expected beginning, a rank that was not heard yet or a GPU that is
    well, is no change."""
    refined: tuple[Refined, ...]
    """Faults that were acted upon and now turn out to come from something else; each is said once."""


class Judge:
    """Owned by one loop."""

    def __init__(self, limits: Limits) -> None:
        self.diagnosis = Diagnosis()
        self.limits = limits
        self._dossier = Dossier()
        self._hardware = Hardware()
        self._live: tuple[RankRef, ...] = ()
        self._since: dict[RankRef, float] = {}
        self._regrouped_at = -math.inf
        self._said: dict[Subject, Verdict] = {}
        self._departed: list[Departed] = []
        self._deaths: list[tuple[GpuRef, float]] = []

    def take(self, found: Iterable[Evidence]) -> list[Evidence]:
        """File evidence. Returns it with each GPU under its full name."""
        return self._dossier.extend(found)

    def watch(self, live: Collection[RankRef], now: float, incident: str = "") -> None:
        """The live ranks, whenever they change. `incident`: the open one, to which ranks that leave condemned belong."""
        # those that are there at the beginning have a past that nobody here has seen
        born = now if self._live else -math.inf
        self._since = {rank: self._since.get(rank, born) for rank in live}
        if set(self._live) - set(live):
            self._regrouped_at = now
        self._live = tuple(sorted(live))
        self._hardware = msgspec.structs.replace(self._hardware, since=self._since)
        for rank, verdict in [(s, v) for s, v in self._said.items() if isinstance(s, RankRef) and s not in live]:
            gpu = self._hardware.placed.get(rank)
            if gpu is not None and verdict.health == Health.UNHEALTHY:
                self._departed = [*self._departed[1 - MAX_DEPARTED :], Departed(rank, gpu, verdict, incident)]
                if verdict.cause in ENDED:
                    self._deaths = [*self._deaths[1 - MAX_DEPARTED :], (gpu, verdict.since)]
            del self._said[rank]
        self._dossier.keep(live)

    def equip(self, hardware: Hardware) -> None:
        """The GPUs, and who is on which, whenever that changes."""
        self._hardware = msgspec.structs.replace(hardware, since=self._since)
        self._dossier.learn(hardware.gpus)

    def judge(self, now: float) -> Judgement:
        """`now`: monotonic seconds."""
        standing = self._dossier.standing(now)
        hardware = msgspec.structs.replace(self._hardware, deaths=self._recent_deaths(now))
        found = self.diagnosis = diagnose(standing, self._live, self.limits, now, hardware, self._regrouped_at)
        changed = tuple(v for v in found.all if v.key != self._key_before(v))
        self._said = {v.subject: v for v in found.all}
        refined = self._refine({v.subject: v for v in found.gpus}, now) if self._departed else ()
        return Judgement(found, changed, refined)

    def standing(self, now: float) -> dict[str, Evidence]:
        """What counts now, by id."""
        return {one.evidence.id: one.evidence for one in self._dossier.standing(now)}

    def next_change(self, now: float) -> float:
        """When time alone may change a verdict, in monotonic seconds; infinity: never. For whoever has no ticks."""
        ages = [self._dossier.next_expiry()]
        limits = self.limits
        for one in self._dossier.standing(now):
            for after_s in (
                limits.answer_after_s, limits.settle_after_s, limits.probation_s, limits.fault_window_s,
                limits.blame_before_s, limits.quorum_window_s,
            ):  # fmt: skip
                ages.append(one.evidence.at + after_s)
        return min((at for at in ages if at > now), default=math.inf)

    def _recent_deaths(self, now: float) -> dict[GpuRef, list[float]]:
        """For as long as an XID that came with one may be held against the ranks beside it."""
        keep_s = self.limits.blame_before_s + self.limits.blame_after_s + self.limits.fault_window_s
        self._deaths = [(gpu, at) for gpu, at in self._deaths if now - at <= keep_s]
        found: dict[GpuRef, list[float]] = {}
        for gpu, at in self._deaths:
            found.setdefault(gpu, []).append(at)
        return found

    def _key_before(self, verdict: Verdict) -> tuple[Subject, Health, Cause]:
        said = self._said.get(verdict.subject)
        if said is not None:
            return said.key
        if isinstance(verdict.subject, RankRef):
            return verdict.subject, Health.UNKNOWN, Cause.UNHEARD
        return verdict.subject, Health.HEALTHY, Cause.NONE

    def _refine(self, on_gpus: dict[Subject, Verdict], now: float) -> tuple[Refined, ...]:
        waiting, found = [], []
        for departed in self._departed:
            about = [one for one in self._dossier.standing(now) if one.evidence.subject == departed.gpu]
            said = refine(departed, about, on_gpus.get(departed.gpu), self._hardware.advise, self.limits)
            if said is not None:
                found.append(said)
            elif now - departed.verdict.since <= self.limits.blame_after_s + self.limits.answer_after_s:
                waiting.append(departed)
        self._departed = waiting
        return tuple(found)
