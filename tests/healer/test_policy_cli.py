"""`healer policy check` and `healer policy schema`, as processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.healer.support import POLICY

REPOSITORY = Path(__file__).parents[2]
READY = sorted(f for f in (REPOSITORY / "policies").glob("*.yaml") if "kind: Policy" in f.read_text())
QUIET_RULES = "  healing: {rules: []}\n"


def healer(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "healer.cli", "policy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)


@pytest.fixture
def doubtful(tmp_path: Path) -> str:
    """A valid policy with one warning."""
    file = tmp_path / "p.yaml"
    file.write_text(POLICY + QUIET_RULES)
    return str(file)


@pytest.mark.parametrize("file", READY, ids=lambda file: file.stem)
def test_every_ready_policy_passes_the_strict_check(file: Path) -> None:
    done = healer("check", str(file), "--strict")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"policy {file.stem} is valid" in done.stdout


def test_warnings_are_told_and_fail_only_when_strict(doubtful: str) -> None:
    done = healer("check", doubtful)
    assert done.returncode == 0
    assert done.stderr == (
        f"warning: {doubtful}:13:20: spec.healing.rules: is empty: no fault is healed, each waits for a human\n"
    )
    strict = healer("check", doubtful, "--strict")
    assert strict.returncode == 1
    assert strict.stderr.endswith(f"error: {doubtful}: 1 warnings, and --strict allows none\n")


def test_programs_get_errors_and_warnings_apart(doubtful: str, tmp_path: Path) -> None:
    report = json.loads(healer("check", doubtful, "--json").stdout)
    assert (report["ok"], report["problems"], len(report["warnings"])) == (True, [], 1)
    strict = healer("check", doubtful, "--json", "--strict")
    assert (strict.returncode, json.loads(strict.stdout)["ok"]) == (1, False)
    (tmp_path / "bad.yaml").write_text(POLICY + "  bounds: {minRanks: 9}\n")
    wrong = healer("check", str(tmp_path / "bad.yaml"), "--json")
    report = json.loads(wrong.stdout)
    assert (wrong.returncode, report["ok"], len(report["problems"]), report["warnings"]) == (1, False, 1, [])


def test_the_schema_is_printed_as_it_stands_in_the_repository() -> None:
    assert healer("schema").stdout == (REPOSITORY / "policies/schema.json").read_text()


def test_a_policy_without_conditions_and_times_imports_neither_library() -> None:
    code = "import sys; from healer.policy.load import load_policy; load_policy('policies/default.yaml'); "
    code += "print([m for m in ('cel', 'apscheduler') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.stdout == "[]\n", done.stderr
