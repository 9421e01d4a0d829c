"""Rules 10 to 14: what the evidence about a GPU, and about the ranks on it, says of the GPU."""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from healer.diagnosis.hardware import ENDS_THE_GPU, GRAVITY, Advice, Advise, Hardware, XidAction
from healer.diagnosis.ranks import DEAD_STATES, DEATHS
from healer.diagnosis.verdict import Cause, Confidence, Health, Limits, Verdict
from healer.dossier import Standing
from healer.evidence import Evidence, GpuRef, HostRef, RankRef, What

ACTIONS = {
    1: "a reset of the GPU", 2: "a reboot of the node", 3: "a drain of its peers", 4: "a drain and a reset",
    5: "a recovery of the IMEX domain", 6: "a bus reset", 7: "a reboot of the system",
}  # fmt: skip
"""NVML field 230, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, values of nvidia-ml-py 13.615."""

LOST: dict[object, str] = {
    15: "the driver does not reach it any more (NVML code 15)",
    28: "the driver does not find it (NVML code 28)",
}
"""NVML_ERROR_GPU_IS_LOST and NVML_ERROR_GPU_NOT_FOUND of nvidia-ml-py 13.615."""

GRAVE: dict[What, Cause] = {
    What.ECC_UNCORRECTABLE: Cause.ECC,
    What.SRAM_THRESHOLD: Cause.ECC,
    What.POISON: Cause.ECC,
    What.NVLINK_DOWN: Cause.NVLINK,
    What.FABRIC_FAILED: Cause.FABRIC,
    What.PCIE_AER: Cause.PCIE,
}
"""Signs that count towards a quorum, beside XIDs, and what they stand for."""

WARNINGS: dict[What, tuple[Cause, str]] = {
    What.REMAP_PENDING: (Cause.REMAP, "memory rows wait to be remapped, at the next reset"),
    What.THROTTLED: (Cause.THERMAL, "its clocks are slowed down: {}"),
    What.HOT: (Cause.THERMAL, "it is at {} °C, where it slows itself down"),
    What.ECC_CORRECTABLE: (Cause.ECC, "many memory errors are corrected (per second: {})"),
    What.NVLINK_ERRORS: (Cause.NVLINK, "its NVLinks retry often (per second: {})"),
    What.PCIE_DEGRADED: (Cause.PCIE, "its PCIe link runs at {}"),
    What.PCIE_REPLAYS: (Cause.PCIE, "its PCIe link replays often (per second: {})"),
    What.PCIE_AER: (Cause.PCIE, "PCIe errors were {}"),
    What.FOREIGN_PROCESS: (Cause.FOREIGN_PROCESS, "process {} on it is no rank's"),
}


class Xid(msgspec.Struct, frozen=True):
    """An XID that stands, with what the catalogue says of it."""

    standing: Standing
    advice: Advice

    @property
    def code(self) -> int:
        return int(self.standing.evidence.value)

    @property
    def at(self) -> float:
        return self.standing.first_at

    @property
    def action(self) -> XidAction:
        return self.advice.action

    def __str__(self) -> str:
        times = f", {self.standing.count} times" if self.standing.count > 1 else ""
        return f"XID {self.code} ({self.advice.name}{times})"


def xids_of(own: Iterable[Standing], advise: Advise) -> list[Xid]:
    """The one to blame first: the gravest, and of those the earliest. An echo such as 45 never outranks its cause."""
    found = [
        Xid(one, advise(int(one.evidence.value), one.evidence.detail)) for one in own if one.evidence.what == What.XID
    ]
    return sorted(found, key=lambda x: (-GRAVITY[x.action], x.at))


class _Case:
    def __init__(
        self,
        gpu: GpuRef,
        own: Collection[Standing],
        on_it: Iterable[Evidence],
        advise: Advise,
        host_back_at: float,
        limits: Limits,
        now: float,
    ) -> None:
        self.gpu, self.limits, self.now, self.host_back_at = gpu, limits, now, host_back_at
        self.own = [one.evidence for one in own]
        self.by_what = {e.what: e for e in self.own}
        self.on_it = list(on_it)
        self.xids = xids_of(own, advise)

    def newest(self, what: What) -> Evidence | None:
        return max((e for e in self.own if e.what == what), key=lambda e: e.at, default=None)

    @property
    def dark(self) -> list[Evidence]:
        return [e for e in self.own if e.what in (What.SENSOR_BLIND, What.SENSOR_SILENT)]

    @property
    def silent_and_well(self) -> bool:
        """Nothing stands but the driver's word that nothing needs to be done: the usual case, and a quick one."""
        return all(e.what == What.RECOVERY_ACTION and not e.value for e in self.own)

    def answered(self, xid: Xid) -> bool:
        """The driver wants nothing done. Field 230 is told when it changes: where its 0 stands, the GPU can be read, and
        the driver has had its time, silence is an answer."""
        action, at = self.by_what.get(What.RECOVERY_ACTION), xid.standing.evidence.at
        if action is None or action.value:
            return False
        had_time = self.now - at >= self.limits.answer_after_s and not self.dark
        return action.at >= at or had_time

    @property
    def grave_xids(self) -> list[Xid]:
        # a driver that was loaded anew has brought its GPUs up anew
        since = [x for x in self.xids if x.standing.evidence.at >= self.host_back_at]
        return [x for x in since if x.action in ENDS_THE_GPU and not self.answered(x)]

    @property
    def grave(self) -> list[Evidence]:
        found = [e for e in self.own if e.what in GRAVE and not (e.what == What.PCIE_AER and e.value == "corrected")]
        return [x.standing.evidence for x in self.grave_xids] + found

    def verdict(
        self, health: Health, cause: Cause, confidence: Confidence, because: Collection[Evidence], text: str
    ) -> Verdict:
        ids = dict.fromkeys(e.id for e in because)
        used = [x for x in self.xids if x.standing.evidence.id in ids]
        return Verdict(
            subject=self.gpu,
            health=health,
            cause=cause,
            confidence=confidence,
            evidence=tuple(ids),
            since=min((e.at for e in because), default=self.now),
            sentence=f"{self.gpu} {text}",
            xids=tuple(dict.fromkeys(x.code for x in used)),
        )


def judge_gpus(
    about: Mapping[GpuRef, Collection[Standing]],
    about_ranks: Mapping[RankRef, Collection[Evidence]],
    hosts: Mapping[HostRef, Verdict],
    back_at: float,
    hardware: Hardware,
    limits: Limits,
    now: float,
) -> dict[GpuRef, Verdict]:
    """`back_at`: when the host's telemetry came back, if it was away; minus infinity: it was not."""
    muted = muting(hosts)
    on_it: dict[GpuRef, list[Evidence]] = {}
    for rank, gpu in hardware.placed.items():
        on_it.setdefault(gpu, []).extend(complaints(about_ranks.get(rank, ()), limits, now))
    found = {}
    for gpu, own in about.items():
        case = _Case(gpu, own, on_it.get(gpu, ()), hardware.advise, back_at, limits, now)
        if muted is not None:
            text = f"is unknown, since the fault is the host's: {muted.sentence}"
            own_words = case.verdict(Health.UNKNOWN, muted.cause, Confidence.NONE, case.grave, text)
            found[gpu] = msgspec.structs.replace(own_words, evidence=(*own_words.evidence, *muted.evidence))
        elif case.silent_and_well:
            found[gpu] = case.verdict(Health.HEALTHY, Cause.NONE, Confidence.NONE, (), "is healthy")
        else:
            found[gpu] = _conclusive(case) or _quorum(case) or _deadline(case) or _open(case)
    return found


def muting(hosts: Mapping[HostRef, Verdict]) -> Verdict | None:
    """The verdict on a host that makes those on its GPUs worthless, if there is one."""
    return next((v for v in hosts.values() if v.health != Health.HEALTHY), None)


def complaints(about: Iterable[Evidence], limits: Limits, now: float) -> list[Evidence]:
    """Signs that a rank is in trouble, each too weak by itself perhaps."""
    return [
        e
        for e in about
        if (e.what in DEATHS and (e.value in DEAD_STATES or e.what in (What.LIFELINE_CUT, What.PIDFD_FIRED)))
        or e.what in (What.SILENCE, What.NO_PROGRESS, What.WAITED_ON)
        or (e.what == What.PEER_FAULT and now - e.at <= limits.fault_window_s)
    ]


def _conclusive(case: _Case) -> Verdict | None:
    def sick(cause: Cause, because: Evidence, text: str) -> Verdict:
        others = [e for e in case.grave if abs(e.at - because.at) <= case.limits.quorum_window_s]
        xid = next((x for x in case.grave_xids if x.standing.evidence in others), None)
        if xid is not None:
            cause, text = Cause.XID, f"{text}, after {xid}"
        elif others and cause == Cause.RECOVERY_ACTION:
            cause = GRAVE[others[0].what]
        return case.verdict(Health.UNHEALTHY, cause, Confidence.CONCLUSIVE, (because, *others), text)

    lost = case.newest(What.GPU_LOST)
    if lost is not None:
        said = LOST.get(lost.value, f"the driver answers with code {lost.value}")
        return sick(Cause.GPU_LOST, lost, f"is lost: {said if isinstance(lost.value, int) else lost.value}")
    action = case.by_what.get(What.RECOVERY_ACTION)
    if action is not None and action.value:
        wanted = ACTIONS.get(int(action.value), f"an action that is not known ({action.value})")
        return sick(Cause.RECOVERY_ACTION, action, f"must not be used: the driver asks for {wanted}")
    reset = case.by_what.get(What.RESET_REQUIRED)
    if reset is not None:
        return sick(Cause.RECOVERY_ACTION, reset, "must not be used: the driver asks for a reset (code 16)")
    fatal = next((e for e in case.own if e.what == What.POISON and e.value == "fatal"), None)
    if fatal is not None:
        return sick(Cause.ECC, fatal, "has a fatal memory poison")
    remap = case.by_what.get(What.REMAP_FAILED)
    if remap is not None:
        return sick(Cause.REMAP, remap, "has a memory row that could not be remapped")
    return None


def _settling(case: _Case) -> bool:
    back = case.newest(What.SENSOR_BACK)
    return back is not None and case.now - back.at < case.limits.settle_after_s


def _quorum(case: _Case) -> Verdict | None:
    if _settling(case):
        return None
    grave = sorted((*case.grave, *case.on_it), key=lambda e: e.at)
    for last in grave:
        agree = [e for e in grave if 0 <= last.at - e.at <= case.limits.quorum_window_s]
        on_gpu = [e for e in agree if isinstance(e.subject, GpuRef)]
        sources = {_source(e) for e in agree}
        if len(sources) < 2 or not on_gpu:
            continue
        cause, shown = _name(case, on_gpu)
        text = f"is faulty: {shown}; {len(sources)} sources agree ({', '.join(sorted(sources))})"
        return case.verdict(Health.UNHEALTHY, cause, Confidence.QUORUM, agree, text)
    return None


def _source(evidence: Evidence) -> str:
    """Who says so. An XID is the driver's word, whichever way it came; what is said about the ranks, by whomever, is one
    event: a death and the complaints about it belong together."""
    if not isinstance(evidence.subject, GpuRef):
        return "its ranks"
    return "XIDs" if evidence.what == What.XID else evidence.source


def _name(case: _Case, because: Collection[Evidence]) -> tuple[Cause, str]:
    xid = next((x for x in case.grave_xids if x.standing.evidence in because), None)
    if xid is not None:
        return Cause.XID, str(xid)
    first = min(because, key=lambda e: e.at)
    return GRAVE[first.what], f"{first.what} ({first.value})"


def _deadline(case: _Case) -> Verdict | None:
    xid = next(iter(case.grave_xids), None)
    if xid is None or _settling(case) or case.now - xid.at < case.limits.answer_after_s:
        return None
    text = f"is faulty: {xid}, for which the catalogue asks for {xid.action}; the driver has not said otherwise"
    because = (xid.standing.evidence,)
    return case.verdict(Health.UNHEALTHY, Cause.XID, Confidence.DEADLINE, because, text)


def _open(case: _Case) -> Verdict:
    strange = next((x for x in case.xids if x.action in (XidAction.UNKNOWN, XidAction.HUMAN)), None)
    if case.grave:
        cause, shown = _name(case, case.grave)
        text = f"is suspected, not condemned: {shown}"
        return case.verdict(Health.UNKNOWN, cause, Confidence.NONE, case.grave, text)
    asked = [x for x in case.xids if x.action in ENDS_THE_GPU and case.now - x.at < case.limits.answer_after_s]
    if asked:
        # the first answer may be older than the driver's own judgement
        text = f"is suspected, not condemned: {asked[0]}, for which the driver asks for nothing so far"
        because = (asked[0].standing.evidence,)
        return case.verdict(Health.UNKNOWN, Cause.XID, Confidence.NONE, because, text)
    if strange is not None:
        text = f"needs a human: {strange}"
        because = (strange.standing.evidence,)
        return case.verdict(Health.UNKNOWN, Cause.XID, Confidence.NONE, because, text)
    if case.dark:
        first = case.dark[0]
        text = f"is unknown: {first.source} gives no reading ({first.what}: {_value(first)})"
        return case.verdict(Health.UNKNOWN, Cause.TELEMETRY_LOST, Confidence.NONE, case.dark, text)
    back = case.newest(What.GPU_BACK)
    if back is not None and case.now - back.at < case.limits.probation_s:
        text = f"is on probation: it was lost, and is back for {case.now - back.at:.0f} s"
        return case.verdict(Health.UNKNOWN, Cause.GPU_LOST, Confidence.NONE, (back,), text)
    for what, (cause, tell) in WARNINGS.items():
        if what in case.by_what:
            warning = case.by_what[what]
            text = f"is healthy, but {tell.format(_value(warning))}"
            return case.verdict(Health.HEALTHY, cause, Confidence.NONE, (warning,), text)
    if case.xids:
        because = (case.xids[0].standing.evidence,)
        text = f"is healthy, but reported {case.xids[0]}"
        return case.verdict(Health.HEALTHY, Cause.XID, Confidence.NONE, because, text)
    return case.verdict(Health.HEALTHY, Cause.NONE, Confidence.NONE, (), "is healthy")


def _value(evidence: Evidence) -> str:
    return f"{evidence.value:.2f}" if isinstance(evidence.value, float) else str(evidence.value)
