"""Mutants that do not apply to the code any more prove nothing; whether they are caught takes a run of each."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.mutants import catalogue, trial
from chaos.mutants.catalogue import Edit, Mutant
from chaos.mutants.trial import Outcome
from chaos.scenario_file import load
from elastic.errors import ElasticError

MUTANTS = catalogue.read()
INVARIANTS = {f"invariant {number}" for number in range(1, 11)}
EXPECTATIONS = {"requests", "whole-within", "live", "replaced", "kept", "no-action", "daemon", "causes", "gap"}


def test_there_are_at_least_fifteen() -> None:
    assert len(MUTANTS) >= 15


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_has_not_gone_stale(mutant: Mutant) -> None:
    for file, text in catalogue.mutated(mutant).items():
        ast.parse(text, file)
        assert text != (catalogue.ROOT / file).read_text()
    assert load(mutant.scenario_file).scenario.name == mutant.scenario
    assert mutant.caught_by
    assert set(mutant.caught_by) <= INVARIANTS | EXPECTATIONS


def stale(tmp_path: Path, text: str) -> Mutant:
    (tmp_path / "a.py").write_text(text)
    edit = Edit(file="a.py", old="x = 1", new="x = 2")
    return Mutant(name="m", fear="f", scenario="s", caught_by=("requests",), edits=(edit,))


@pytest.mark.parametrize("text", ["y = 1\n", "x = 1\nx = 1\n"], ids=["gone", "twice"])
def test_a_mutant_whose_old_text_is_not_there_once_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        ElasticError, match=r"mutant m: a\.py: the old text, which begins with 'x = 1', is there \d times"
    ):
        catalogue.mutated(stale(tmp_path, text), tmp_path)


def test_what_runs_is_the_copy_and_not_what_is_installed(tmp_path: Path) -> None:
    mutant = MUTANTS[0]
    catalogue.copy_code(tmp_path, mutant)
    where = "import elastic.rank as one, healer as two; print(one.__file__); print(two.__file__)"
    told = subprocess.run(
        [sys.executable, "-c", where],
        cwd=tmp_path,
        env=trial.environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert [Path(line).is_relative_to(tmp_path) for line in told.stdout.splitlines()] == [True, True]
    edit = mutant.edits[0]
    assert edit.new in (tmp_path / edit.file).read_text()
    assert edit.old in (catalogue.ROOT / edit.file).read_text()


def test_an_unknown_mutant_is_refused_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chaos.mutants", "--only", "none-such"],
        capture_output=True,
        text=True,
        cwd=catalogue.ROOT,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "chaos.mutants: no mutant is named none-such; --list says which there are\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught_by_its_scenario(mutant: Mutant, tmp_path: Path) -> None:
    found = trial.attempt(mutant, tmp_path / "runs", patience=2.0)
    assert found.outcome is Outcome.CAUGHT, found


@pytest.mark.slow
@pytest.mark.parametrize("scenario", sorted({mutant.scenario for mutant in MUTANTS}))
def test_the_code_as_it_is_passes_the_scenario_of_its_mutants(scenario: str, tmp_path: Path) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.scenario == scenario)
    found = trial.control(mutant, tmp_path / "runs", patience=2.0)
    assert found.outcome is Outcome.SURVIVED, found
