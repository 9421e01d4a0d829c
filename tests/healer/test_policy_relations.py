"""Values that do not fit each other are refused where they stand, and what may not be meant is told apart from errors."""

import re
from pathlib import Path

import pytest

from elastic.tools.make_checkpoint import Options, make_checkpoint
from healer.policy.load import PolicyError, check_text, parse_policy
from tests.healer.support import POLICY

HOOKS = "  hooks: {page: {kind: webhook, url: 'http://a/b'}, reset: {kind: reset, command: [r]}}\n"
SIGNALS = "    signals: {w: {metric: waiting}, kv: {metric: kvUse, scope: rank, aggregate: mean}}\n"


def problems(more: str, policy: str = POLICY) -> list[str]:
    try:
        parse_policy(policy + more, name="p.yaml", base=Path("/base"))
    except PolicyError as error:
        return list(error.problems)
    return []


def warned(more: str, policy: str = POLICY) -> list[str]:
    return list(check_text(policy + more, name="p.yaml", base=Path("/base")).warnings)


def rule(text: str) -> str:
    return "  healing:\n    rules:\n      - " + text + "\n"


def rules(*texts: str) -> str:
    return "  healing:\n    rules:\n" + "".join(f"      - {text}\n" for text in texts)


def load(*rules: str, more: str = "") -> str:
    entries = "".join(f"      - {one}\n" for one in rules) or "      []\n"
    return f"  load:\n{SIGNALS}    rules:\n{entries}{more}"


REFUSED = [
    # case 38: times that make a detector misbehave
    ("  detection: {heartbeatInterval: 300ms}\n", "detection.stallAfter: 1s is too short, expected at least 5 x"),
    ("  detection: {silentAfter: 1500ms}\n", "detection.silentAfter: 1.5s is too short, expected at least 2 x"),
    ("  detection: {stallAfter: 30s, silentAfter: 1m}\n", "stallAfter: 30s is not below target.epTimeout"),
    ("    epTimeout: 4s\n", "spec.healing.deadlines.commit: 5s is not below target.epTimeout, expected less than 4s"),
    ("  sensors: {nvml: {deadline: 100ms}}\n", "nvml.deadline: 100ms is too short, expected at least 200ms"),
    ("  sensors: {nvml: {interval: {fast: 5s}}}\n", "interval.medium: 2s is below fast, expected at least 5s"),
    ("  sensors: {nvml: {interval: {slow: 1s}}}\n", "interval.slow: 1s is below medium, expected at least 2s"),
    # sizes
    ("  bounds: {minRanks: 5}\n", "bounds.minRanks: 5 is above target.ranks, expected at most 4"),
    ("  bounds: {maxRanks: 7}\n", "bounds.maxRanks: 7 is above target.maxRanks, expected at most 6"),
    ("  bounds: {maxRanks: 3}\n", "bounds.maxRanks: 3 is below target.ranks, expected at least 4"),
    ("  bounds: {divisibility: 3}\n", "bounds.divisibility: 3 does not divide target.ranks 4"),
    ("  bounds: {redundancyFloor: 4}\n", "bounds.redundancyFloor: 4 losses leave none of 4 ranks, expected at most 3"),
    ("  bounds: {maxUnavailable: 7}\n", "bounds.maxUnavailable: 7 is above target.maxRanks"),
    ("  bounds: {minRanks: 2, budgetRankHoursPerDay: 47}\n", "budgetRankHoursPerDay: 47 does not pay for bounds.minRanks"),
    ("    epBackend: nixl-ep\n  bounds: {maxGpus: 3}\n", "bounds.maxGpus: 3 is below the 4 GPUs"),
    ("    captureSizes: [4, 16]\n", "captureSizes: 4, 16: expected ascending numbers that end in maxTokens 32"),
    ("    gpus: [0]\n", "target.gpus: needs GPUs, expected epBackend: nixl-ep instead of shm"),
    ("    epBackend: nixl-ep\n    spareGpus: [0]\n", "target.spareGpus: is for spares, of which there are none"),
    ("    slotLabels: [{slots: [0-6], labels: {a: b}}]\n", "slotLabels[0].slots[0]: 0-6 is not below maxRanks"),
    # rules
    (rule("{name: a, actions: [{hook: x}]}"), "actions[0].hook: 'x' is not in spec.hooks, expected one of: none there yet"),
    (rule("{name: a, actions: [hook]}"), "actions[0]: names no hook, expected {hook: NAME}"),
    (rule("{name: a, actions: [retry, retry]}"), "retry, retry: an action is repeated"),
    (HOOKS + rule("{name: a, actions: [{action: replace, hook: page}]}"), "names hook 'page' beside action replace"),
    (rule("{name: a, actions: [{action: human, backoff: 2s}]}"), "gives 'human' attempts or times"),
    (rules("{name: a, actions: [human]}", "{name: a, actions: [human]}"), "rules[1].name: 'a' is used twice"),
    (rule("{name: a, match: {verdict: [unknown]}, actions: [replace]}"), "answers a rank that is not known to be sick"),
    (rule("{name: a, match: {verdict: [unknown]}, actions: [retry]}"), "and retry where match.cause is [mutual-wait]"),
    (
        rule("{name: a, match: {verdict: [unknown], cause: [mutual-wait, suspected]}, actions: [retry]}"),
        "answers a rank that is not known to be sick",
    ),
    (
        rule("{name: a, match: {verdict: [unknown], cause: [mutual-wait]}, actions: [retry, replace]}"),
        "actions[1]: answers a rank that is not known to be sick",
    ),
    (rule("{name: a, match: {verdict: [healthy]}, actions: [drain]}"), "answers a rank that is not known to be sick"),
    (
        HOOKS + rule("{name: a, match: {verdict: [unhealthy, unknown]}, actions: [{hook: reset}]}"),
        "answers a rank that is not known to be sick",
    ),
    (rule("{name: a, match: {slot: [6]}, actions: [human]}"), "match.slot[0]: 6 is not below target.maxRanks"),
    (rule("{name: a, match: {xid: [150-144]}, actions: [human]}"), "xid[0]: '150-144' is not valid, expected a whole"),
    (rule("{name: a, require: {sources: 11}, actions: [human]}"), "sources: 11 is above the 10 sources"),
    (rule("{name: a, require: {sources: 4, evidence: 3}, actions: [human]}"), "4 sources give more than 3 pieces"),
    (rule("{name: a, match: {when: 'slut > 1'}, actions: [human]}"), "names slut, expected names among cause, "),
    (rule("{name: a, match: {when: 'slot + 1'}, actions: [human]}"), "'slot + 1' gives 2, expected true or false"),
    (rule("{name: a, match: {when: 'slot > cause'}, actions: [human]}"), "'slot > cause' cannot be worked out"),
    # hooks
    ("  hooks: {a: {kind: exec}}\n", "hooks.a.command: is missing, which kind exec needs"),
    ("  hooks: {a: {kind: webhook, url: pager}}\n", "hooks.a.url: 'pager' is no address"),
    ("  hooks: {a: {kind: exec, command: [x], url: 'http://a'}}\n", "hooks.a.url: is not for kind exec"),
    ("  hooks: {a: {kind: webhook, url: 'http://a', env: {B: c}}}\n", "hooks.a.env: is not for kind webhook"),
    (
        "  hooks: {a: {kind: webhook, url: 'http://a', headers: {Authorization: Bearer x}}}\n",
        "headers.Authorization: looks like a secret, expected headerFiles",
    ),
    ("  hooks: {a: {kind: exec, command: [x], env: {API_TOKEN: x}}}\n", "env.API_TOKEN: looks like a secret"),
    ("  hooks: {a: {kind: exec, command: [x], env: {B: x}, envFiles: {B: y}}}\n", "envFiles.B: is also in env"),
    # load
    (load("{name: a, kind: targetTracking, signal: x, target: 1}"), "rules[0].signal: 'x' is not in load.signals"),
    (load("{name: a, kind: threshold, when: 'x > 1', scale: up}"), "when: 'x > 1' names x, expected names among"),
    (load("{name: a, kind: threshold, when: ranks > 1.0, scale: up}"), "when: names no signal"),
    (load("{name: a, kind: threshold, when: w > 1, scale: up, step: 1, percent: 1}"), "percent: stands beside step"),
    (load("{name: a, kind: threshold, when: w < 1, scale: down, percent: 100}"), "percent: 100 leaves no rank"),
    (load("{name: a, kind: threshold, when: w > 1, for: 100ms, scale: up}"), "for: 100ms is below load.interval"),
    (load("{name: a, kind: guess}"), "rules[0].kind: 'guess' is not valid, expected one of 'targetTracking', 'thresh"),
    (load("{name: a}"), "rules[0].kind: is missing, expected one of 'targetTracking', 'threshold', 'predictive'"),
    (
        load(
            "{name: up, kind: threshold, when: w > 4, scale: up}",
            "{name: down, kind: threshold, when: w < 4, scale: down}",
        ),
        "rules[1].when: 4 is not below the 4 at which up scales up",
    ),
    (load(more="    behavior: {scaleUp: {stabilizationWindow: 500ms, policies: [{type: ranks, value: 1, period: 1s}]}}\n"),
     "stabilizationWindow: 500ms is below load.interval, expected 0s or at least 1s"),
    (load(more="    behavior: {scaleUp: {policies: [{type: ranks, value: 1, period: 2h}]}}\n"),
     "policies[0].period: 7200s is out of range"),
    ("  load: {signals: {a: {metric: x}}}\n", "signals.a.metric: 'x' is not known to the gateway, expected one of waiting"),
    ("  load: {signals: {a: {metric: ttft, url: 'http://a'}}}\n", "signals.a.url: is for source prometheus"),
    ("  load: {signals: {a: {source: prometheus, metric: x}}}\n", "signals.a.url: '' is no address"),
    (
        "  load: {signals: {a: {source: prometheus, metric: x, url: 'http://a', scope: rank}}}\n",
        "signals.a.rankLabel: is missing",
    ),
    ("  load: {signals: {a: {metric: ttft, staleAfter: 1s}}}\n", "staleAfter: 1s is too short, expected at least 2 x"),
    ("  load: {signals: {a: {metric: ttft, fallback: value}}}\n", "fallback: is missing, which mode value needs"),
    ("  load: {signals: {a: {metric: ttft, fallback: {mode: hold, value: 1}}}}\n", "fallback.value: goes with mode value"),
    ("  load: {signals: {A-b: {metric: ttft}}}\n", "signals.A-b: 'A-b' is no name that is allowed here, expected a lower"),
    # times
    ("  schedules: [{name: a, cron: x, for: 1h, bounds: {minRanks: 1}}]\n", "schedules[0].cron: 'x' has 1 fields"),
    (
        "  schedules: [{name: a, cron: 0 25 * * *, for: 1h, bounds: {minRanks: 1}}]\n",
        "schedules[0].cron: '0 25 * * *' is not a cron expression",
    ),
    (
        "  schedules: [{name: a, cron: 0 8 * * *, timezone: Mars, for: 1h, bounds: {minRanks: 1}}]\n",
        "schedules[0].timezone: 'Mars' is not a time zone",
    ),
    ("  schedules: [{name: a, cron: 0 8 * * *, bounds: {minRanks: 1}}]\n", "schedules[0]: has no end, expected either"),
    (
        "  schedules: [{name: a, cron: 0 8 * * *, for: 1h, until: 0 9 * * *, bounds: {minRanks: 1}}]\n",
        "schedules[0]: has both `for` and `until`",
    ),
    ("  schedules: [{name: a, cron: 0 8 * * *, for: 1h, bounds: {}}]\n", "schedules[0].bounds: says nothing"),
    (
        "  schedules: [{name: a, cron: 0 8 * * *, for: 1h, bounds: {minRanks: 5, maxRanks: 4}}]\n",
        "bounds.minRanks: 5 is above maxRanks, expected at most 4",
    ),
    (
        "  schedules: [{name: a, cron: 0 8 * * *, for: 1h, bounds: {maxRanks: 7}}]\n",
        "bounds.maxRanks: 7 is above the greatest size allowed, expected at most 6",
    ),
    (
        "  bounds: {minRanks: 2}\n  schedules: [{name: a, cron: 0 8 * * *, for: 1h, bounds: {maxRanks: 1}}]\n",
        "bounds.maxRanks: 1 is below spec.bounds.minRanks, expected at least 2",
    ),
    ("  bounds: {maintenance: [{name: a, cron: 0 8 * *, for: 1h}]}\n", "maintenance[0].cron: '0 8 * *' has 4 fields"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "told"), REFUSED, ids=[re.sub(r"[^\w]+", "-", told)[:60] for _, told in REFUSED])
def test_values_that_do_not_fit_each_other_are_refused_where_they_stand(more: str, told: str) -> None:
    (problem,) = problems(more)
    assert re.match(r"p\.yaml:\d+:\d+: spec\.", problem)
    assert told in problem


@pytest.mark.parametrize(
    ("when", "there"),
    [("failures >", "}, act"), ("'cause == ''x'", "'cause"), ("cause == sluts", "sluts}"), ('"failures >"', '"}, act')],
)
def test_an_error_in_a_condition_is_placed_at_its_character(when: str, there: str) -> None:
    """Where the text stands in the file as it is; otherwise at its beginning."""
    more = rule("{name: a, match: {when: " + when + "}, actions: [human]}")
    (problem,) = problems(more)
    place = re.match(r"p\.yaml:15:(\d+): spec\.healing\.rules\[0\]\.match\.when: ", problem)
    assert place, problem
    assert more.splitlines()[2][int(place[1]) - 1 :].startswith(there)


def test_an_error_in_one_rule_hides_no_error_elsewhere() -> None:
    more = rule("{name: a, actions: [reboot]}") + "  bounds: {minRanks: 9}\n  load: {signals: {a: {metric: x}}}\n"
    assert [p.split(": ")[1] for p in problems(more)] == [
        "spec.healing.rules[0].actions[0]",
        "spec.bounds.minRanks",
        "spec.load.signals.a.metric",
    ]


def test_a_retry_is_refused_where_the_target_cannot_run_a_step_again() -> None:
    target = "    kind: vllm\n    model: m\n    runDir: run\n    ranks: 2\n    maxRanks: 4\n"
    policy = POLICY[: POLICY.index("    kind: embedded")] + target + "  bounds: {minRanks: 2}\n"
    (problem,) = problems(rule("{name: a, actions: [retry, replace]}"), policy)
    assert re.match(r"p\.yaml:\d+:\d+: spec\.healing\.rules\[0\]\.actions\[0\]: retry is not for vLLM", problem)
    assert problems(rule("{name: a, actions: [replace]}"), policy) == []


def test_a_floor_of_redundancy_that_the_model_cannot_keep_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", Options(layers=1, experts=16))
    policy = POLICY.replace("checkpoint: model", f"checkpoint: {tmp_path / 'model'}")
    assert problems("  bounds: {redundancyFloor: 2}\n", policy) == []  # 2 ranks x 8 slots hold 16 experts
    (problem,) = problems("  bounds: {redundancyFloor: 3}\n", policy)
    assert problem.startswith("p.yaml:13:29: spec.bounds.redundancyFloor: 3 losses leave too few expert slots for 16")
    assert problem.endswith("expected at most 2")


WARNED = [
    ("  healing: {rules: []}\n", ["healing.rules: is empty: no fault is healed"]),
    (
        rules("{name: all, actions: [human]}", "{name: dead, match: {cause: [process-death]}, actions: [replace]}"),
        ["rules[1]: is never reached: 'all' above it matches all that it matches"],
    ),
    (
        rules(
            "{name: a, match: {xid: [10-20]}, actions: [human]}",
            "{name: b, match: {xid: [11, 13-14], slot: [1]}, actions: [human]}",
            "{name: c, actions: [human]}",
        ),
        ["rules[1]: is never reached: 'a' above it"],
    ),
    (rule("{name: a, match: {cause: [silent]}, actions: [replace]}"), ["healing.rules: have none for process-death, stopped"]),
    (HOOKS, ["hooks.page: is called by no rule", "hooks.reset: is called by no rule"]),
    (load("{name: a, kind: targetTracking, signal: w, target: 1}"), ["signals.kv: is used by no rule"]),
    ("  bounds: {minRanks: 4}\n" + rule("{name: a, actions: [replace, scale-down]}"), ["actions[1]: scale-down is not allowed"]),
    (
        "    epTimeout: 1s\n  detection: {stallAfter: 500ms, heartbeatInterval: 100ms}\n  healing: {deadlines: {commit: 500ms}}\n",
        ["target.epTimeout: 1s may mask ranks that pause honestly, expected 2s or more"],
    ),
    ("  healing: {verdictMaxAge: 5s}\n", ["healing.verdictMaxAge: is below detection.silentAfter"]),
    ("  dryRun: true\n  pause: true\n", ["spec.pause: stands beside dryRun"]),
    ("    redundantExperts: 25\n", ["target.redundantExperts: 25 are more than all ranks but one have slots for"]),
    ("    spares: 7\n", ["target.spares: 7 are more than maxRanks 6 could need"]),
    ("  bounds: {minRanks: 3, divisibility: 2}\n", ["bounds.divisibility: does not divide minRanks 3"]),
]  # fmt: skip


@pytest.mark.parametrize(("more", "told"), WARNED, ids=[re.sub(r"[^\w]+", "-", told[0])[:60] for _, told in WARNED])
def test_what_may_not_be_meant_is_a_warning_and_no_error(more: str, told: list[str]) -> None:
    found = warned(more)
    assert len(found) == len(told)
    for warning, text in zip(found, told, strict=True):
        assert re.match(r"p\.yaml:\d+:\d+: spec\.", warning)
        assert text in warning


@pytest.mark.parametrize(
    "first",
    [
        "{name: a, match: {cause: [hang]}, actions: [human]}",
        "{name: a, match: {xid: [13]}, actions: [human]}",
        "{name: a, match: {when: slot > 0}, actions: [human]}",
        "{name: a, match: {labels: {rack: a}}, actions: [human]}",
        "{name: a, match: {verdict: [unknown], cause: [suspected]}, actions: [human]}",
    ],
)
def test_a_rule_below_a_narrower_one_is_reached(first: str) -> None:
    labels = "    slotLabels: [{slots: [0], labels: {rack: a}}]\n"
    assert warned(labels + rules(first, "{name: b, actions: [human]}")) == []


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("model: m, spares: 4", []),
        ("model: m, spares: 5", ["target.spares: 5 are more than maxRanks 4 could need"]),
        (
            "mode: attach, urls: ['http://a', 'http://b', 'http://c', 'http://d'], spares: 1",
            ["target.spares: are for mode: launch"],
        ),
    ],
)
def test_spares_of_vllm_are_for_ranks_that_healer_starts(target: str, told: list[str]) -> None:
    text = f"  target: {{kind: vllm, runDir: run, ranks: 2, maxRanks: 4, {target}}}\n  bounds: {{minRanks: 2}}\n"
    found = [one for one in warned(text, POLICY[: POLICY.index("  target:")]) if "spares" in one]
    assert [one.split("spec.")[1][: len(text)] for one, text in zip(found, told, strict=True)] == told


def test_a_minimal_policy_is_without_warnings() -> None:
    assert warned("") == []


def test_a_condition_that_would_take_for_ever_is_refused_and_not_tried() -> None:
    loops = "true"
    for variable in "abcdefghij":
        loops = f"[1,2,3,4,5,6,7,8,9,10].all({variable}, {loops})"
    rule = f'  healing: {{rules: [{{name: r, match: {{when: "{loops}"}}, actions: [human]}}]}}\n'
    with pytest.raises(PolicyError, match=r"10 loops.*expected at most 2"):
        parse_policy(POLICY + rule, name="policy.yaml", base=Path("."))
