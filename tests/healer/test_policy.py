import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.config import ModelShape
from healer.policy.load import PolicyError, load_policy, parse_policy
from healer.policy.schema import Policy
from healer.policy.schema.target import Target
from tests.healer.support import POLICY

REPOSITORY = Path(__file__).parents[2]


def parse(text: str) -> Policy:
    return parse_policy(text, name="p.yaml", base=Path("/base"))


def refused(text: str) -> tuple[str, ...]:
    try:
        parse(text)
    except PolicyError as error:
        return error.problems
    return ()


def problems(text: str) -> list[str]:
    return list(refused(text))


@pytest.mark.parametrize("name", ["default", "autoscale", "latency-slo", "spot", "observe-only"])
def test_the_ready_policies_are_valid(name: str) -> None:
    policy = load_policy(REPOSITORY / "policies" / f"{name}.yaml")
    assert policy.metadata.name == name
    assert policy.spec.healing.rules


def test_relative_paths_are_taken_from_the_policy_file() -> None:
    target = parse(POLICY).spec.target
    assert isinstance(target, Target)
    assert (target.checkpoint, target.run_dir) == ("/base/model", "/base/run")


def test_the_group_configuration_is_what_the_policy_says_and_passes_its_own_checks() -> None:
    text = POLICY + "    redundantExperts: 4\n    maxTokens: 24\n    epTimeout: 20s\n    gateway: {port: 8001}\n"
    text += "  detection: {heartbeatInterval: 50ms}\n  healing: {deadlines: {prepare: 2m, commit: 1.5s}}\n"
    group = parse(text).group()
    group.validate(ModelShape(experts=16, moe_layers=2, hidden=8, vocab=64, max_position=256))
    assert (group.name, group.ranks, group.max_ranks, group.redundant_experts) == ("test", 4, 6, 4)
    assert (group.heartbeat_s, group.ep_timeout_s) == (0.05, 20.0)
    assert (group.prepare_deadline_s, group.commit_deadline_s) == (120.0, 1.5)
    assert (group.gateway_port, group.capture_sizes) == (8001, (4, 8, 16, 24))


def test_an_unknown_key_is_refused_at_its_place_with_the_key_that_was_meant() -> None:
    (problem,) = problems(POLICY + "  dryrun: true\n")
    assert problem == (
        "p.yaml:13:3: spec.dryrun: unknown key (did you mean dryRun?), "
        "expected one of target, api, detection, sensors, healing, hooks, load, schedules, bounds, lease, journal, notifications, dryRun, pause"
    )


def test_all_errors_are_reported_at_once_and_in_order() -> None:
    text = POLICY.replace("ranks: 4", "ranks: four").replace("slotsPerRank: 8", "slotsPerRank: -8")
    text += "    hostTier: 1\n  api: {host: 0.0.0.0, port: 70000}\n  detection: {stallAfter: 2}\n"
    assert problems(text) == [
        "p.yaml:10:12: spec.target.ranks: 'four' is not valid, expected a whole number",
        "p.yaml:12:19: spec.target.slotsPerRank: -8 is not valid, expected at least 1",
        "p.yaml:13:15: spec.target.hostTier: 1 is not valid, expected true or false",
        "p.yaml:14:15: spec.api.host: '0.0.0.0' is not loopback, expected api.tokenFile beside it, "
        "or 127.0.0.1, ::1 or localhost",
        "p.yaml:14:30: spec.api.port: 70000 is not valid, expected at most 65535",
        "p.yaml:15:27: spec.detection.stallAfter: 2 is not a duration, "
        'expected a positive number with a unit, such as "100ms" or "2s"',
    ]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (
            "  detection: {heartbeatInterval: 300ms}\n",
            "p.yaml:13:3: spec.detection.stallAfter: 1s is too short, expected at least 5 x heartbeatInterval = 1.5s",
        ),
        (
            "  detection: {stallAfter: 400ms}\n",
            "p.yaml:13:27: spec.detection.stallAfter: 400ms is too short, expected at least 5 x heartbeatInterval = 1s",
        ),
        (
            "  detection: {silentAfter: 1500ms}\n",
            "p.yaml:13:28: spec.detection.silentAfter: 1.5s is too short, expected at least 2 x stallAfter = 2s",
        ),
        (
            "  healing:\n    deadlines:\n      commit: 40s\n",
            "p.yaml:15:15: spec.healing.deadlines.commit: 40s is not below target.epTimeout, expected less than 30s",
        ),
        (
            "  bounds: {minRanks: 5}\n",
            "p.yaml:13:22: spec.bounds.minRanks: 5 is above target.ranks, expected at most 4",
        ),
        (
            "  api: {port: 8000}\n",
            "p.yaml:13:15: spec.api.port: 8000 is also target.gateway.port, expected another",
        ),
        (
            "  healing: {rules: [{name: a, actions: [human, replace]}]}\n",
            "p.yaml:13:40: spec.healing.rules[0].actions: human, replace: nothing follows 'human', expected it last",
        ),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(more: str, problem: str) -> None:
    assert problems(POLICY + more) == [problem]


def test_more_ranks_than_slots_are_refused_once() -> None:
    (problem,) = problems(POLICY.replace("maxRanks: 6", "maxRanks: 3"))
    assert problem == "p.yaml:10:12: spec.target.ranks: 4 is above maxRanks, expected at most 3"


def test_a_run_directory_too_deep_for_sockets_is_refused() -> None:
    (problem,) = problems(POLICY.replace("runDir: run", f"runDir: {'r' * 80}"))
    assert problem.startswith("p.yaml:9:13: spec.target.runDir: /base/rrr")
    assert "at most 70" in problem


def test_a_network_address_with_a_token_is_accepted() -> None:
    api = parse(POLICY + "  api: {host: 0.0.0.0, tokenFile: token}\n").spec.api
    assert (api.host, api.token_file) == ("0.0.0.0", "/base/token")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "p.yaml:1:1: is nothing, expected a mapping with apiVersion: healer/v1"),
        ("- 1\n", "p.yaml:1:1: is a list, expected a mapping with apiVersion: healer/v1"),
        ("a: [1\nb: 2", "p.yaml:2:2: not valid YAML: expected ',' or ']', but got ':'"),
        ("a: 1\na: 2\n", 'p.yaml:2:1: not valid YAML: found duplicate key "a" with value "2" (original value: "1")'),
        ("a: 2026-13-41\n", "p.yaml:1:4: not valid YAML: '2026-13-41': month must be in 1..12"),
        ("a: " + "9" * 5000, f"p.yaml:1:4: not valid YAML: '{'9' * 37}'... is a number of 5000 digits, expected fewer"),
        ("a:\n  [b, c]: d\n", "p.yaml:2:3: not valid YAML: a key is a list or a mapping, expected a word"),
        ("a:\n  ? {b: c}\n  : d\n", "p.yaml:2:5: not valid YAML: a key is a list or a mapping, expected a word"),
        (
            "---\na: 1\n---\nb: 2\n",
            "p.yaml:3:1: not valid YAML: expected a single document in the stream, but found another document",
        ),
    ],
)
def test_what_is_no_policy_is_refused_with_its_place(text: str, problem: str) -> None:
    assert problems(text) == [problem]


def test_files_that_cannot_be_read_are_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, text in (("none", "no such file"), ("binary", "not UTF-8"), (".", "directory")):
        with pytest.raises(PolicyError, match=text) as caught:
            load_policy(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("part", ["[", "{", "- ", "? ", "a, ", "[a, ", "- b\n", "&a [*a, "])
def test_a_large_file_that_is_no_policy_is_refused_quickly(part: str) -> None:
    began = time.process_time()
    told = problems(f"x: [{part * (100_000 // len(part))}" if part == "a, " else part * (100_000 // len(part)))
    assert len(told) == 1
    assert re.match(r"p\.yaml:\d+:\d+: .*expected", told[0])
    assert time.process_time() - began < 3.0


def test_a_date_and_a_long_number_are_told_as_what_they_are() -> None:
    dated = problems(POLICY.replace("name: test", "name: 2026-01-01"))
    assert dated == [
        "p.yaml:4:9: metadata.name: the date 2026-01-01 (with quotes it is a string) is not valid, expected a string"
    ]
    long = problems(POLICY.replace("ranks: 4", "ranks: " + "9" * 4000))
    assert all(len(problem) < 300 for problem in long)
    assert "(4000 characters)" in long[0]


def test_a_file_that_unfolds_without_end_is_refused() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    assert any("too large" in p for p in problems(bomb))


_KEYS = st.sampled_from(["spec", "target", "ranks", "kind", "api", "rules", "5", "~", "x"])
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 99), st.sampled_from(["2s", "-1s", "x", "healer/v1", ""])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=3)),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(_KEYS, _VALUES, max_size=4), st.integers(0, len(POLICY)), st.text(max_size=4))
def test_no_file_ends_in_a_traceback(data: dict[str, object], cut: int, junk: str) -> None:
    for text in (json.dumps(data), POLICY[:cut] + junk + POLICY[cut:], POLICY + f"  healing: {json.dumps(data)}\n"):
        assert all(p.startswith("p.yaml:") for p in refused(text))
