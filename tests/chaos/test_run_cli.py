"""`healer-chaos run`, from the command line to the record that it leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import records
from chaos.invariants import suite
from chaos.machine import gpus
from chaos.records import Campaign, Fault, PhaseEvent, Request, Run, SequenceLine
from elastic.flight import StepLine, Stepped, Viewed

ROOT = Path(__file__).parents[2]
TWO = """\
apiVersion: healer-chaos/v1
kind: Scenario
metadata: {name: two-faults, fear: a rank dies and the daemon with it}
spec:
  faults:
    - {kind: kill, slots: [1], at: 500ms}
    - {kind: daemon-kill, when: {sequence: loss, step: commit}}
  probes:
    - {name: the gateway answers, mode: end, of: gateway, path: /health}
  expect: {wholeWithin: 60s}
"""


def chaos(*arguments: str, deadline_s: float = 240.0) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "chaos.cli", "run", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=deadline_s, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


@pytest.mark.slow
def test_a_daemon_killed_in_the_commit_of_a_loss_costs_nothing_and_the_record_tells_all(tmp_path: Path) -> None:
    scenario, out = tmp_path / "two.yaml", tmp_path / "out"
    scenario.write_text(TWO)
    done = chaos(str(scenario), "--out", str(out), "--restarts", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert records.read(out / records.CAMPAIGN, Campaign).runs == ("two-faults.s1",)
    folder = out / "two-faults.s1"
    run = records.read(folder / records.RUN, Run)
    assert (run.verdict, run.why, run.faults) == ("passed", "", 2)
    kill, daemon = records.lines(folder / records.FAULTS, Fault)
    assert [m.slot for m in kill.members] == [1]
    assert (daemon.state.sequence, daemon.state.step) == ("loss", "commit")
    assert daemon.at > kill.at > run.began
    assert kill.whole_at > daemon.at
    requests = list(records.lines(folder / records.REQUESTS, Request))
    assert len(requests) == run.ledger.sent > 5
    assert all(r.outcome == "right" and r.tokens_hash == r.expected_hash and r.id for r in requests)
    phases = [x for x in records.lines(folder / records.SEQUENCES, SequenceLine) if isinstance(x, PhaseEvent)]
    assert {p.daemon_pid for p in phases} > {daemon.daemon_pid}, "two daemons, and each wrote down what it did"
    assert sorted(records.step_files(folder)) == [0, 1, 2, 3]
    steps = list(records.lines(records.step_files(folder)[0], StepLine))
    views = [line for line in steps if isinstance(line, Viewed)]
    assert {(0, 2, 3), (0, 1, 2, 3)} <= {v.live for v in views}
    assert all(all(v.routed) for v in views), "every expert has a route in every view"
    assert any(isinstance(line, Stepped) and not line.committed for line in steps), "the step that the death met"
    assert suite.check(folder) == []


@pytest.mark.slow
def test_a_run_that_fails_is_reduced_to_the_fault_that_is_enough(tmp_path: Path) -> None:
    scenario, out = tmp_path / "wrong.yaml", tmp_path / "out"
    faults = "\n".join(
        f"    - {{kind: {kind}, at: {at}ms}}"
        for kind, at in (("burst, requests: 2", 100), ("kill, slots: [1]", 600), ("daemon-stop, duration: 200ms", 900))
    )
    head = TWO.partition("  faults:")[0]
    scenario.write_text(f"{head}  faults:\n{faults}\n  expect: {{kept: [1], wholeWithin: 60s}}\n")
    done = chaos(str(scenario), "--out", str(out), "--restarts", "0", deadline_s=900)
    assert done.returncode == 1, done.stdout + done.stderr
    run = records.read(out / "two-faults.s1" / records.RUN, Run)
    assert run.verdict == "failed"
    assert run.minimal == ("f2",)
    minimal = out / "two-faults.s1" / "minimal.yaml"
    assert [fault["kind"] for fault in json.loads(minimal.read_text())["spec"]["faults"]] == ["kill"]
    again = chaos(*run.minimal_command[2:], "--out", str(tmp_path / "again"), "--restarts", "0", "--no-minimise")
    assert again.returncode == 1, again.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--random"], "--random needs --hours or --faults"),
        (["x.yaml", "--random", "--faults", "3"], "either files or --random"),
        (["no-such-file.yaml"], "No such file"),
        (["--name", "nothing-has-this-name"], "no scenario has that tag and name"),
        (["--gpus"], "--gpus needs --random"),
        (["--patience", "0.5"], "greater than or equal to 1"),
    ],
)
def test_wrong_usage_ends_in_one_message_and_exit_code_2(arguments: list[str], words: str) -> None:
    done = chaos(*arguments)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_a_folder_with_other_things_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    done = chaos("--name", "killing-rank-zero", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "so it is not emptied" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.skipif(bool(gpus()), reason="it would run here")
def test_a_campaign_that_this_machine_cannot_hold_ends_at_once_and_says_why(tmp_path: Path) -> None:
    done = chaos("--random", "--gpus", "--faults", "5", "--restarts", "0", "--out", str(tmp_path / "out"))
    assert done.returncode == 0
    assert "skipped random-0001: epBackend nixl-ep needs an NVIDIA GPU, and nvidia-smi shows none" in done.stdout
