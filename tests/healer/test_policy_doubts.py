"""What `healer policy check` warns of: rules that match nothing, times that never come, load rules that never move."""

from pathlib import Path

import pytest

from healer.diagnosis import Cause, Health
from healer.policy.load import check_text
from healer.policy.match_doubts import confidences_of
from healer.policy.recording import frames
from tests.healer.support import POLICY, FakeClock

OFF = "  sensors: {nvml: {enabled: false}, kernelLog: {enabled: false}}\n"


def warned(more: str) -> list[str]:
    """Without the warning of causes that no rule answers, which is tested elsewhere."""
    found = check_text(POLICY + more, name="p.yaml", base=Path("/base"), clock=FakeClock()).warnings
    return [one for one in found if "rules: have none for" not in one]


def match(text: str) -> str:
    return f"  healing: {{rules: [{{name: a, match: {text}, actions: [human]}}]}}\n"


def when(condition: str) -> str:
    return match('{when: "' + condition + '"}')


def load(rule: str) -> str:
    signals = "{w: {metric: waiting}, k: {metric: kvUse, scope: rank, aggregate: mean}}"
    rest = (
        "{kind: targetTracking, name: w, signal: w, target: 4}, {kind: targetTracking, name: k, signal: k, target: 0.7}"
    )
    return f"  load: {{signals: {signals}, rules: [{rule}, {rest}]}}\n"


def threshold(condition: str) -> str:
    return load('{kind: threshold, name: x, when: "' + condition + '", scale: up}')


NEVER = [
    (match("{cause: [thermal]}"), "match.cause[0]: thermal never comes with verdict unhealthy, expected match.verdict [healthy]"),
    (match("{cause: [suspected]}"), "match.cause[0]: suspected never comes with verdict unhealthy"),
    (match("{cause: [xid]}") + OFF, "match.cause[0]: xid is never found: sensors.nvml and sensors.kernelLog are off"),
    (match("{evidence: [remap-failed]}") + "  sensors: {nvml: {enabled: false}}\n", "remap-failed is never seen: sensors.nvml is off"),
    (match("{xid: [79, 9000-9010]}"), "match.xid[1]: 9000-9010 is not in the XID catalogue"),
    (match("{xid: [79]}") + OFF, "match.xid[0]: 79 is never seen: sensors.nvml and sensors.kernelLog are off"),
    (match("{cause: [hang], confidence: [conclusive]}"), "match.cause[0]: hang never comes with confidence conclusive, expected quorum"),
    (match("{verdict: [unhealthy, unknown]}"), "match.verdict[1]: unknown matches every rank that starts, until it is heard"),
    (match("{labels: {rack: a}}"), "match.labels: no slot has rack=a"),
    (when("cause == 'proces-death'"), "cause is never 'proces-death' (did you mean process-death?)"),
    (when("'criticl' == severity"), "severity is never 'criticl' (did you mean critical?)"),
    (when("verdict in ['unhealthy', 'ill']"), "verdict is never 'ill', expected one of healthy, unhealthy, unknown"),
    (when("evidence.exists(e, e.what == 'xidd')"), "evidence.what is never 'xidd' (did you mean xid?)"),
    (when("evidence.exists(e, e.age > 1)"), "evidence has no age, expected one of what, source, value, severity, ageSeconds"),
    (when("failures > 3 && failures < 2"), "match.when: holds in no case that match lets through"),
    (when("slot == 17"), "match.when: holds in no case"),
    (when("lost > 6"), "match.when: holds in no case"),
    (when("verdict == 'healthy'"), "match.when: holds in no case"),
    (when("labels.rack == 'a'"), "match.when: holds in no case"),
    (match("{cause: [hang], when: \"cause == 'stuck'\"}"), "match.when: holds in no case"),
    (threshold("w < 0.0"), "load.rules[0].when: holds for no values"),
    (threshold("w > 10.0 && w < 5.0"), "load.rules[0].when: holds for no values"),
    (threshold("k > 1.5"), "load.rules[0].when: holds for no values"),
    (threshold("ranks > 6.0 && w > 1.0"), "load.rules[0].when: holds for no values"),
    (load("{kind: targetTracking, name: x, signal: k, target: 0.95}"), "rules[0].target: 0.95 with tolerance 0.1 is never exceeded"),
    (
        "  load: {signals: {k: {metric: kvUse}}, rules: [{kind: targetTracking, name: k, signal: k, target: 0.7}]}\n",
        "signals.k.aggregate: sum adds up shares of kvUse",
    ),
    ("  schedules: [{name: a, cron: 0 0 30 2 *, for: 1h, bounds: {minRanks: 3}}]\n", "schedules[0].cron: '0 0 30 2 *' names no time"),
    (
        "  schedules: [{name: a, cron: 0 0 * * *, until: 0 0 31 4 *, bounds: {minRanks: 3}}]\n",
        "schedules[0].until: '0 0 31 4 *' names no time: once begun it never ends",
    ),
    ("  schedules: [{name: a, cron: 0 * * * *, for: 2h, bounds: {minRanks: 3}}]\n", "schedules[0].cron: begins again before it has ended"),
    ("  schedules: [{name: a, cron: 0 8 * * mon-fri, for: 1h, bounds: {maxRanks: 6}}]\n", "schedules[0].bounds: changes nothing"),
    ("  bounds: {maintenance: [{name: a, cron: 0 0 30 2 *, for: 1h}]}\n", "maintenance[0].cron: '0 0 30 2 *' names no time"),
    (
        "  schedules: [{name: day, cron: 0 8 * * mon-fri, for: 12h, bounds: {minRanks: 5}},"
        " {name: thrift, cron: 0 0 * * *, for: 10h, bounds: {maxRanks: 3}}]\n",
        "schedules[1].bounds.maxRanks: 3 is below the minRanks 5 of 'day', which is in force at the same time",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("more", "told"), NEVER, ids=[told[:50] for _, told in NEVER])
def test_what_can_never_be_is_warned_of_at_its_place(more: str, told: str) -> None:
    (warning,) = warned(more)
    assert warning.startswith("p.yaml:")
    assert told in warning


POSSIBLE = [
    match("{verdict: [healthy], cause: [thermal, straggler]}"),
    match("{xid: [79, 144-150]}"),
    when("failures > 2 || lost > 1"),
    when("live < target && severity == 'critical'"),
    when("lost * 2 >= target"),
    when("size(evidence) > 3 && sources > 1"),
    when("evidence.exists(e, e.what == 'xid' && e.value == 79)"),
    when("host.startsWith('node-') && slot in [1, 2]"),
    when("labels['rack'] == 'a'"),
    threshold("w / ranks > 3.0"),
    threshold("w > 10.0 && k > 0.8 && ranks < 6.0"),
    threshold("w > 10.0 || k > 1.5"),
    "  schedules: [{name: day, cron: 0 8 * * mon-fri, for: 12h, bounds: {minRanks: 5}},"
    " {name: night, cron: 0 22 * * *, for: 6h, bounds: {maxRanks: 3}}]\n",
    "  schedules: [{name: leap, cron: 0 0 1 1 *, for: 1h, bounds: {minRanks: 3}}]\n",
]


@pytest.mark.parametrize("more", POSSIBLE)
def test_what_can_be_is_not_warned_of(more: str) -> None:
    labels = "    slotLabels: [{slots: [0-2], labels: {rack: a}}]\n"
    assert warned(labels + more) == []


SPOT = "    slotLabels: [{slots: [0-3], labels: {market: own}}, {slots: [4-5], labels: {market: spot}}]\n"


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        (SPOT + match("{labels: {market: spot}}"), "process-death, stopped, hang, stuck, agent-lost, silent, xid, recovery-action, gpu-lost, ecc, remap, nvlink, fabric, pcie at slots 0-3"),
        (match("{slot: [0, 2-5]}"), " at slot 1: such a rank waits for a human"),
        (match("{confidence: [conclusive]}"), "have none for hang, stuck, agent-lost, silent: such"),
        (match("{confidence: [conclusive]}"), "have none for xid with confidence quorum, deadline: such"),
        (match("{cause: [hang, stuck]}"), "have none for process-death, stopped, agent-lost"),
    ],
)  # fmt: skip
def test_a_fault_that_no_rule_answers_at_some_slot_or_with_some_confidence_is_warned_of(rules: str, told: str) -> None:
    found = check_text(POLICY + rules, name="p.yaml", base=Path("/base"), clock=FakeClock()).warnings
    assert any("spec.healing.rules: have none for" in one and told in one for one in found), found


def test_what_a_verdict_rests_on_is_as_the_checks_of_a_policy_take_it_to_be() -> None:
    """On every recorded scenario: otherwise a warning could call a rule useless that is not."""
    seen = set()
    for trace in sorted((Path(__file__).parent / "traces").glob("*.jsonl")):
        for frame in frames(trace):
            seen |= {(v.cause, v.confidence) for v in frame.verdicts if v.health == Health.UNHEALTHY}
    assert {cause for cause, _ in seen} >= {Cause.PROCESS_DEATH, Cause.STOPPED, Cause.STUCK, Cause.XID}
    assert [one for one in sorted(seen) if one[1] not in confidences_of(one[0])] == []
