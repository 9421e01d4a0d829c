"""The commands `healer policy ...`. Each imports what it needs when it runs, so that `healer` starts quickly."""

import json
from pathlib import Path
from typing import Annotated

import typer

from elastic.errors import ElasticError

FAILED = 1
"""Exit code where a policy has errors, or warnings with --strict."""

policy_app = typer.Typer(no_args_is_help=True, help="Work with policy files.")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@policy_app.command(epilog="Example: healer policy check policies/default.yaml --strict")
def check(
    file: Annotated[Path, typer.Argument(help="The policy file.")],
    as_json: JsonOption = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
) -> None:
    """Check a policy file, and its sizes against the model where the checkpoint is on this machine.

    Errors are what a daemon would refuse; warnings are what may not be meant.
    """
    from elastic.config import read_model_shape
    from healer.policy.load import PolicyError, check_policy
    from healer.policy.schema import Target

    try:
        policy, warnings = check_policy(file)
        target = policy.spec.target
        local = isinstance(target, Target) and Path(target.checkpoint).is_dir()
        if isinstance(target, Target) and local:
            policy.group().validate(read_model_shape(target.checkpoint))
    except ElasticError as error:
        if not as_json:
            raise
        problems = error.problems if isinstance(error, PolicyError) else (str(error),)
        typer.echo(json.dumps({"ok": False, "problems": problems, "warnings": []}, indent=1))
        raise typer.Exit(FAILED) from None
    failed = strict and bool(warnings)
    if as_json:
        report = {"ok": not failed, "problems": [], "warnings": warnings, "model_checked": local}
        typer.echo(json.dumps(report, indent=1))
    else:
        for warning in warnings:
            typer.echo(f"warning: {warning}", err=True)
        absent = isinstance(target, Target) and not local
        note = " (its checkpoint is not on this machine: sizes were not checked against the model)" if absent else ""
        typer.echo(f"{file}: policy {policy.metadata.name} is valid{note}")
    if failed:
        if not as_json:
            typer.echo(f"error: {file}: {len(warnings)} warnings, and --strict allows none", err=True)
        raise typer.Exit(FAILED)


@policy_app.command(epilog="Example: healer policy schema > schema.json")
def schema() -> None:
    """Print the JSON Schema of policy files, for editors and other tools."""
    from healer.policy.json_schema import schema_text

    typer.echo(schema_text(), nl=False)


@policy_app.command(epilog="Example: healer policy explain policies/default.yaml --event cause=process-death,slot=1")
def explain(
    file: Annotated[Path, typer.Argument(help="The policy file.")],
    event: Annotated[str, typer.Option(help="What happens: cause=xid,xid=79,slot=3 or, for load, waiting=40,ranks=4.")],
    as_json: JsonOption = False,
) -> None:
    """Say which rule answers an event, and why the others do not.

    About a rank the keys are verdict, cause, confidence, slot, host, xid, evidence, source, severity, failures, live and
    lost; what is not given is taken to be as told. About load they are the signals of the policy (a number, idle or
    missing), ranks, for (how long it has been so: 90s) and wall (when, for schedules: 2026-01-31T23:00+01:00).
    """
    import time

    import msgspec

    from healer.policy.explain import explain as explain_event
    from healer.policy.load import load_policy
    from healer.policy.report import show_explained
    from healer.tables import console

    told = explain_event(load_policy(file), event, time.time())
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(told), indent=1))
    else:
        show_explained(console(), told)


BootOption = Annotated[float, typer.Option(help="Seconds from a decision to grow until the new ranks serve.", min=0.0)]
AllOption = Annotated[bool, typer.Option("--all", help="Also what was decided without doing anything.")]
PlotOption = Annotated[Path | None, typer.Option(help="Write size, load and events over time as SVG.")]


@policy_app.command(
    epilog="Example: healer policy replay trace.jsonl --policy policies/autoscale.yaml --plot replay.svg"
)
def replay(
    trace: Annotated[Path, typer.Argument(help="A trace, or a daemon's journal.db.")],
    policy: Annotated[Path, typer.Option("--policy", "-p", help="The policy file.")],
    boot: BootOption = 30.0,
    plot: PlotOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a policy would have done with a recording.

    `healer run --record trace.jsonl` records a trace; the run directory of every group has a journal.db.
    """
    import msgspec

    from healer.policy.load import load_policy
    from healer.policy.recording import frames
    from healer.policy.replay import Player
    from healer.policy.report import show_replay
    from healer.tables import console

    found = Player(load_policy(policy), boot).play(frames(trace))
    if plot is not None:
        from healer.policy.plot import plot as draw

        draw([found], plot)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found), indent=1))
    else:
        show_replay(console(), found, every=every)


@policy_app.command(epilog="Example: healer policy diff old.yaml new.yaml --trace trace.jsonl")
def diff(
    old: Annotated[Path, typer.Argument(help="A policy file.")],
    new: Annotated[Path, typer.Argument(help="Another.")],
    trace: Annotated[Path, typer.Option(help="A trace, or a daemon's journal.db.")],
    boot: BootOption = 30.0,
    plot: PlotOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what two policies would have done differently with the same recording."""
    import msgspec

    from healer.policy.load import load_policy
    from healer.policy.recording import frames
    from healer.policy.replay import Player
    from healer.policy.report import differences, show_difference
    from healer.tables import console

    before, after = (Player(load_policy(file), boot).play(frames(trace)) for file in (old, new))
    if plot is not None:
        from healer.policy.plot import plot as draw

        draw([before, after], plot)
    if as_json:
        both = {"old": before, "new": after, "differences": list(differences(before, after, every=every))}
        typer.echo(json.dumps(msgspec.to_builtins(both), indent=1))
    else:
        show_difference(console(), before, after, every=every)
