"""Diagnosis: standing evidence in, one verdict per live rank out. Pure; knows nothing of policies or actions.

The rules, in order; the first that holds gives the verdict.

Unhealthy, on conclusive evidence:
1. *process-death*: the kernel says that the process is a zombie, gone or exiting (/proc by pid and start time, a pidfd, the
   mutex that its main thread held, or the closed liveness socket with such a state).
2. *stopped*: state T in /proc, read after the silence was noticed, and silence for `stall_after_s`. A stop shorter than
   that, and a debugger's stop (state t), is not one.

Unhealthy, on a quorum of independent sources:
3. *hang*: silence for `stall_after_s`, and at least half of the other ranks (or the only one), each of them heard, wait for
   it within one round for as long, or saw its memory fail within `fault_window_s`.
4. *stuck*: it beats, but its round has not moved for `silent_after_s`, it waits for nobody, and all other ranks that are
   heard, and at least half of all, wait for it.

Unhealthy, by deadline:
5. *agent-lost*: its liveness socket closed although the process is alive, and silence for `stall_after_s`: it can take no
   command.
6. *silent*: silence for `silent_after_s`.
Rules 5 and 6 do not hold while more than half of the ranks not already explained by rules 1 and 2 are silent: then it is
the telemetry that is in doubt.

Unknown, which is neither healthy nor sick, and never acted upon:
7. *telemetry-lost*: the daemon itself was late; nothing was heard since.
8. *suspected*: any weaker sign: shorter silence, one witness, a fault report, a closed socket.
9. *unheard*: no beat since it became live.

Healthy: a beat was heard, and nothing stands against it.
"""

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum

import msgspec

from healer.evidence import Evidence, RankRef, What

DEAD_STATES = frozenset("ZXx")


class Health(StrEnum):
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


class Cause(StrEnum):
    NONE = "none"
    PROCESS_DEATH = "process-death"
    STOPPED = "stopped"
    HANG = "hang"
    STUCK = "stuck"
    AGENT_LOST = "agent-lost"
    SILENT = "silent"
    TELEMETRY_LOST = "telemetry-lost"
    SUSPECTED = "suspected"
    UNHEARD = "unheard"
    EXECUTOR = "executor"
    """Not a diagnosis: the executor itself gave the rank up, since it died unwatched or missed a commit's deadline."""


class Confidence(StrEnum):
    NONE = "none"
    CONCLUSIVE = "conclusive"
    QUORUM = "quorum"
    DEADLINE = "deadline"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    stall_after_s: float
    silent_after_s: float
    fault_window_s: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    rank: RankRef
    health: Health
    cause: Cause
    confidence: Confidence
    evidence: tuple[str, ...]
    """Ids of what supports it."""
    since: float
    """Monotonic time of the earliest supporting evidence: when the fault was detected."""
    sentence: str

    @property
    def key(self) -> tuple[RankRef, Health, Cause]:
        """Two verdicts with the same key say the same."""
        return self.rank, self.health, self.cause


class _Case:
    """What stands about one rank, indexed."""

    def __init__(self, rank: RankRef, own: Iterable[Evidence], now: float, limits: Limits) -> None:
        self.rank = rank
        own = tuple(own)
        self.by_what = {e.what: e for e in own if e.reporter is None}
        self.accusations = [
            e
            for e in own
            if e.what == What.WAITED_ON or (e.what == What.PEER_FAULT and now - e.at <= limits.fault_window_s)
        ]
        self.silence = self.by_what.get(What.SILENCE)
        self.process = self.by_what.get(What.PROCESS_STATE)

    @property
    def heard(self) -> bool:
        return What.BEAT_HEARD in self.by_what

    def silent_for(self, seconds: float) -> bool:
        return self.silence is not None and float(self.silence.value) >= seconds

    def verdict(
        self, health: Health, cause: Cause, confidence: Confidence, because: Collection[Evidence], now: float, text: str
    ) -> Verdict:
        return Verdict(
            rank=self.rank,
            health=health,
            cause=cause,
            confidence=confidence,
            evidence=tuple(e.id for e in because),
            since=min((e.at for e in because), default=now),
            sentence=f"{self.rank} {text}",
        )


def diagnose(
    standing: Collection[Evidence], live: Collection[RankRef], limits: Limits, now: float
) -> tuple[Verdict, ...]:
    """A verdict for every live rank, by slot. Evidence about or by ranks outside `live` is ignored."""
    alive = set(live)
    about: dict[RankRef, list[Evidence]] = {rank: [] for rank in sorted(alive)}
    for evidence in standing:
        if evidence.subject in alive and (evidence.reporter is None or evidence.reporter in alive):
            about[evidence.subject].append(evidence)
    cases = {rank: _Case(rank, own, now, limits) for rank, own in about.items()}
    settled: dict[RankRef, Verdict] = {}
    for rank, case in cases.items():
        verdict = _dead(case, now) or _stopped(case, limits, now)
        if verdict:
            settled[rank] = verdict
    open_cases = {rank: case for rank, case in cases.items() if rank not in settled}
    silent = sum(case.silence is not None for case in open_cases.values())
    in_doubt = 2 * silent > len(open_cases)
    for rank, case in open_cases.items():
        others = [other for peer, other in open_cases.items() if peer != rank]
        settled[rank] = (
            _hang(case, others, limits, now)
            or _stuck(case, others, limits, now)
            or (None if in_doubt else _overdue(case, limits, now))
            or _open(case, in_doubt, now)
        )
    return tuple(settled[rank] for rank in cases)


def _dead(case: _Case, now: float) -> Verdict | None:
    because = [
        e
        for what, e in case.by_what.items()
        if what in (What.LIFELINE_CUT, What.PIDFD_FIRED)
        or (what in (What.PROCESS_STATE, What.SOCKET_CLOSED) and e.value in DEAD_STATES)
    ]
    if not because:
        return None
    if What.SOCKET_CLOSED in case.by_what and case.by_what[What.SOCKET_CLOSED] not in because:
        because.append(case.by_what[What.SOCKET_CLOSED])
    shown = ", ".join(f"{e.what} ({e.value})" for e in because)
    return case.verdict(Health.UNHEALTHY, Cause.PROCESS_DEATH, Confidence.CONCLUSIVE, because, now, f"is dead: {shown}")


def _stopped(case: _Case, limits: Limits, now: float) -> Verdict | None:
    silence, process = case.silence, case.process
    if silence is None or process is None or not case.silent_for(limits.stall_after_s):
        return None
    if process.value != "T" or process.at < silence.at:
        return None
    text = f"is stopped: process state T, silent for {float(silence.value):.2f} s"
    return case.verdict(Health.UNHEALTHY, Cause.STOPPED, Confidence.CONCLUSIVE, (silence, process), now, text)


def _witnesses(case: _Case, others: Collection[_Case]) -> tuple[set[RankRef], list[Evidence]]:
    heard = {other.rank for other in others if other.heard}
    because = [e for e in case.accusations if e.reporter in heard]
    return {e.reporter for e in because if e.reporter}, because


def _hang(case: _Case, others: Collection[_Case], limits: Limits, now: float) -> Verdict | None:
    if case.silence is None or not case.silent_for(limits.stall_after_s):
        return None
    witnesses, because = _witnesses(case, others)
    if not witnesses or 2 * len(witnesses) < len(others):
        return None
    text = (
        f"hangs: silent for {float(case.silence.value):.2f} s, and {len(witnesses)} of {len(others)} others wait for it"
    )
    return case.verdict(Health.UNHEALTHY, Cause.HANG, Confidence.QUORUM, (case.silence, *because), now, text)


def _stuck(case: _Case, others: Collection[_Case], limits: Limits, now: float) -> Verdict | None:
    still = case.by_what.get(What.NO_PROGRESS)
    if still is None or not case.heard or float(still.value) < limits.silent_after_s:
        return None
    if any(e.reporter == case.rank and e.what == What.WAITED_ON for other in others for e in other.accusations):
        return None
    because = [e for e in _witnesses(case, others)[1] if e.what == What.WAITED_ON]
    witnesses = {e.reporter for e in because if e.reporter}
    heard = {other.rank for other in others if other.heard}
    if not heard or witnesses != heard or 2 * len(witnesses) < len(others):
        return None
    text = f"is stuck: beats, but no round for {float(still.value):.2f} s, and all {len(witnesses)} others wait for it"
    return case.verdict(Health.UNHEALTHY, Cause.STUCK, Confidence.QUORUM, (still, *because), now, text)


def _overdue(case: _Case, limits: Limits, now: float) -> Verdict | None:
    silence, closed = case.silence, case.by_what.get(What.SOCKET_CLOSED)
    if silence is None:
        return None
    state = case.process.value if case.process else "unknown"
    age = f"silent for {float(silence.value):.2f} s"
    if closed is not None and case.silent_for(limits.stall_after_s):
        text = f"takes no command: its socket is closed, {age}, process state {state}"
        return case.verdict(Health.UNHEALTHY, Cause.AGENT_LOST, Confidence.DEADLINE, (closed, silence), now, text)
    if case.silent_for(limits.silent_after_s) and case.process is not None:
        text = f"is {age}, process state {state}, beyond the limit of {limits.silent_after_s:g} s"
        because = (silence, case.process)
        return case.verdict(Health.UNHEALTHY, Cause.SILENT, Confidence.DEADLINE, because, now, text)
    return None


_SIGNS: dict[What, Callable[[Evidence], str]] = {
    What.SILENCE: lambda e: f"silent for {float(e.value):.2f} s",
    What.SOCKET_CLOSED: lambda e: f"its socket closed (process state {e.value})",
    What.NO_PROGRESS: lambda e: f"no round for {float(e.value):.2f} s",
}


def _open(case: _Case, in_doubt: bool, now: float) -> Verdict:
    lost = case.by_what.get(What.TELEMETRY_LOST)
    if lost is not None:
        text = f"is unknown: the daemon was late by {float(lost.value):.2f} s and has not heard it since"
        return case.verdict(Health.UNKNOWN, Cause.TELEMETRY_LOST, Confidence.NONE, (lost,), now, text)
    signs = [case.by_what[what] for what in _SIGNS if what in case.by_what]
    if signs or case.accusations:
        words = [_SIGNS[e.what](e) for e in signs]
        if case.accusations:
            words.append(f"{len({e.reporter for e in case.accusations})} other(s) complain")
        if case.process:
            words.append(f"process state {case.process.value}")
        if in_doubt and case.silence:
            words.append("most ranks are silent, so telemetry is in doubt")
        text = "is suspected, not condemned: " + ", ".join(words)
        because = (*signs, *case.accusations)
        return case.verdict(Health.UNKNOWN, Cause.SUSPECTED, Confidence.NONE, because, now, text)
    beat = case.by_what.get(What.BEAT_HEARD)
    if beat is None:
        return case.verdict(Health.UNKNOWN, Cause.UNHEARD, Confidence.NONE, (), now, "was not heard yet")
    return case.verdict(Health.HEALTHY, Cause.NONE, Confidence.NONE, (beat,), now, "is healthy")
