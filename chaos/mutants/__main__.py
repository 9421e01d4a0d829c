"""`python -m chaos.mutants [--only NAME]... [--out DIR]`: every mutant with the scenario that must catch it.

Exit code 0: the code as it is passed each scenario, and each mutant was caught by what it was to be caught by. 1: not so. 2: wrong
usage, or a mutant that does not apply any more.
"""

import argparse
import signal
import sys
from pathlib import Path

import msgspec

from chaos.mutants.catalogue import Mutant, mutated, read
from chaos.mutants.trial import Outcome, Trial, attempt, control
from elastic.errors import ElasticError

WRONG = 2


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m chaos.mutants", description="Prove that the checkers of runs see faults."
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one mutant; may be given again")
    parser.add_argument("--out", type=Path, default=Path("chaos-runs/mutants"), help="folder for the records")
    parser.add_argument("--no-control", action="store_true", help="leave out the runs of the code as it is")
    parser.add_argument("--patience", type=float, default=2.0, help="times longer than a scenario says; 2")
    parser.add_argument("--list", action="store_true", help="say which there are, and run none")
    given = parser.parse_args()
    # whoever ends this ends the group that a trial has started
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        mutants = _chosen(read(), given.only)
        for mutant in mutants:
            mutated(mutant)
        if given.list:
            for mutant in mutants:
                print(f"{mutant.name:45} {mutant.fear}")
            return 0
        trials = _run(mutants, given.out, given.patience, controls=not given.no_control)
    except ElasticError as error:
        print(f"chaos.mutants: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return 130
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "mutants.json").write_bytes(msgspec.json.format(msgspec.json.encode(trials)) + b"\n")
    bad = [trial for trial in trials if not _as_wanted(trial)]
    caught = sum(trial.outcome is Outcome.CAUGHT for trial in trials if trial.name)
    print(f"{caught} of {len(mutants)} mutants caught; {len(bad)} trials were not as they should be")
    return 1 if bad else 0


def _chosen(mutants: tuple[Mutant, ...], names: list[str]) -> list[Mutant]:
    if unknown := sorted({*names} - {mutant.name for mutant in mutants}):
        raise ElasticError(f"no mutant is named {unknown[0]}; --list says which there are")
    return [mutant for mutant in mutants if not names or mutant.name in names]


def _run(mutants: list[Mutant], out: Path, patience: float, *, controls: bool) -> list[Trial]:
    trials: list[Trial] = []
    sound: set[str] = set()
    for mutant in mutants:
        if controls and mutant.scenario not in sound:
            sound.add(mutant.scenario)
            trials.append(control(mutant, out / f"control-{mutant.scenario}", patience))
            _tell(trials[-1])
        trials.append(attempt(mutant, out / mutant.name, patience))
        _tell(trials[-1])
    return trials


def _as_wanted(trial: Trial) -> bool:
    return trial.outcome is (Outcome.CAUGHT if trial.name else Outcome.SURVIVED)


def _tell(trial: Trial) -> None:
    said = str(trial.outcome) if trial.name else "passed" if _as_wanted(trial) else f"not passed ({trial.verdict})"
    print(f"{said:16} {trial.name or f'as it is: {trial.scenario}'}", flush=True)
    if trial.found or trial.first:
        print(f"{'':16} {', '.join(trial.found)}{': ' if trial.found else ''}{trial.first}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
