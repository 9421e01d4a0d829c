"""`healer-chaos run`: scenarios, or random faults for hours, on groups that it starts itself on this machine.

Exit codes: 0 everything was as expected (what this machine cannot do was skipped, and is named); 1 something was not; 2 wrong
usage, or a scenario file with errors; 130 after Ctrl-C.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from elastic.errors import ElasticError

FAILED, WRONG = 1, 2
MAX_TEMP = 45


def run(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Scenario files and folders; those that come with healer where none is named."),
    ] = None,
    subset: Annotated[str, typer.Option(help="Only scenarios with this tag, such as ci.")] = "",
    name: Annotated[str, typer.Option(help="Only scenarios with this text in their name.")] = "",
    random: Annotated[bool, typer.Option("--random", help="Random faults instead of scenarios.")] = False,
    hours: Annotated[float, typer.Option(min=0.0, help="Of --random; 0: until --faults are done.")] = 0.0,
    faults: Annotated[int, typer.Option(min=0, help="Of --random; 0: until --hours are over.")] = 0,
    gpus: Annotated[bool, typer.Option("--gpus", help="Of --random: on the NVIDIA GPUs of this machine.")] = False,
    honest: Annotated[
        bool,
        typer.Option(
            "--honest", help="Of --random: load, pauses and outages that are no faults; nobody may be removed."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the records; it is emptied first.")] = Path("chaos-runs/last"),
    patience: Annotated[
        float | None,
        typer.Option(min=1.0, help="Times longer than a scenario says; by default from the load of the machine."),
    ] = None,
    minimise: Annotated[bool, typer.Option(help="Find the least list of faults that still fails.")] = True,
    restarts: Annotated[
        int, typer.Option(min=0, help="How often a restart of the whole group is measured, for comparison.")
    ] = 1,
    check: Annotated[bool, typer.Option("--check", help="Read the scenarios, list them and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and nothing else.")] = False,
) -> None:
    """Hurt groups on this machine under load, and check that nothing is lost.

    Example: healer-chaos run --subset ci

    Example: healer-chaos run --random --hours 1 --seed 7
    """
    from chaos.scenario_file import FOLDER, ScenarioError, load_all
    from healer.interrupt import Interrupted, run_to_its_end

    if random and files:
        raise typer.BadParameter("either files or --random")
    if random and not (hours or faults):
        raise typer.BadParameter("--random needs --hours or --faults")
    if gpus and not random:
        raise typer.BadParameter("--gpus needs --random; a scenario says `group: {epBackend: nixl-ep}` itself")
    if honest and (gpus or not random):
        raise typer.BadParameter("--honest needs --random, and does not go with --gpus")
    try:
        read = [] if random else load_all(files or [FOLDER])
    except ScenarioError as error:
        for problem in error.problems:
            typer.echo(problem, err=True)
        raise typer.Exit(WRONG) from None
    chosen = [one for one in read if (not subset or subset in one.scenario.metadata.tags) and name in one.scenario.name]
    if not random and not chosen:
        typer.echo("healer-chaos: no scenario has that tag and name", err=True)
        raise typer.Exit(WRONG)
    if check:
        for one in chosen:
            typer.echo(f"{one.scenario.name:60} {one.scenario.metadata.fear}")
        return
    from chaos.session import Session, Wanted

    say: Callable[[str], None] = (lambda _: None) if json else (lambda text: typer.echo(text))
    wanted = Wanted(
        read=tuple(chosen),
        random=random,
        hours=hours,
        faults=faults,
        lot="gpus" if gpus else "honest" if honest else "faults",
        seed=seed,
        patience=patience,
        minimise=minimise,
        restarts=restarts,
        command=("healer-chaos", *sys.argv[1:]),
    )
    work = Path(tempfile.mkdtemp(prefix="chaos-", dir=None if len(tempfile.gettempdir()) <= MAX_TEMP else "/tmp"))
    try:
        _empty(out)
        campaign = run_to_its_end(Session(wanted, out, work, say).run())
    except Interrupted as interrupted:
        typer.echo(str(interrupted), err=True)
        raise typer.Exit(interrupted.exit_code) from None
    except (ElasticError, OSError) as error:
        typer.echo(f"healer-chaos: {error}", err=True)
        raise typer.Exit(FAILED) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if json:
        typer.echo(msgspec.json.encode(campaign).decode())
    bad = campaign.verdicts.get("failed", 0) + campaign.verdicts.get("error", 0)
    raise typer.Exit(FAILED if bad else 0)


def _empty(out: Path) -> None:
    """Only what such a command wrote is removed. Raises ElasticError."""
    if not out.exists():
        out.mkdir(parents=True)
        return
    if not out.is_dir() or (any(out.iterdir()) and not _is_ours(out)):
        raise ElasticError(
            f"{out}: holds something else than records of a run, so it is not emptied; name another --out"
        )
    for path in out.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_ours(out: Path) -> bool:
    """A campaign's folder, or what an interrupted one left: nothing but records."""
    from chaos import records

    return (out / records.CAMPAIGN).exists() or all(
        path.is_dir() and ((path / records.RUN).exists() or (path / records.STEPS).exists()) for path in out.iterdir()
    )
