"""`healer-chaos`: injects faults into a running group.

Exit codes: 0 done; 1 refused, nothing was sent; 2 wrong usage; 3 sent, but the process shows no effect in time.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, get_args

import msgspec
import typer

from chaos import inject, inject_cli, nvml_faults, run_cli
from chaos.report import cli as report_cli
from elastic.errors import ElasticError, Retryable

REFUSED = 1
NO_EFFECT = 3

Injector = Callable[[Path, Iterable[int]], tuple[inject.Injection, ...]]

app = typer.Typer(help="Inject faults into a running group.", no_args_is_help=True, pretty_exceptions_enable=False)
inject_app = typer.Typer(
    help="Send one fault to chosen ranks.\n\nExample: healer-chaos inject kill --slot 1", no_args_is_help=True
)
app.add_typer(inject_app, name="inject")
inject_app.command("nvml")(nvml_faults.inject_nvml_command)
inject_cli.register(inject_app)
app.command("report")(report_cli.report)
app.command("run")(run_cli.run)
app.command("fake-nvml")(nvml_faults.fake_nvml_command)

Slots = Annotated[list[int], typer.Option("--slot", min=0, help="Slot of the rank; may be given more than once.")]
RunDir = Annotated[
    Path, typer.Option("--run-dir", envvar="HEALER_RUN_DIR", help="The group's run directory.", show_default=True)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Armed = Annotated[
    bool,
    typer.Option(
        "--armed", help="Get ready, say so on standard error, and send when a line (Enter) comes on standard input."
    ),
]
Deadline = Annotated[float, typer.Option(min=0.0, help="Seconds to wait until the process shows the effect.")]

DEFAULT_RUN_DIR = Path("run")
WITHIN: tuple[inject.OwnFault, ...] = get_args(inject.OwnFault)


@inject_app.command("kill")
def kill(
    slot: Slots,
    run_dir: RunDir = DEFAULT_RUN_DIR,
    json: Json = False,
    armed: Armed = False,
    deadline_s: Deadline = 5.0,
) -> None:
    """SIGKILL ranks, as a machine check or the OOM killer would.

    Example: healer-chaos inject kill --slot 0 --slot 3
    """
    _run(inject.kill, run_dir, slot, json, armed, deadline_s)


@inject_app.command("stop")
def stop(
    slot: Slots,
    run_dir: RunDir = DEFAULT_RUN_DIR,
    json: Json = False,
    armed: Armed = False,
    deadline_s: Deadline = 5.0,
) -> None:
    """SIGSTOP ranks: they hang with their sockets open. Prints the command that takes it back.

    Example: healer-chaos inject stop --slot 1
    """
    _run(inject.stop, run_dir, slot, json, armed, deadline_s)


@inject_app.command("cont")
def cont(
    slot: Slots,
    run_dir: RunDir = DEFAULT_RUN_DIR,
    json: Json = False,
    armed: Armed = False,
    deadline_s: Deadline = 5.0,
) -> None:
    """SIGCONT ranks: takes `stop` back.

    Example: healer-chaos inject cont --slot 1
    """
    _run(inject.cont, run_dir, slot, json, armed, deadline_s)


@inject_app.command("fault")
def fault(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(WITHIN)}.")],
    slot: Slots,
    run_dir: RunDir = DEFAULT_RUN_DIR,
    json: Json = False,
    armed: Armed = False,
    deadline_s: Deadline = 5.0,
) -> None:
    """Have ranks commit a fault themselves: a kernel that faults, GPU memory taken, a stuck thread. Only in a group whose
    policy says `faultInjection: true`. Nothing takes it back: the daemon replaces the rank.

    Example: healer-chaos inject fault illegal-address --slot 1
    """
    known = next((known for known in WITHIN if known == name), None)
    if known is None:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(WITHIN)}")
    _run(functools.partial(inject.within, known), run_dir, slot, json, armed, deadline_s)


def _run(injector: Injector, run_dir: Path, slots: list[int], json: bool, armed: bool, deadline_s: float) -> None:
    try:
        if armed:
            _await_order()
        done = injector(run_dir, slots)
    except ElasticError as error:
        raise _failure(error, json, REFUSED) from None
    if not json:
        for injection in done:
            typer.echo(f"{injection.fault}: {injection.member}")
            if injection.undo:
                typer.echo(f"  undo: {injection.undo}")
    try:
        inject.await_effect(done, deadline_s=deadline_s)
    except Retryable as error:
        raise _failure(error, json, NO_EFFECT) from None
    if json:
        typer.echo(msgspec.json.encode({"injected": done}).decode())


def _await_order() -> None:
    """Raises ElasticError when standard input ends: whoever was to give the order is gone."""
    typer.echo("armed: Enter sends", err=True)
    if not sys.stdin.readline():
        raise ElasticError("standard input ended before the order came; nothing was sent")


def _failure(error: ElasticError, json: bool, code: int) -> typer.Exit:
    if json:
        typer.echo(msgspec.json.encode({"error": str(error)}).decode())
    else:
        typer.echo(f"healer-chaos: {error}", err=True)
    return typer.Exit(code)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
