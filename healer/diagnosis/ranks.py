"""Rules 1 to 9: what the evidence about the ranks themselves says of each."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping

from healer.diagnosis.localise import Finding, Kind, Suspicions, localise
from healer.diagnosis.verdict import Cause, Confidence, Health, Limits, Verdict
from healer.diagnosis.waits import Waits, cut_off, mutual
from healer.evidence import Evidence, RankRef, What

DEAD_STATES = frozenset("ZXx")
DEATHS = (What.LIFELINE_CUT, What.PIDFD_FIRED, What.PROCESS_STATE, What.SOCKET_CLOSED)


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
            subject=self.rank,
            health=health,
            cause=cause,
            confidence=confidence,
            evidence=tuple(e.id for e in because),
            since=min((e.at for e in because), default=now),
            sentence=f"{self.rank} {text}",
        )


def judge_ranks(
    about: Mapping[RankRef, Collection[Evidence]], limits: Limits, now: float, regrouped_at: float = -math.inf
) -> tuple[dict[RankRef, Verdict], Finding]:
    """A verdict for every live rank, from evidence about and by live ranks only; and where the trouble sits.
    `regrouped_at`: when a rank last left. What the others waited for then is over, and who stood still for it may move on."""
    cases = {rank: _Case(rank, own, now, limits) for rank, own in about.items()}
    settled: dict[RankRef, Verdict] = {}
    for rank, case in cases.items():
        verdict = _dead(case, now) or _stopped(case, limits, now)
        if verdict:
            settled[rank] = verdict
    open_cases = {rank: case for rank, case in cases.items() if rank not in settled}
    silent = sum(case.silence is not None for case in open_cases.values())
    in_doubt = 2 * silent > len(open_cases)
    where = _where(open_cases, limits)
    waits = _waits(open_cases)
    apart = cut_off(waits, len(cases))
    both = mutual(waits)
    settling = now - regrouped_at < limits.silent_after_s
    for rank, case in open_cases.items():
        mates = both.get(rank, frozenset())
        if case.silence is None and What.NO_PROGRESS not in case.by_what:
            settled[rank] = _open(case, where, mates, in_doubt, now)
            continue
        others = [other for peer, other in open_cases.items() if peer != rank]
        settled[rank] = (
            _hang(case, others, limits, now)
            or (None if settling else _stuck(case, others, where, limits, now))
            or (None if settling or rank not in apart else _cut_off(case, apart, others, limits, now))
            or (None if in_doubt else _overdue(case, limits, now))
            or _open(case, where, mates, in_doubt, now)
        )
    return {rank: settled[rank] for rank in cases}, where


def _where(cases: Mapping[RankRef, _Case], limits: Limits) -> Finding:
    since: dict[RankRef, dict[RankRef, float]] = {}
    for rank, case in cases.items():
        for e in case.accusations:
            if e.reporter is not None:
                began = e.at - float(e.value) if e.what == What.WAITED_ON else e.at
                row = since.setdefault(e.reporter, {})
                row[rank] = min(began, row.get(rank, began))
    heard = frozenset(rank for rank, case in cases.items() if case.heard)
    return localise(Suspicions(frozenset(cases), heard, since), limits.stall_after_s)


def _waits(cases: Mapping[RankRef, _Case]) -> Waits:
    """Who that is heard waits for whom, now. A wait for a silent rank is one too."""
    found: dict[RankRef, set[RankRef]] = {rank: set() for rank, case in cases.items() if case.heard}
    for rank, case in cases.items():
        for e in case.accusations:
            if e.what == What.WAITED_ON and e.reporter in found:
                found[e.reporter].add(rank)
    return found


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


def _stuck(case: _Case, others: Collection[_Case], where: Finding, limits: Limits, now: float) -> Verdict | None:
    still = case.by_what.get(What.NO_PROGRESS)
    if still is None or not case.heard or float(still.value) < limits.silent_after_s:
        return None
    if where.kind in (Kind.LINKS, Kind.PARTITION):
        return None
    # who misses a peer itself, or has masked one since its round stopped, is no end of the chain
    stood_since = still.at - float(still.value)
    own = (e for other in others for e in other.accusations if e.reporter == case.rank)
    if any(e.what == What.WAITED_ON or e.at >= stood_since for e in own):
        return None
    because = [e for e in _witnesses(case, others)[1] if e.what == What.WAITED_ON]
    witnesses = {e.reporter for e in because if e.reporter}
    heard = {other.rank for other in others if other.heard}
    if not heard or witnesses != heard or 2 * len(witnesses) < len(others):
        return None
    text = f"is stuck: beats, but no round for {float(still.value):.2f} s, and all {len(witnesses)} others wait for it"
    return case.verdict(Health.UNHEALTHY, Cause.STUCK, Confidence.QUORUM, (still, *because), now, text)


def _cut_off(
    case: _Case, apart: Collection[RankRef], others: Collection[_Case], limits: Limits, now: float
) -> Verdict | None:
    still = case.by_what.get(What.NO_PROGRESS)
    if still is None or float(still.value) < limits.silent_after_s:
        return None
    because = [e for e in case.accusations if e.what == What.WAITED_ON and e.reporter not in apart]
    witnesses = {e.reporter for e in because if e.reporter}
    text = (
        f"is cut off: beats, but no round for {float(still.value):.2f} s; {len(witnesses)} of {len(others)} others and it "
        "wait for each other, and without it nobody would wait"
    )
    if len(apart) > 1:
        shown = ", ".join(str(rank) for rank in sorted(apart))
        text = text.replace("without it nobody", f"without {shown} nobody")
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


def _open(case: _Case, where: Finding, mates: Collection[RankRef], in_doubt: bool, now: float) -> Verdict:
    lost = case.by_what.get(What.TELEMETRY_LOST)
    if lost is not None:
        text = f"is unknown: the daemon was late by {float(lost.value):.2f} s and has not heard it since"
        return case.verdict(Health.UNKNOWN, Cause.TELEMETRY_LOST, Confidence.NONE, (lost,), now, text)
    signs = [case.by_what[what] for what in _SIGNS if what in case.by_what]
    if signs or case.accusations:
        words = [_SIGNS[e.what](e) for e in signs]
        if case.accusations:
            words.append(f"{len({e.reporter for e in case.accusations})} other(s) complain")
            if where.kind == Kind.PARTITION or any(case.rank in link for link in where.links):
                words.append(where.reason)
        if case.process:
            words.append(f"process state {case.process.value}")
        if in_doubt and case.silence:
            words.append("most ranks are silent, so telemetry is in doubt")
        because = (*signs, *case.accusations)
        if mates and case.silence is None:
            shown = ", ".join(str(rank) for rank in sorted(mates))
            text = f"is not condemned: it and {shown} wait for each other, " + ", ".join(words)
            return case.verdict(Health.UNKNOWN, Cause.MUTUAL_WAIT, Confidence.NONE, because, now, text)
        text = "is suspected, not condemned: " + ", ".join(words)
        return case.verdict(Health.UNKNOWN, Cause.SUSPECTED, Confidence.NONE, because, now, text)
    beat = case.by_what.get(What.BEAT_HEARD)
    if beat is None:
        return case.verdict(Health.UNKNOWN, Cause.UNHEARD, Confidence.NONE, (), now, "was not heard yet")
    for what, (cause, tell) in _WARNINGS.items():
        if what in case.by_what:
            warning = case.by_what[what]
            text = f"is healthy, but {tell(warning)}"
            return case.verdict(Health.HEALTHY, cause, Confidence.NONE, (beat, warning), now, text)
    return case.verdict(Health.HEALTHY, Cause.NONE, Confidence.NONE, (beat,), now, "is healthy")


_WARNINGS: dict[What, tuple[Cause, Callable[[Evidence], str]]] = {
    What.STRAGGLES: (
        Cause.STRAGGLER,
        lambda e: f"the others wait for it {float(e.value):.1f} times as long as for the median rank",
    ),
    What.MEMORY_GROWS: (Cause.MEMORY, lambda e: f"its memory grows by {float(e.value) / 1e6:.1f} MB/s"),
}
"""What is worth a look and condemns nobody, however long it lasts."""
