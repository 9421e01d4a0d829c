"""Rules 15 and 16: faults of the machine as a whole. They mute those of its GPUs, which would only repeat them."""

import math
from collections.abc import Collection, Mapping

from healer.diagnosis.verdict import Cause, Confidence, Health, Limits, Verdict
from healer.dossier import Standing
from healer.evidence import Evidence, GpuRef, HostRef, What

OPTIONAL_SOURCES = frozenset({"kernel-log"})
"""Without these, the others still see what matters, only later."""

_SHARED: dict[What, tuple[Cause, str]] = {
    What.GPU_LOST: (Cause.GPU_LOST, "are lost"),
    What.FABRIC_FAILED: (Cause.FABRIC, "have no fabric"),
}
"""What befalls all GPUs of a host together is the host's."""


def judge_hosts(
    about: Mapping[HostRef, Collection[Standing]],
    gpus: Mapping[GpuRef, Collection[Standing]],
    here: HostRef | None,
    limits: Limits,
    now: float,
) -> dict[HostRef, Verdict]:
    found = {host: _judge(host, [one.evidence for one in own], limits, now) for host, own in about.items()}
    if here is not None:
        shared = _shared(here, gpus, limits, now)
        if shared is not None and found.get(here, shared).health != Health.UNKNOWN:
            found[here] = shared
    return found


def back_at(about: Mapping[HostRef, Collection[Standing]]) -> float:
    """When NVML could be read again after the host was blind, in monotonic seconds; minus infinity where it was not."""
    seen = (one.evidence for own in about.values() for one in own)
    backs = (e.at for e in seen if e.what == What.SENSOR_BACK and e.source not in OPTIONAL_SOURCES)
    return max(backs, default=-math.inf)


def _judge(host: HostRef, own: Collection[Evidence], limits: Limits, now: float) -> Verdict:
    dark = [e for e in own if e.what in (What.SENSOR_BLIND, What.SENSOR_SILENT)]
    grave = [e for e in dark if e.source not in OPTIONAL_SOURCES]
    if grave:
        text = f"is unknown: {grave[0].source} gives no reading ({grave[0].what}: {grave[0].value})"
        return _verdict(host, Health.UNKNOWN, Cause.TELEMETRY_LOST, grave, now, text)
    settling = [
        e
        for e in own
        if e.what == What.SENSOR_BACK and e.source not in OPTIONAL_SOURCES and now - e.at < limits.settle_after_s
    ]
    if settling:
        text = f"is unknown for a moment: {settling[0].source} gives readings again since {now - settling[0].at:.1f} s"
        return _verdict(host, Health.UNKNOWN, Cause.TELEMETRY_LOST, settling, now, text)
    failed = [e for e in own if e.what == What.FABRIC_FAILED]
    if failed:
        return _verdict(
            host, Health.UNKNOWN, Cause.FABRIC, failed, now, f"is suspected: its fabric is {failed[0].value}"
        )
    missed = [e for e in own if e.what == What.KERNEL_LOG_LOST]
    if missed and not dark:
        text = "is healthy, but lines of the kernel log were overwritten before they could be read"
        return _verdict(host, Health.HEALTHY, Cause.TELEMETRY_LOST, missed, now, text)
    if dark:
        text = f"is healthy, but {dark[0].source} cannot be read: {dark[0].value}"
        return _verdict(host, Health.HEALTHY, Cause.TELEMETRY_LOST, dark, now, text)
    return _verdict(host, Health.HEALTHY, Cause.NONE, (), now, "is healthy")


def _shared(host: HostRef, gpus: Mapping[GpuRef, Collection[Standing]], limits: Limits, now: float) -> Verdict | None:
    if len(gpus) < 2:
        return None
    for what, (cause, words) in _SHARED.items():
        newest = [
            max((one.evidence for one in own if one.evidence.what == what), key=lambda e: e.at, default=None)
            for own in gpus.values()
        ]
        seen = [e for e in newest if e is not None]
        if len(seen) < len(newest) or max(e.at for e in seen) - min(e.at for e in seen) > limits.quorum_window_s:
            continue
        text = f"is faulty: all {len(seen)} of its GPUs {words}"
        return _verdict(host, Health.UNHEALTHY, cause, seen, now, text, Confidence.QUORUM)
    return None


def _verdict(
    host: HostRef,
    health: Health,
    cause: Cause,
    because: Collection[Evidence],
    now: float,
    text: str,
    confidence: Confidence = Confidence.NONE,
) -> Verdict:
    return Verdict(
        subject=host,
        health=health,
        cause=cause,
        confidence=confidence,
        evidence=tuple(e.id for e in because),
        since=min((e.at for e in because), default=now),
        sentence=f"{host} {text}",
    )
