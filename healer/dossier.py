"""The standing evidence: the newest word of each source on each subject, without what later evidence took back and without
what is too old to count. What takes back what, and how long each kind stands, are the tables below."""

import math
from collections.abc import Collection, Iterable, Iterator

import msgspec

from healer.evidence import Evidence, GpuRef, RankRef, Severity, Subject, What

RETRACTS: dict[What, tuple[What, ...]] = {
    What.BEAT_HEARD: (What.SILENCE, What.TELEMETRY_LOST, What.SOCKET_CLOSED),
    What.SILENCE: (What.BEAT_HEARD, What.TELEMETRY_LOST),
    What.TELEMETRY_LOST: (
        What.BEAT_HEARD, What.SILENCE, What.NO_PROGRESS, What.PROGRESS, What.WAITED_ON, What.STRAGGLES,
    ),
    What.PROGRESS: (What.NO_PROGRESS,),
    What.WAIT_ENDED: (What.WAITED_ON,),
    What.KEEPS_UP: (What.STRAGGLES,),
    What.GPU_LOST: (What.GPU_BACK,),
    What.GPU_BACK: (What.GPU_LOST, What.RESET_REQUIRED, What.POISON),
    What.RECOVERY_ACTION: (What.SENSOR_BLIND,),
    What.SENSOR_BLIND: (What.SENSOR_SILENT, What.SENSOR_BACK),
    What.SENSOR_SILENT: (What.SENSOR_BLIND, What.SENSOR_BACK),
    What.SENSOR_BACK: (What.SENSOR_BLIND, What.SENSOR_SILENT),
}  # fmt: skip
"""By evidence, what it takes back about the same subject."""

_OWN_WORD = frozenset({What.WAIT_ENDED})
"""These speak for their reporter only."""
_OWN_SOURCE = frozenset({What.SENSOR_BLIND, What.SENSOR_SILENT, What.SENSOR_BACK, What.RECOVERY_ACTION})
"""These speak for their source only: one sensor that sees again says nothing about another that does not."""

STATES = frozenset(
    {
        What.RESET_REQUIRED, What.ECC_CORRECTABLE, What.SRAM_THRESHOLD, What.REMAP_PENDING, What.REMAP_FAILED,
        What.NVLINK_DOWN, What.NVLINK_ERRORS, What.FABRIC_FAILED, What.PCIE_DEGRADED, What.PCIE_REPLAYS, What.THROTTLED,
        What.HOT, What.FOREIGN_PROCESS, What.MEMORY_GROWS,
    }
)  # fmt: skip
"""Conditions that hold until their source says that they are over: by a value of 0 or "", or by severity INFO."""

_TRANSIENT = frozenset({What.PROGRESS, What.WAIT_ENDED, What.KEEPS_UP})
"""Only ever take something back."""

STANDS_S: dict[What, float] = {
    What.STRAGGLES: 120.0,
    What.MEMORY_GROWS: 600.0,
    What.STACK: 600.0,
    What.XID: 3600.0,
    What.POISON: 3600.0,
    What.GPU_BACK: 600.0,
    What.ECC_UNCORRECTABLE: 600.0,
    What.ECC_CORRECTABLE: 600.0,
    What.NVLINK_ERRORS: 600.0,
    What.PCIE_REPLAYS: 600.0,
    What.PCIE_AER: 600.0,
    What.FOREIGN_PROCESS: 600.0,
    What.SENSOR_BACK: 600.0,
    What.CLOCK_JUMP: 600.0,
    What.KERNEL_LOG_LOST: 600.0,
}
"""Seconds for which a kind counts. Kinds that are not here stand until they are taken back, or their subject is gone."""

MAX_PER_SUBJECT = 256
"""A broken source must not fill the memory; a sound one stays far below."""
MAX_SUBJECTS = 32_768
"""Above three for each of 10,000 ranks, so that none of them is ever dropped for another."""


class Standing(msgspec.Struct, frozen=True):
    """One thing that stands about a subject."""

    evidence: Evidence
    """The newest."""
    first_at: float
    """Monotonic time of the first in an unbroken row."""
    count: int
    """How many there were in that row: two equal XIDs are two."""


_Key = tuple[What, RankRef | None, str]


def _key(evidence: Evidence) -> _Key:
    match evidence.what:
        case What.XID:
            variant = f"{evidence.value}/{evidence.source}"
        case What.POISON | What.PCIE_AER:
            variant = str(evidence.value)
        case What.ECC_UNCORRECTABLE:
            variant = evidence.detail.partition(" ")[0]
        case What.GPU_LOST | What.SENSOR_BLIND | What.SENSOR_SILENT | What.SENSOR_BACK:
            variant = evidence.source
        case _:
            variant = ""
    return evidence.what, evidence.reporter, variant


def _is_over(evidence: Evidence) -> bool:
    return evidence.what in STATES and (not evidence.value or evidence.severity == Severity.INFO)


def _expires(evidence: Evidence) -> float:
    return evidence.at + STANDS_S.get(evidence.what, math.inf)


class Dossier:
    """Owned by the supervisor's loop."""

    def __init__(self) -> None:
        self._about: dict[Subject, dict[_Key, Standing]] = {}
        self._by_pci: dict[str, GpuRef] = {}
        self._by_uuid: dict[str, GpuRef] = {}

    def add(self, evidence: Evidence) -> Evidence:
        """Returns it as it was filed: with the GPU's full name where the source knew only its address."""
        subject = self._name(evidence.subject)
        if subject != evidence.subject:
            evidence = msgspec.structs.replace(evidence, subject=subject)
        own = self._about.get(subject)
        if own is None:
            if len(self._about) >= MAX_SUBJECTS:
                del self._about[next(iter(self._about))]
            own = self._about[subject] = {}
        self._take_back(own, evidence)
        key = _key(evidence)
        if evidence.what in _TRANSIENT or _is_over(evidence):
            own.pop(key, None)
        else:
            # the newest comes last, so that the oldest is the one to go
            before = own.pop(key, None)
            if before is not None and evidence.at <= _expires(before.evidence):
                own[key] = Standing(evidence, before.first_at, before.count + 1)
            else:
                own[key] = Standing(evidence, evidence.at, 1)
            if len(own) > MAX_PER_SUBJECT:
                del own[next(iter(own))]
        if not own:
            del self._about[subject]
        return evidence

    def extend(self, evidence: Iterable[Evidence]) -> list[Evidence]:
        """`add` each, in order."""
        return [self.add(one) for one in evidence]

    def keep(self, live: Collection[RankRef]) -> None:
        """Forget evidence about, or by, ranks that are not live. What is known of GPUs and hosts outlives their ranks."""
        alive = set(live)
        for subject in [s for s in self._about if isinstance(s, RankRef) and s not in alive]:
            del self._about[subject]
        for own in self._about.values():
            for key in [k for k in own if k[1] is not None and k[1] not in alive]:
                del own[key]

    def standing(self, now: float) -> tuple[Standing, ...]:
        """What counts at `now`, monotonic seconds; what has expired is forgotten."""
        for subject, own in list(self._about.items()):
            for key in [k for k, one in own.items() if _expires(one.evidence) < now]:
                del own[key]
            if not own:
                del self._about[subject]
        return tuple(self._all())

    def next_expiry(self) -> float:
        """When, in monotonic seconds, something ceases to stand by age alone; infinity: never."""
        return min((_expires(one.evidence) for one in self._all()), default=math.inf)

    def learn(self, gpus: Collection[GpuRef]) -> None:
        """GPUs by their full names: what stands under an address alone is theirs."""
        for gpu in gpus:
            self._name(gpu)

    def _all(self) -> Iterator[Standing]:
        for own in self._about.values():
            yield from own.values()

    def _take_back(self, own: dict[_Key, Standing], evidence: Evidence) -> None:
        taken_back = RETRACTS.get(evidence.what, ())
        for key in [k for k in own if k[0] in taken_back]:
            if evidence.what in _OWN_WORD and key[1] != evidence.reporter:
                continue
            if evidence.what in _OWN_SOURCE and own[key].evidence.source != evidence.source:
                continue
            del own[key]

    def _name(self, subject: Subject) -> Subject:
        """One name for one GPU: the UUID counts, whatever its address is today."""
        if not isinstance(subject, GpuRef):
            return subject
        if not subject.uuid:
            return self._by_pci.get(subject.pci, subject)
        known = self._by_uuid.get(subject.uuid)
        if known is not None and (not subject.pci or subject.pci == known.pci):
            return known
        self._by_uuid[subject.uuid] = subject
        if subject.pci:
            self._by_pci[subject.pci] = subject
        for former in (known, GpuRef("", subject.pci)):
            if former is not None and former in self._about:
                self._rename(former, subject)
        return subject

    def _rename(self, former: GpuRef, gpu: GpuRef) -> None:
        own = self._about.setdefault(gpu, {})
        for key, one in self._about.pop(former).items():
            own[key] = msgspec.structs.replace(one, evidence=msgspec.structs.replace(one.evidence, subject=gpu))
