"""`healer run`, `stop` and `demo`: the daemon's life."""

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from elastic.errors import ElasticError
from healer.cli.common import PolicyOption, RunDirOption, client_of, run_dir_of

POLL_S = 0.05


class Format(StrEnum):
    CONSOLE = "console"
    JSON = "json"


class Level(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: healer run --policy policies/default.yaml --log-format json")(run)
    app.command(epilog="Example: healer stop --policy policies/default.yaml")(stop)
    app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
        demo
    )


def run(
    policy: Annotated[Path, typer.Option("--policy", "-p", help="The policy file.")],
    log_format: Annotated[Format, typer.Option(help="How log lines on stderr look.")] = Format.CONSOLE,
    log_level: Annotated[Level, typer.Option(help="The least important line to log.")] = Level.INFO,
    record: Annotated[
        Path | None, typer.Option(help="Keep a trace of all evidence in this file; `healer diagnose` reads it.")
    ] = None,
) -> None:
    """Run the daemon in the foreground. SIGTERM ends it and leaves serving untouched; `healer stop` ends both."""
    from healer import daemon, logs
    from healer.policy.load import load_policy

    logs.configure(log_format.value, log_level.value)
    daemon.run(load_policy(policy), record=record, policy_file=policy)


def stop(
    policy: PolicyOption = None,
    run_dir: RunDirOption = None,
    deadline: Annotated[float, typer.Option(help="Seconds to wait at most.", min=0.0)] = 60.0,
) -> None:
    """End serving and the daemon; without a daemon, what a former one left running."""
    folder = run_dir_of(policy, run_dir)
    from healer.address import read_address

    if read_address(folder) is None and (folder / "config.json").exists():
        from elastic.controller.ending import end_group

        typer.echo(f"no daemon runs here; ended {end_group(folder)} processes that one had left serving")
        return
    from healer.targets.vllm import leftovers

    if read_address(folder) is None and leftovers.are_there(folder):
        typer.echo(f"no daemon runs here; ended {leftovers.end(folder)} servers that one had left serving")
        return
    client = client_of(policy, run_dir)
    client.post("/stop", {})
    end = time.monotonic() + deadline
    while client.address.alive:
        if time.monotonic() > end:
            raise ElasticError(
                f"the daemon (pid {client.address.pid}) has not ended within {deadline:g} s; see its log"
            )
        time.sleep(POLL_S)
    typer.echo("stopped")


def demo(context: typer.Context) -> None:
    """Start a small group, kill a rank under traffic, and show how it heals. `healer demo --help` lists its options."""
    from healer.demo import main as demo_main

    raise typer.Exit(demo_main(context.args))
