"""What a rule's `match` asks for and no case can be: causes that no verdict has, kinds that no sensor gives, conditions that
never hold."""

from collections.abc import Iterator, Mapping

from healer.diagnosis import Cause, Confidence, Health
from healer.evidence import What
from healer.policy.conflict import Doubt
from healer.policy.expressions import compiled
from healer.policy.never import around, never_holds, numbers_in, texts_in, unknown_words
from healer.policy.schema import KeyPath, Match, Policy, Rule, Span
from healer.policy.schema.healing import CAUSES, CONFIDENCES
from healer.policy.slots import slots_alike

CAUSES_OF: Mapping[Health, frozenset[Cause]] = {
    Health.UNHEALTHY: frozenset(Cause)
    - {
        Cause.NONE, Cause.TELEMETRY_LOST, Cause.SUSPECTED, Cause.MUTUAL_WAIT, Cause.UNHEARD,
        Cause.THERMAL, Cause.STRAGGLER, Cause.FOREIGN_PROCESS, Cause.MEMORY,
    },
    Health.UNKNOWN: frozenset({Cause.TELEMETRY_LOST, Cause.SUSPECTED, Cause.MUTUAL_WAIT, Cause.UNHEARD}),
    Health.HEALTHY: frozenset(
        {
            Cause.STRAGGLER, Cause.MEMORY, Cause.REMAP, Cause.THERMAL, Cause.ECC, Cause.NVLINK,
            Cause.PCIE, Cause.FOREIGN_PROCESS, Cause.XID,
        }
    ),
}  # fmt: skip
"""What the diagnosis of a rank can say (`healer.diagnosis`): with a healthy rank a cause is a warning."""

CONFIDENCES_OF: Mapping[Cause, tuple[Confidence, ...]] = {
    Cause.PROCESS_DEATH: (Confidence.CONCLUSIVE,),
    Cause.STOPPED: (Confidence.CONCLUSIVE,),
    Cause.HANG: (Confidence.QUORUM,),
    Cause.STUCK: (Confidence.QUORUM,),
    Cause.AGENT_LOST: (Confidence.DEADLINE,),
    Cause.SILENT: (Confidence.DEADLINE,),
    Cause.XID: (Confidence.CONCLUSIVE, Confidence.QUORUM, Confidence.DEADLINE),
}
"""What a condemnation with the cause can rest on, the usual first."""
OF_GPUS = (Confidence.CONCLUSIVE, Confidence.QUORUM)
"""With every other cause."""

NVML = frozenset(
    {
        What.GPU_BACK, What.RESET_REQUIRED, What.POISON, What.ECC_UNCORRECTABLE, What.ECC_CORRECTABLE,
        What.SRAM_THRESHOLD, What.REMAP_PENDING, What.REMAP_FAILED, What.NVLINK_DOWN, What.PCIE_DEGRADED,
        What.PCIE_REPLAYS, What.THROTTLED, What.HOT, What.FOREIGN_PROCESS,
    }
)  # fmt: skip
"""Evidence that only the driver gives."""
KERNEL_LOG = frozenset({What.PCIE_AER, What.KERNEL_LOG_LOST})
EITHER = frozenset({What.XID, What.RECOVERY_ACTION, What.GPU_LOST, What.NVLINK_ERRORS, What.FABRIC_FAILED})
"""Evidence that the driver and the kernel's log give."""

CAUSES_OF_NVML = frozenset({Cause.REMAP, Cause.THERMAL, Cause.ECC, Cause.FOREIGN_PROCESS})
CAUSES_OF_EITHER = frozenset({Cause.XID, Cause.RECOVERY_ACTION, Cause.GPU_LOST, Cause.NVLINK, Cause.FABRIC, Cause.PCIE})

FEW_SLOTS = 16
MANY = 1_000_000.0


def match_doubts(policy: Policy) -> Iterator[Doubt]:
    codes = _codes(policy)
    for index, rule in enumerate(policy.spec.healing.rules):
        place: KeyPath = ("spec", "healing", "rules", index, "match")
        yield from _causes(policy, rule.match, place)
        yield from _everybody(rule.match, place)
        yield from _evidence(policy, rule.match, place)
        yield from _xids(policy, rule.match, place, codes)
        yield from _labels(policy, rule.match, place)
        if rule.match.when is not None:
            yield from _condition(policy, rule, (*place, "when"))


def _causes(policy: Policy, match: Match, place: KeyPath) -> Iterator[Doubt]:
    sensors = policy.spec.sensors
    for number, cause in enumerate(match.cause or ()):
        here = (*place, "cause", number)
        if not any(cause in CAUSES_OF[Health(verdict)] for verdict in match.verdict):
            able = ", ".join(health for health, causes in CAUSES_OF.items() if cause in causes)
            shown = ", ".join(match.verdict)
            yield Doubt(here, f"{cause} never comes with verdict {shown}, expected match.verdict [{able}] beside it")
        elif match.confidence is not None and match.verdict == ("unhealthy",) and not rests_on(match, Cause(cause)):
            able = ", ".join(confidences_of(Cause(cause)))
            shown = ", ".join(match.confidence)
            yield Doubt(here, f"{cause} never comes with confidence {shown}, expected {able} beside it")
        elif not sensors.nvml.enabled and (
            cause in CAUSES_OF_NVML or (cause in CAUSES_OF_EITHER and not sensors.kernel_log.enabled)
        ):
            yield Doubt(here, f"{cause} is never found: {_off(policy)}")


def confidences_of(cause: Cause) -> tuple[Confidence, ...]:
    return CONFIDENCES_OF.get(cause, OF_GPUS)


def rests_on(match: Match, cause: Cause) -> tuple[Confidence, ...]:
    """What a condemnation with the cause that `match.confidence` lets through can rest on."""
    return tuple(one for one in confidences_of(cause) if match.confidence is None or one in match.confidence)


def _everybody(match: Match, place: KeyPath) -> Iterator[Doubt]:
    if match.cause or match.evidence or match.confidence or match.severity or match.xid or match.when is not None:
        return
    if "unknown" in match.verdict:
        text = "unknown matches every rank that starts, until it is heard; expected match.cause or match.evidence beside it"
        yield Doubt((*place, "verdict", match.verdict.index("unknown")), text)


def _evidence(policy: Policy, match: Match, place: KeyPath) -> Iterator[Doubt]:
    sensors = policy.spec.sensors
    nvml, log = sensors.nvml.enabled, sensors.kernel_log.enabled
    for number, kind in enumerate(match.evidence or ()):
        dark = (
            (kind in NVML and not nvml) or (kind in KERNEL_LOG and not log) or (kind in EITHER and not nvml and not log)
        )
        if dark:
            yield Doubt((*place, "evidence", number), f"{kind} is never seen: {_off(policy)}")


def _off(policy: Policy) -> str:
    sensors = policy.spec.sensors
    off = [name for name, on in (("nvml", sensors.nvml.enabled), ("kernelLog", sensors.kernel_log.enabled)) if not on]
    return " and ".join(f"sensors.{name}" for name in off) + (" are off" if len(off) > 1 else " is off")


def _xids(policy: Policy, match: Match, place: KeyPath, codes: frozenset[int]) -> Iterator[Doubt]:
    sensors = policy.spec.sensors
    for number, span in enumerate(match.xid or ()):
        here = (*place, "xid", number)
        if not sensors.nvml.enabled and not sensors.kernel_log.enabled:
            yield Doubt(here, f"{span} is never seen: {_off(policy)}")
        elif not any(span.holds(code) for code in codes):
            yield Doubt(here, f"{span} is not in the XID catalogue: no driver is known to give it")


def _codes(policy: Policy) -> frozenset[int]:
    """Of the catalogue; empty where no rule names an XID. Raises ElasticError for overrides that are wrong."""
    if not any(rule.match.xid for rule in policy.spec.healing.rules):
        return frozenset()
    # imported and read here: most policies name no XID
    from pathlib import Path

    from healer.xids import load

    overrides = policy.spec.sensors.xid_overrides
    place = Path(overrides) if overrides is not None and Path(overrides).is_file() else None
    return frozenset(load(place).rows)


def _labels(policy: Policy, match: Match, place: KeyPath) -> Iterator[Doubt]:
    if not match.labels:
        return
    if not any(match.labels.items() <= one.items() for one in _labels_there_are(policy, match)):
        shown = ", ".join(f"{name}={value}" for name, value in match.labels.items())
        where = " that match.slot names" if match.slot else ""
        yield Doubt((*place, "labels"), f"no slot{where} has {shown}, expected labels of target.slotLabels")


def _labels_there_are(policy: Policy, match: Match) -> list[dict[str, str]]:
    """Of the slots that `match.slot` names, each combination once or a few times."""
    slots = (span.first for span in slots_alike(policy))
    return [policy.spec.target.labels_of(slot) for slot in slots if _names(match.slot, slot)]


def _names(spans: tuple[Span, ...] | None, slot: int) -> bool:
    return spans is None or any(span.holds(slot) for span in spans)


def _condition(policy: Policy, rule: Rule, place: KeyPath) -> Iterator[Doubt]:
    condition = compiled(rule.match.when or "")
    wrong = tuple(unknown_words(condition.text))
    for text in wrong:
        yield Doubt(place, text)
    if not wrong and never_holds(condition, _domains(policy, rule.match, condition.text)):
        yield Doubt(place, "holds in no case that match lets through: the rule never matches")


def _domains(policy: Policy, match: Match, condition: str) -> dict[str, tuple[object, ...]]:
    """All values that matter; without `evidence`, whose lists have no end."""
    target, numbers, texts = policy.spec.target, numbers_in(condition), texts_in(condition)
    most = target.max_ranks

    def whole(low: int, high: float, *more: int) -> tuple[int, ...]:
        if high - low <= FEW_SLOTS:
            return tuple(range(low, int(high) + 1))
        return tuple(dict.fromkeys(round(n) for n in around([*numbers, *map(float, more)], low, high, 1.0)))

    causes = match.cause or tuple(cause for cause in ("none", *CAUSES))
    able = {cause for verdict in match.verdict for cause in CAUSES_OF[Health(verdict)]}
    slots = [number for span in match.slot or () for number in span]
    ends = [number for span in match.xid or () for number in span]
    labels = _labels_there_are(policy, match)
    return {
        "verdict": match.verdict,
        "cause": tuple(cause for cause in causes if cause in able),
        "confidence": match.confidence or ("none", *CONFIDENCES),
        "severity": match.severity or ("", "info", "warning", "critical"),
        "slot": tuple(slot for slot in whole(0, most - 1, *slots) if _names(match.slot, slot)),
        "host": tuple(dict.fromkeys((*texts, "x"))),
        "labels": tuple({str(sorted(one.items())): one for one in labels}.values()),
        "xid": tuple(
            code for code in whole(0, MANY, *ends) if not match.xid or any(span.holds(code) for span in match.xid)
        ),
        "sources": whole(0, MANY),
        "failures": whole(1, MANY),
        "live": whole(0, most),
        "target": whole(0, most),
        "lost": whole(0, most),
    }
