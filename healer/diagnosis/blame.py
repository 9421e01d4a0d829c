"""Rules 17 and 18: what a rank's fault comes down to, when its GPU has something to say too."""

import math
from collections.abc import Collection, Mapping

import msgspec

from healer.diagnosis.gpus import Xid, complaints, xids_of
from healer.diagnosis.hardware import ENDS_THE_GPU, Advise, Hardware, XidAction
from healer.diagnosis.verdict import Cause, Confidence, Health, Limits, Verdict
from healer.dossier import Standing
from healer.evidence import Evidence, GpuRef, RankRef

_TO_BLAME = ENDS_THE_GPU | {XidAction.RESTART_APP}
_EXPLAINED = frozenset({Cause.PROCESS_DEATH, Cause.HANG, Cause.STUCK, Cause.SILENT, Cause.AGENT_LOST})
"""Faults of a rank that a fault of its GPU may lie behind. A stopped process was stopped by somebody."""


class Departed(msgspec.Struct, frozen=True):
    """A rank that was condemned and left, and whose GPU may still have its say."""

    rank: RankRef
    gpu: GpuRef
    verdict: Verdict
    incident: str


class Refined(msgspec.Struct, frozen=True):
    """What a fault that was already acted upon really was."""

    departed: Departed
    cause: Cause
    evidence: tuple[str, ...]
    """Ids of what came later."""
    xids: tuple[int, ...]
    sentence: str


def join(
    ranks: Mapping[RankRef, Verdict],
    about_ranks: Mapping[RankRef, Collection[Evidence]],
    gpus: Mapping[GpuRef, Verdict],
    about_gpus: Mapping[GpuRef, Collection[Standing]],
    hardware: Hardware,
    limits: Limits,
    now: float,
    *,
    muted: bool,
) -> tuple[Verdict, ...]:
    """The verdicts on ranks, with those on their GPUs. `muted`: the host itself is at fault, so no XID is to blame."""
    found = []
    for rank, verdict in ranks.items():
        gpu = hardware.placed.get(rank)
        on_gpu = gpus.get(gpu) if gpu is not None else None
        if gpu is None or on_gpu is None or on_gpu.cause == Cause.NONE:
            found.append(verdict)
            continue
        signs = complaints(about_ranks[rank], limits, now)
        at = verdict.since if verdict.health == Health.UNHEALTHY else max((e.at for e in signs), default=now)
        xid = None
        if not muted:
            born = hardware.since.get(rank, -math.inf)
            own = [one for one in about_gpus.get(gpu, ()) if one.evidence.at >= born]
            if verdict.health != Health.UNHEALTHY:
                own = _unclaimed(own, _deaths(gpu, ranks, hardware), hardware.advise, limits)
            xid = _blamed(own, hardware.advise, at, limits, verdict.cause)
        found.append(_joined(verdict, on_gpu, xid, signs, limits, now))
    return tuple(found)


def refine(
    departed: Departed, about: Collection[Standing], on_gpu: Verdict | None, advise: Advise, limits: Limits
) -> Refined | None:
    """What came after `departed` was condemned: an XID of its GPU, or a verdict on it, that explains its end. `about`: what
    stands about the GPU; `on_gpu`: the verdict on it now."""
    verdict = departed.verdict
    if verdict.cause not in _EXPLAINED:
        return None
    xid = _blamed(about, advise, verdict.since, limits, verdict.cause)
    if xid is not None:
        ids, codes = (xid.standing.evidence.id,), (xid.code,)
        return Refined(departed, Cause.XID, ids, codes, f"{departed.rank} was lost to {xid} of {departed.gpu}")
    if on_gpu is None or on_gpu.health != Health.UNHEALTHY:
        return None
    if not _explains(on_gpu.since, verdict.since, limits):
        return None
    sentence = f"{departed.rank} was lost to its GPU: {on_gpu.sentence}"
    return Refined(departed, on_gpu.cause, on_gpu.evidence, on_gpu.xids, sentence)


def _deaths(gpu: GpuRef, ranks: Mapping[RankRef, Verdict], hardware: Hardware) -> list[float]:
    """When ranks ended on this GPU, those included that nobody has taken from the group yet."""
    dead = [v.since for v in ranks.values() if v.cause == Cause.PROCESS_DEATH and hardware.placed.get(v.rank) == gpu]
    return [*hardware.deaths.get(gpu, ()), *dead]


def _unclaimed(
    about: Collection[Standing], deaths: Collection[float], advise: Advise, limits: Limits
) -> list[Standing]:
    """Without the errors of an application that ended with it: they are no doubt about who lives on beside it."""

    def claimed(one: Standing) -> bool:
        (xid,) = xids_of([one], advise) or (None,)
        if xid is None or xid.action != XidAction.RESTART_APP:
            return False
        return any(abs(one.evidence.at - at) <= limits.blame_after_s for at in deaths)

    return [one for one in about if not claimed(one)]


def _explains(gpu_at: float, rank_at: float, limits: Limits) -> bool:
    return -limits.blame_before_s <= gpu_at - rank_at <= limits.blame_after_s


def _blamed(about: Collection[Standing], advise: Advise, since: float, limits: Limits, cause: Cause) -> Xid | None:
    """The XID that a fault of the rank noticed at `since` is put down to."""
    for xid in xids_of(about, advise):
        if xid.action not in _TO_BLAME:
            continue
        times: tuple[float, ...] = (xid.standing.evidence.at, xid.at)
        if xid.action == XidAction.RESTART_APP and cause == Cause.PROCESS_DEATH:
            # an error of one application ends it within moments: who lived on beside it died of something else
            # (seen on an H200: XID 31 of one rank, and SIGKILL of the other on the same GPU ten seconds later)
            times = tuple(at for at in times if abs(at - since) <= limits.blame_after_s)
        if any(_explains(at, since, limits) for at in times):
            return xid
    return None


def _joined(
    verdict: Verdict, on_gpu: Verdict, xid: Xid | None, signs: Collection[Evidence], limits: Limits, now: float
) -> Verdict:
    rank = verdict.rank
    if verdict.health == Health.UNHEALTHY:
        if verdict.cause not in _EXPLAINED:
            return verdict
        if xid is not None:
            return _put_down_to(verdict, Cause.XID, (xid.standing.evidence.id,), (xid.code,), f"put down to {xid}")
        if on_gpu.health == Health.UNHEALTHY and _explains(on_gpu.since, verdict.since, limits):
            return _put_down_to(verdict, on_gpu.cause, on_gpu.evidence, on_gpu.xids, f"put down to {on_gpu.sentence}")
        return verdict
    if on_gpu.health == Health.UNHEALTHY:
        return msgspec.structs.replace(on_gpu, subject=rank, sentence=f"{rank} is on a faulty GPU: {on_gpu.sentence}")
    if xid is not None and signs:
        ids = (xid.standing.evidence.id, *(e.id for e in signs))
        shown = ", ".join(sorted({e.what for e in signs}))
        return Verdict(
            subject=rank,
            health=Health.UNHEALTHY,
            cause=Cause.XID,
            confidence=Confidence.QUORUM,
            evidence=ids,
            since=min(xid.at, *(e.at for e in signs)),
            sentence=f"{rank} is broken by {xid}, and the ranks confirm it: {shown}",
            xids=(xid.code,),
        )
    if verdict.health != Health.HEALTHY:
        return verdict
    if xid is not None and now - xid.standing.evidence.at <= limits.blame_before_s:
        return _warned(verdict, on_gpu, Health.UNKNOWN, Cause.SUSPECTED, f"is suspected, not condemned: {xid}")
    if on_gpu.cause == Cause.TELEMETRY_LOST:
        # the rank speaks for itself; that nobody sees its GPU is said of the GPU
        return verdict
    if on_gpu.health == Health.UNKNOWN:
        text = f"is suspected, not condemned: {on_gpu.sentence}"
        return _warned(verdict, on_gpu, Health.UNKNOWN, Cause.SUSPECTED, text)
    if verdict.cause != Cause.NONE:
        return verdict
    return _warned(verdict, on_gpu, Health.HEALTHY, on_gpu.cause, f"is healthy; {on_gpu.sentence}")


def _put_down_to(verdict: Verdict, cause: Cause, ids: tuple[str, ...], xids: tuple[int, ...], text: str) -> Verdict:
    return msgspec.structs.replace(
        verdict,
        cause=cause,
        evidence=tuple(dict.fromkeys((*verdict.evidence, *ids))),
        xids=xids,
        sentence=f"{verdict.sentence}; {text}",
    )


def _warned(verdict: Verdict, on_gpu: Verdict, health: Health, cause: Cause, text: str) -> Verdict:
    return msgspec.structs.replace(
        verdict,
        health=health,
        cause=cause,
        evidence=(*verdict.evidence, *on_gpu.evidence),
        since=on_gpu.since,
        xids=on_gpu.xids,
        sentence=f"{verdict.subject} {text}",
    )
