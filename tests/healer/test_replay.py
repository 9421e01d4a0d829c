"""`healer policy explain`, `replay` and `diff`: what a policy would do, and why, from files alone."""

import json
import math
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from healer.clock import SystemClock
from healer.diagnosis import Cause, Confidence, Health, Limits, Verdict
from healer.evidence import Evidence, RankRef, Severity, What
from healer.journal import Journal, Kind
from healer.policy.cli import policy_app
from healer.policy.load import load_policy
from healer.policy.recording import frames
from healer.policy.replay import Player, Replayed
from healer.trace import TRACE_VERSION, EvidenceLine, Header, LoadLine, ViewLine
from tests.healer.load_timeline import BASE

RANKS = tuple(RankRef(slot, 0) for slot in range(4))
LIMITS = Limits(stall_after_s=1.0, silent_after_s=10.0, fault_window_s=30.0)
LOAD: dict[str, Any] = {
    "cooldown": "10s",
    "signals": {"waiting": {"metric": "waiting"}},
    "rules": [{"kind": "targetTracking", "name": "queue", "signal": "waiting", "target": 4}],
    "behavior": {
        "scaleUp": {"policies": [{"type": "ranks", "value": 8, "period": "15s"}]},
        "scaleDown": {"stabilizationWindow": "60s", "policies": [{"type": "ranks", "value": 8, "period": "15s"}]},
    },
}
HEALING = {
    "rules": [
        {"name": "xid", "match": {"cause": ["xid"]}, "actions": ["human"]},
        {"name": "dead", "match": {"cause": ["process-death"]}, "actions": ["replace", "human"]},
    ]
}


def write_policy(path: Path, **spec: Any) -> Path:
    document = {"apiVersion": "healer/v1", "kind": "Policy", "metadata": {"name": path.stem}}
    target = BASE | {"ranks": 4, "maxRanks": 16}
    path.write_text(json.dumps(document | {"spec": {"target": target, "healing": HEALING} | spec}))
    return path


def load_line(at: float, waiting: float) -> LoadLine:
    return LoadLine(at=at, wall=1_780_000_000.0 + at, values={"waiting": waiting})


def dead(rank: RankRef, at: float) -> EvidenceLine:
    return EvidenceLine(
        evidence=Evidence(
            source="processes",
            seq=1,
            subject=rank,
            what=What.LIFELINE_CUT,
            value="Z",
            severity=Severity.CRITICAL,
            at=at,
            wall=at,
        )
    )


def stopped(rank: RankRef, at: float) -> list[EvidenceLine]:
    told: list[tuple[str, What, str | float]] = [
        ("processes", What.PROCESS_STATE, "T"),
        ("heartbeats", What.SILENCE, 2.0),
    ]
    return [
        EvidenceLine(
            evidence=Evidence(
                source=source, seq=seq, subject=rank, what=what, value=value, severity=Severity.WARNING, at=at, wall=at
            )
        )
        for seq, (source, what, value) in enumerate(told, 10)
    ]


def write_trace(path: Path, lines: list[msgspec.Struct]) -> Path:
    header = Header(version=TRACE_VERSION, healer="0", limits=LIMITS, view=ViewLine(at=100.0, live=RANKS))
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (header, *lines)))
    return path


def a_day(path: Path) -> Path:
    """A spike of load, and a death in the middle of it."""
    lines: list[msgspec.Struct] = []
    for second in range(300):
        at = 100.0 + second
        lines.append(load_line(at, 40.0 if 60 <= second < 120 else 15.0))
        if second == 200:
            lines.append(dead(RANKS[1], at))
        if second == 202:
            lines.append(ViewLine(at=at, live=(RANKS[0], *RANKS[2:])))
        if second == 210:
            lines.append(ViewLine(at=at, live=(RANKS[0], RankRef(1, 1), *RANKS[2:])))
    return write_trace(path, lines)


def played(policy: Path, trace: Path) -> Replayed:
    return Player(load_policy(policy), boot_s=5.0).play(frames(trace))


def test_a_replay_shows_the_size_that_the_policy_would_have_had_and_the_death_healed_once(tmp_path: Path) -> None:
    found = played(write_policy(tmp_path / "p.yaml", load=LOAD), a_day(tmp_path / "t.jsonl"))
    assert [(round(at), size) for at, size in found.sizes] == [(0, 4), (60, 10), (179, 5)]
    healing = [row for row in found.rows if row.part == "healing" and row.acts]
    assert [(row.what, row.rule, round(row.at_s)) for row in healing] == [("replace 1", "dead", 200)]
    assert found.reversals == 1
    assert found.rank_hours == pytest.approx((60 * 4 + 119 * 10 + 120 * 5) / 3600, rel=0.02)


def test_while_a_rank_is_being_healed_the_replay_changes_no_size(tmp_path: Path) -> None:
    lines: list[msgspec.Struct] = [load_line(100.0 + s, 15.0 if s < 50 else 60.0) for s in range(100)]
    lines.insert(49, dead(RANKS[2], 148.5))
    lines.insert(50, ViewLine(at=148.6, live=(*RANKS[:2], RANKS[3])))
    lines.insert(90, ViewLine(at=187.5, live=(*RANKS[:2], RankRef(2, 1), RANKS[3])))
    found = played(write_policy(tmp_path / "p.yaml", load=LOAD), write_trace(tmp_path / "t.jsonl", lines))
    grown = [at for at, size in found.sizes if size > 4]
    assert grown
    assert grown[0] > 87.0
    assert any(row.reason == "held" and "slots 2 are" in row.sentence for row in found.rows)


def test_load_that_stops_being_recorded_is_missing_and_not_zero(tmp_path: Path) -> None:
    lines: list[msgspec.Struct] = [load_line(100.0 + s, 16.0) for s in range(30)]
    lines += [load_line(900.0, 16.0)]
    found = played(write_policy(tmp_path / "p.yaml", load=LOAD), write_trace(tmp_path / "t.jsonl", lines))
    assert found.sizes == ((0.0, 4),)
    assert any(row.reason == "signal-missing" for row in found.rows)


def test_a_journal_is_replayed_like_a_trace(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db", SystemClock())
    for rank in RANKS:
        journal.add(Kind.VERDICT, {"verdict": verdict(rank, Health.HEALTHY, Cause.NONE), "entries": []})
    for second in range(3):
        journal.add(Kind.LIFECYCLE, {"event": "load", "sample": load_line(float(second), 16.0)})
    journal.add(Kind.VERDICT, {"verdict": verdict(RANKS[3], Health.UNHEALTHY, Cause.PROCESS_DEATH), "entries": []})
    journal.close()
    found = played(write_policy(tmp_path / "p.yaml", load=LOAD), tmp_path / "journal.db")
    assert [(row.what, row.rule) for row in found.rows if row.acts] == [("replace 3", "dead")]
    assert len(found.load["waiting"]) == 3


def verdict(rank: RankRef, health: Health, cause: Cause) -> Verdict:
    return Verdict(
        subject=rank,
        health=health,
        cause=cause,
        confidence=Confidence.CONCLUSIVE,
        evidence=(),
        since=0.0,
        sentence=f"{rank} is {health}",
    )


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(policy_app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, str(result.exception)
    return result.exit_code, result.output


def test_a_journal_that_lived_through_a_boot_of_the_host_goes_on_by_the_wall_clock(tmp_path: Path) -> None:
    class Clock(SystemClock):
        now, epoch = 50_000.0, 1_780_000_000.0

        def monotonic(self) -> float:
            return self.now

        def wall(self) -> float:
            return self.epoch

    clock = Clock()
    journal = Journal.open(tmp_path / "journal.db", clock)
    for monotonic, wall in ((50_000.0, 0.0), (50_010.0, 10.0), (20.0, 70.0), (30.0, 80.0)):
        clock.now, clock.epoch = monotonic, 1_780_000_000.0 + wall
        sample = LoadLine(at=monotonic, wall=clock.epoch, values={"waiting": 1.0})
        journal.add(Kind.LIFECYCLE, {"event": "load", "sample": sample})
    journal.close()
    assert [round(frame.at) for frame in frames(tmp_path / "journal.db")] == [50_000, 50_010, 50_070, 50_080]


def test_a_replay_tells_that_the_last_line_was_cut_off(tmp_path: Path) -> None:
    trace = a_day(tmp_path / "t.jsonl")
    trace.write_bytes(trace.read_bytes()[:-9])
    found = Player(load_policy(write_policy(tmp_path / "p.yaml", load=LOAD))).play(frames(trace))
    assert any("the last line was cut off" in note for note in found.notes)


def test_a_replay_goes_on_along_the_ladder_where_a_rank_was_only_given_time(tmp_path: Path) -> None:
    rules = [{"name": "hang", "actions": [{"action": "retry", "maxAttempts": 1, "backoff": "2s"}, "replace"]}]
    policy = write_policy(tmp_path / "p.yaml", healing={"rules": rules})

    def silent(seq: int, at: float, seconds: float) -> EvidenceLine:
        told: list[tuple[str, What, str | float]] = [
            ("processes", What.PROCESS_STATE, "T"),
            ("heartbeats", What.SILENCE, seconds),
        ]
        source, what, value = told[seq % 2]
        found = Evidence(
            source=source, seq=seq, subject=RANKS[1], what=what, value=value, severity=Severity.WARNING, at=at, wall=at
        )
        return EvidenceLine(evidence=found)

    lines: list[msgspec.Struct] = [silent(1, 102.0, 2.0), silent(2, 102.1, 0.0), silent(3, 106.0, 6.0)]
    found = played(policy, write_trace(tmp_path / "t.jsonl", lines))
    assert [row.what for row in found.rows if row.acts] == ["retry 1", "replace 1"]


def test_a_recording_that_was_silent_for_years_is_replayed_in_time(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [load_line(100.0, 4.0), load_line(1e8, 4.0)])
    began = time.monotonic()
    found = Player(load_policy(write_policy(tmp_path / "p.yaml", load=LOAD))).play(frames(trace))
    assert found.span_s > 9e7
    assert time.monotonic() - began < 30


def test_diff_shows_only_what_the_new_policy_does_otherwise(tmp_path: Path) -> None:
    trace, old = a_day(tmp_path / "t.jsonl"), write_policy(tmp_path / "old.yaml", load=LOAD)
    new = write_policy(tmp_path / "new.yaml", load=LOAD, bounds={"maxRanks": 6})
    code, same = run("diff", old, old, "--trace", trace)
    assert code == 0
    assert "would have done the same" in same
    assert "would have done and said the same" in run("diff", old, old, "--trace", trace, "--all")[1]
    code, text = run("diff", old, new, "--trace", trace, "--json")
    assert code == 0
    found = json.loads(text)
    assert {(d["only"], d["row"]["what"]) for d in found["differences"] if d["row"]["acts"]} == {
        ("old", "4 -> 10"),
        ("new", "4 -> 6"),
        ("old", "10 -> 5"),
        ("new", "6 -> 5"),
    }
    assert not [d for d in found["differences"] if d["row"]["part"] == "healing"]
    assert found["new"]["rank_hours"] < found["old"]["rank_hours"]


def test_replay_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    policy, trace = write_policy(tmp_path / "p.yaml", load=LOAD), a_day(tmp_path / "t.jsonl")
    code, text = run("replay", trace, "--policy", policy, "--plot", tmp_path / "out.svg")
    assert code == 0
    assert "4 -> 10" in text
    assert "waiting per rank 10 over target 4" in " ".join(text.split())
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_explain_says_which_rule_answers_and_why_the_others_do_not(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "p.yaml", load=LOAD)
    code, text = run("explain", policy, "--event", "cause=process-death,slot=1", "--json")
    assert code == 0
    told = json.loads(text)
    assert [(one["rule"], one["outcome"]) for one in told["rules"]] == [("xid", "no-match"), ("dead", "matched")]
    assert told["rules"][0]["because"] == [{"key": "match.cause", "wanted": "xid", "found": "process-death"}]
    assert told["ladder"] == ["replace", "human"]
    code, text = run("explain", policy, "--event", "waiting=40,ranks=4")
    assert code == 0
    assert "scales 4 -> 10: waiting per rank 10 over target 4" in text


@pytest.mark.parametrize(
    ("event", "part"),
    [
        ("cause=boredom", "expected one of"),
        ("colour=red", "unknown key"),
        ("cause", "expected key=value"),
        ("slot=one", "expected a number"),
        ("waiting=many", "expected a number"),
        ("waiting=4,ranks=0", "at least 1"),
        ("waiting=4,cause=hang", "waiting is about load and cause about a rank"),
        ("waiting=4,for=-1", "expected a duration such as 90s"),
        ("waiting=4,for=nan", "expected a duration such as 90s"),
        ("waiting=4,wall=soon", "expected a time such as 2026-01-31T23:00+01:00"),
        ("waiting=4,wall=0001-01-01T00:00", "expected a time such as"),
        ("waiting=4,wall=99999999999999", "expected a time such as"),
        ("slot=16", "slot=16 is not valid, expected at most 15"),
        (" ", "is empty"),
    ],
)
def test_a_wrong_event_says_what_was_expected(tmp_path: Path, event: str, part: str) -> None:
    code, text = run("explain", write_policy(tmp_path / "p.yaml", load=LOAD), "--event", event)
    assert code != 0
    assert part in text


def test_a_load_event_on_a_policy_without_load_rules_is_told_so(tmp_path: Path) -> None:
    for event in ("waiting=40,ranks=4", "ranks=4", "ttft=2"):
        code, text = run("explain", write_policy(tmp_path / "p.yaml"), "--event", event)
        assert code != 0
        assert f"{event.split('=')[0]} is about load, and the policy has neither load rules nor schedules" in text or (
            "ranks is about load, and the policy has neither" in text
        )


def test_signals_that_the_event_leaves_out_are_named_as_missing(tmp_path: Path) -> None:
    signals = {"waiting": {"metric": "waiting"}, "ttft": {"metric": "ttft"}}
    policy = write_policy(tmp_path / "p.yaml", load=LOAD | {"signals": signals})
    code, text = run("explain", policy, "--event", "waiting=40")
    assert code == 0
    assert "missing, since the event gives no value: ttft (a number, or ttft=idle)" in text
    assert "missing" not in run("explain", policy, "--event", "waiting=40,ttft=idle")[1]


def test_a_hook_beside_a_rank_does_not_end_its_healing_in_a_replay(tmp_path: Path) -> None:
    hooks = {"page": {"kind": "webhook", "url": "https://pager.example/"}}
    suspect = {"name": "suspect", "match": {"verdict": ["unknown"]}, "actions": [{"hook": "page", "maxAttempts": 1}]}
    rules = [suspect, {"name": "dead", "match": {"cause": ["process-death"]}, "actions": ["replace"]}]
    policy = write_policy(tmp_path / "p.yaml", hooks=hooks, healing={"rules": rules})
    found = played(policy, write_trace(tmp_path / "t.jsonl", [dead(RANKS[1], 105.0)]))
    assert [row.what for row in found.rows if row.acts] == ["hook 0, 1, 2, 3", "replace 1"]


def test_a_replay_tells_of_the_reset_and_of_the_rank_that_is_started_after_it(tmp_path: Path) -> None:
    hooks = {"reset": {"kind": "reset", "command": ["/bin/true"]}}
    rules = [{"name": "lost", "match": {"xid": [79]}, "actions": [{"hook": "reset"}, "human"]}]
    policy = write_policy(tmp_path / "p.yaml", hooks=hooks, healing={"rules": rules})
    found = played(policy, Path(__file__).parent / "traces/xid-79-cascade.jsonl")
    assert [row.what for row in found.rows if row.acts] == ["drain 1", "hook 1", "refill 1"]


def test_a_replay_opens_the_breaker_where_the_daemon_would(tmp_path: Path) -> None:
    """Of two hung ranks one is replaced, and the death after it all the same."""
    rules: list[dict[str, Any]] = [{"name": "hang", "match": {"cause": ["stopped"]}, "actions": ["replace"]}]
    rules += [{"name": "dead", "match": {"cause": ["process-death"]}, "actions": ["replace"]}]
    bounds = {"breaker": {"maxDestructive": 1, "window": "5m"}, "minRanks": 1}
    policy = write_policy(tmp_path / "p.yaml", healing={"rules": rules}, bounds=bounds)
    lines: list[msgspec.Struct] = [*stopped(RANKS[1], 102.0), *stopped(RANKS[2], 104.0), dead(RANKS[3], 106.0)]
    found = played(policy, write_trace(tmp_path / "t.jsonl", lines))
    assert [row.what for row in found.rows if row.acts] == ["replace 1", "replace 3"]
    assert "breaker-open" in {row.reason for row in found.rows}


def test_a_replay_shows_when_a_human_would_have_been_called_and_what_a_dry_run_would_have_done(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [dead(RANKS[1], 105.0)])
    nobody = {"rules": [{"name": "xid", "match": {"cause": ["xid"]}, "actions": ["replace"]}]}
    code, text = run("replay", trace, "--policy", write_policy(tmp_path / "p.yaml", healing=nobody))
    assert code == 0
    assert "human 1" in text
    assert "0 actions in 35 s, 1 call for a human" in text
    code, text = run("replay", trace, "--policy", write_policy(tmp_path / "d.yaml", dryRun=True))
    assert "did nothing, dry run; without it: replaces slot 1" in " ".join(text.split())


def test_explain_takes_a_hang_for_what_a_hang_rests_on_and_says_what_it_took(tmp_path: Path) -> None:
    hooks = {"page": {"kind": "webhook", "url": "https://pager.example/"}}
    rules: list[dict[str, Any]] = [{"name": "sure", "match": {"confidence": ["conclusive"]}, "actions": ["replace"]}]
    rules += [{"name": "rest", "actions": [{"hook": "page"}, "human"]}]
    policy = write_policy(tmp_path / "p.yaml", hooks=hooks, healing={"rules": rules})
    code, text = run("explain", policy, "--event", "cause=hang,slot=1")
    assert code == 0
    assert "match.confidence: wants conclusive, found quorum" in " ".join(text.split())
    assert "taken to be: verdict=unhealthy, confidence=quorum" in text
    assert "actions: hook page, human" in text
    told = json.loads(run("explain", policy, "--event", "cause=process-death,slot=1", "--json")[1])
    assert told["ladder"] == ["replace"]
    assert "slot" not in told["assumed"]


def test_explain_knows_the_night_and_how_long_a_rule_must_hold(tmp_path: Path) -> None:
    night = {"name": "night", "cron": "0 22 * * *", "until": "0 6 * * *", "timezone": "Europe/Berlin"}
    schedules = [night | {"bounds": {"maxRanks": 4}}]
    policy = write_policy(tmp_path / "p.yaml", load=LOAD, schedules=schedules)
    code, text = run("explain", policy, "--event", "waiting=40,ranks=4,for=90s,wall=2026-01-15T23:00+01:00")
    assert code == 0
    assert "at the bound of schedule night" in " ".join(text.split())
    for noon in ("2026-01-15T11:00", "1768474800"):
        assert "scales 4 -> 10" in run("explain", policy, "--event", f"waiting=40,ranks=4,for=90,wall={noon}")[1]


def test_of_a_healthy_rank_no_human_is_asked(tmp_path: Path) -> None:
    code, text = run("explain", write_policy(tmp_path / "p.yaml"), "--event", "verdict=healthy,cause=straggler")
    assert code == 0
    assert "no rule matches: nothing is done, since the rank is not unhealthy" in text


@pytest.mark.parametrize("content", [b"", b"hello\n", b'{"line":"header"}\n'])
def test_a_file_that_is_no_recording_is_named_with_its_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.jsonl").write_bytes(content)
    code, text = run("replay", tmp_path / "t.jsonl", "--policy", write_policy(tmp_path / "p.yaml"))
    assert code != 0
    assert "t.jsonl:1: " in text


def test_a_forecast_in_a_replay_needs_two_seasons_and_then_grows_ahead_of_the_peak(tmp_path: Path) -> None:
    rules = [*LOAD["rules"], {"kind": "predictive", "name": "day", "signal": "waiting", "target": 4, "season": "960s"}]
    rules[1]["horizon"] = "60s"
    lines: list[msgspec.Struct] = [
        load_line(100.0 + s, 20 + 16 * math.sin(2 * math.pi * s / 960)) for s in range(0, 3000, 5)
    ]
    trace = write_trace(tmp_path / "t.jsonl", lines)
    plain = played(write_policy(tmp_path / "plain.yaml", load=LOAD), trace)
    ahead = played(write_policy(tmp_path / "ahead.yaml", load=LOAD | {"rules": rules}), trace)

    def grown(found: Replayed) -> float:
        """When eight ranks were asked for, in the third season."""
        return next(at for at, size in found.sizes if at > 1930 and size >= 8)

    assert grown(ahead) < grown(plain) - 10
    assert [s for s in ahead.sizes if s[0] < 1900] == [s for s in plain.sizes if s[0] < 1900]


@pytest.mark.parametrize(
    "trace", sorted((Path(__file__).parent / "traces").glob("*.jsonl")), ids=lambda file: file.stem
)
def test_the_default_policy_can_be_tried_on_every_recorded_scenario(trace: Path) -> None:
    policy = load_policy(Path(__file__).parents[2] / "policies" / "default.yaml")
    found = Player(policy).play(frames(trace))
    assert found.rows
    acted = [row.what for row in found.rows if row.acts]
    # a step may be run again as often as the policy's cap says, everything else once
    assert all(acted.count(what) <= 3 for what in acted if what.startswith("retry"))
    others = [what for what in acted if not what.startswith("retry")]
    assert len(others) == len(set(others)), "the same was done twice"
