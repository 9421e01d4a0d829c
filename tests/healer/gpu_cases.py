"""Evidence about GPUs and their ranks, and what a diagnosis makes of it, for the tests of its rules: four GPUs of one host, a rank
on each."""

from healer.diagnosis import Cause, Diagnosis, Hardware, Health, Limits, Verdict, diagnose
from healer.dossier import Dossier
from healer.evidence import Evidence, Severity, Subject, What
from tests.healer.stage import HOST, advise, gpu, unnamed
from tests.healer.support import LIMITS, rank

FOUR = tuple(rank(s) for s in range(4))
GPUS = tuple(gpu(n) for n in range(4))
HARDWARE = Hardware(gpus=GPUS, placed=dict(zip(FOUR, GPUS, strict=True)), host=HOST, advise=advise)

_seq = iter(range(1, 10**9))


def seen(
    of: Subject,
    what: What,
    value: str | int | float = 1,
    *,
    at: float = 100.0,
    source: str = "nvml",
    by: int | None = None,
    severity: Severity = Severity.WARNING,
) -> Evidence:
    return Evidence(
        source=source, seq=next(_seq), subject=of, what=what, value=value, severity=severity,
        reporter=None if by is None else rank(by), at=at, wall=0.0,
    )  # fmt: skip


def none(number: int, at: float = 1.0) -> Evidence:
    """The driver asks for nothing."""
    return seen(gpu(number), What.RECOVERY_ACTION, 0, at=at, severity=Severity.INFO)


def xid(number: int, code: int, at: float = 100.0, source: str = "kernel-log") -> Evidence:
    return seen(unnamed(number) if source == "kernel-log" else gpu(number), What.XID, code, at=at, source=source)


def judge(*evidence: Evidence, now: float = 100.0, limits: Limits = LIMITS, hardware: Hardware = HARDWARE) -> Diagnosis:
    """When all ranks were heard, and then this was seen."""
    dossier = Dossier()
    dossier.learn(hardware.gpus)
    dossier.extend(seen(r, What.BEAT_HEARD, at=1.0, source="heartbeats") for r in FOUR)
    dossier.extend(evidence)
    return diagnose(dossier.standing(now), FOUR, limits, now, hardware)


def on_gpu(found: Diagnosis, number: int) -> Verdict:
    return next(v for v in found.gpus if v.subject == gpu(number))


def told(found: Diagnosis, number: int) -> tuple[tuple[Health, Cause], tuple[Health, Cause]]:
    """Of a GPU, and of the rank on it."""
    on_it, its_rank = on_gpu(found, number), found.ranks[number]
    return (on_it.health, on_it.cause), (its_rank.health, its_rank.cause)


def bystanders(found: Diagnosis, number: int) -> set[Health]:
    return {v.health for v in (*found.gpus, *found.ranks) if v.subject not in (gpu(number), rank(number))}


def dead(slot: int, at: float = 100.0) -> Evidence:
    return seen(rank(slot), What.SOCKET_CLOSED, "Z", at=at, source="liveness")
