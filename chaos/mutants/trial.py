"""One scenario on one copy of the code, and who noticed.

The copy runs the group, the daemon and the scenario; what it wrote down is checked by the code as it is, so a mutant cannot blind
those who look for it.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

import msgspec

from chaos import records
from chaos.invariants import Violation, check
from chaos.mutants.catalogue import Mutant, copy_code
from chaos.records import Run
from elastic.errors import ElasticError

SEED = 1
LIMIT_S = 480.0
"""For a copy to form a group, run its scenario and end: ten times what a sound one takes on two cores."""
ENDING_S = 30.0


class Outcome(StrEnum):
    CAUGHT = "caught"
    OTHERWISE = "caught otherwise"
    """The run failed, but none of those who should have seen it did."""
    SURVIVED = "survived"
    BROKEN = "broken"
    """No verdict: the scenario could not be carried out. That proves nothing."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Of one mutant, or of the code as it is."""

    name: str
    """Of the mutant; empty: none."""
    scenario: str
    outcome: Outcome
    verdict: str
    """Of the run."""
    found: tuple[str, ...]
    """Who noticed: ``invariant 4``, and names of expectations that were not met; each once."""
    first: str
    """Of what was found: one in words; of a broken trial, why."""


def attempt(mutant: Mutant, out: Path, patience: float) -> Trial:
    """Run the scenario of `mutant` with it. The record is written to `out`. Raises ElasticError where it does not apply."""
    run, violations, why = _play(mutant, mutant.scenario_file, out, patience)
    if run is None or run.verdict not in ("passed", "failed"):
        return _trial(mutant.name, mutant.scenario, Outcome.BROKEN, run, (), why or (run.why if run else ""))
    found = _found(run, violations)
    outcome = Outcome.SURVIVED if not found else Outcome.CAUGHT if found & {*mutant.caught_by} else Outcome.OTHERWISE
    return _trial(mutant.name, mutant.scenario, outcome, run, found, _first(mutant.caught_by, violations, run))


def control(mutant: Mutant, out: Path, patience: float) -> Trial:
    """The same scenario on a copy without the mutant: `Outcome.SURVIVED` is what should come."""
    run, violations, why = _play(None, mutant.scenario_file, out, patience)
    if run is None or run.verdict not in ("passed", "failed"):
        return _trial("", mutant.scenario, Outcome.BROKEN, run, (), why or (run.why if run else ""))
    found = _found(run, violations)
    return _trial(
        "", mutant.scenario, Outcome.OTHERWISE if found else Outcome.SURVIVED, run, found, _first((), violations, run)
    )


def _trial(name: str, scenario: str, outcome: Outcome, run: Run | None, found: Collection[str], first: str) -> Trial:
    verdict = run.verdict if run else "none"
    return Trial(
        name=name, scenario=scenario, outcome=outcome, verdict=verdict, found=tuple(sorted(found)), first=first
    )


def _found(run: Run, violations: Collection[Violation]) -> set[str]:
    missed = {expectation.name for expectation in run.expectations if not expectation.ok} - {"invariants"}
    return missed | {f"invariant {violation.invariant}" for violation in violations}


def _first(wanted: Collection[str], violations: Collection[Violation], run: Run) -> str:
    by_rank = sorted(violations, key=lambda violation: f"invariant {violation.invariant}" not in wanted)
    return str(by_rank[0]) if by_rank else run.why


def environment(code: Path) -> dict[str, str]:
    """Of processes that run the copy in the folder `code`: PYTHONPATH comes before what is installed."""
    return os.environ | {"PYTHONPATH": str(code), "PYTHONDONTWRITEBYTECODE": "1"}


def _play(mutant: Mutant | None, scenario: Path, out: Path, patience: float) -> tuple[Run | None, list[Violation], str]:
    """The head of the record, what the checkers say of it, and where there is none why."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        code = Path(folder)
        copy_code(code, mutant)
        command = [sys.executable, "-m", "chaos.cli", "run", str(scenario), "--out", str(out.resolve())]
        command += ["--seed", str(SEED), "--restarts", "0", "--no-minimise", "--patience", str(patience), "--json"]
        with subprocess.Popen(
            command,
            cwd=code,
            env=environment(code),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as child:
            try:
                _, errors = child.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                return None, [], f"no end within {LIMIT_S:g} s{_end(child)}"
            except BaseException:
                _end(child)
                raise
    made = [path.parent for path in out.glob(f"*/{records.RUN}")]
    if not made:
        return None, [], f"no record: {errors.strip()[-300:] or f'exit code {child.returncode}'}"
    try:
        return records.read(made[0] / records.RUN, Run), check(made[0]), ""
    except ElasticError as error:
        return None, [], str(error)


def _end(child: "subprocess.Popen[str]") -> str:
    """It ends all that it started; empty, or what to look for where it does not."""
    child.send_signal(signal.SIGTERM)
    try:
        child.communicate(timeout=ENDING_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return "; its group may still run"
    return ""
