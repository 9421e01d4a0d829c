"""The command `healer`. Each command imports what it needs when it runs, so that all start quickly."""

import json
import sys
import time
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic.errors import ElasticError
from healer import __version__
from healer.policy.cli import policy_app

if TYPE_CHECKING:
    from healer.client import Client

POLL_S = 0.2


class Exit(IntEnum):
    OK = 0
    ERROR = 1
    USAGE = 2
    DEGRADED = 3


_EPILOG = (
    "Exit codes: 0 all is well; 1 an error, told in one message; 2 wrong usage; 3 from `status`: the group is not "
    "as it should be, from `scan`: this host is not known to be healthy. Example: healer run --policy policies/default.yaml"
)

app = typer.Typer(
    name="healer",
    help="Keeps a Mixture-of-Experts serving group healthy: detects dead and hung ranks, releases the others, replaces them.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(policy_app, name="policy")

PolicyOption = Annotated[Path | None, typer.Option("--policy", "-p", help="The policy file that the daemon runs.")]
RunDirOption = Annotated[Path | None, typer.Option(help="The daemon's run directory, instead of --policy.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class Format(StrEnum):
    CONSOLE = "console"
    JSON = "json"


class Level(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"healer {__version__}")
        raise typer.Exit


@app.callback()
def _healer(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: healer run --policy policies/default.yaml --log-format json")
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
    daemon.run(load_policy(policy), record=record)


@app.command(epilog="Example: healer status --policy policies/default.yaml --json")
def status(policy: PolicyOption = None, run_dir: RunDirOption = None, as_json: JsonOption = False) -> None:
    """Show the group, its ranks and what the daemon thinks of them. Exit code 3: degraded."""
    found = _client(policy, run_dir).get("/status")
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        from healer.tables import console, show_status

        show_status(console(), found)
    raise typer.Exit(Exit.OK if found["state"] == "ok" else Exit.DEGRADED)


@app.command(epilog="Example: healer sensors --policy policies/default.yaml")
def sensors(policy: PolicyOption = None, run_dir: RunDirOption = None, as_json: JsonOption = False) -> None:
    """Show the sensors: whether they see, since when, and what they cost. Without --policy and --run-dir: those of this host,
    started for a moment."""
    if policy is None and run_dir is None:
        found = _scan(10.0)["sensors"]
    else:
        found = _client(policy, run_dir).get("/status")["sensors"]
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        from healer.tables import console, show_sensors

        show_sensors(console(), found)


@app.command(epilog="Example: healer scan --json")
def scan(
    as_json: JsonOption = False,
    deadline: Annotated[float, typer.Option(help="Seconds to wait for readings at most.", min=0.1)] = 15.0,
) -> None:
    """Read every sensor of this host once and judge, without a policy. Exit code 3: not healthy, or not known to be."""
    found = _scan(deadline)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        from healer.tables import console, show_scan

        show_scan(console(), found)
    raise typer.Exit(Exit.OK if found["health"] == "healthy" else Exit.DEGRADED)


@app.command(epilog="Example: healer diagnose trace.jsonl --json")
def diagnose(
    trace: Annotated[Path, typer.Argument(help="A file that `healer run --record` has written.")],
    as_json: JsonOption = False,
) -> None:
    """Judge a recorded trace again: which verdict changed when and why, and the incidents with their causes."""
    from healer.replay import replayed
    from healer.trace import Trace

    found = replayed(Trace(trace))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        from healer.tables import console, show_diagnosis

        show_diagnosis(console(), found)


@app.command(epilog="Example: healer history inc-3 --policy policies/default.yaml")
def history(
    incident: Annotated[str | None, typer.Argument(help="One incident, as a timeline.")] = None,
    policy: PolicyOption = None,
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show past incidents as a table, or one as a timeline. Works without a running daemon too."""
    found = _history(_run_dir(policy, run_dir), incident)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    from healer.tables import console, show_history, show_timeline

    if incident is None:
        show_history(console(), found)
    else:
        show_timeline(console(), found["incident"], found["entries"])


@app.command(epilog="Example: healer scale 6 --wait --policy policies/default.yaml")
def scale(
    ranks: Annotated[int, typer.Argument(help="How many ranks should serve.")],
    policy: PolicyOption = None,
    run_dir: RunDirOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until the group has that size.")] = False,
    deadline: Annotated[float, typer.Option(help="Seconds to wait at most.", min=0.0)] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Set the number of ranks. The daemon changes the group in the background."""
    client = _client(policy, run_dir)
    target = client.post("/scale", {"ranks": ranks})["target"]
    if wait:
        _wait_for(client, target, deadline)
    if as_json:
        typer.echo(json.dumps({"target": target}))
    else:
        typer.echo(f"{'live' if wait else 'target'}: {len(target)} ranks on slots {', '.join(map(str, target))}")


@app.command(epilog="Example: healer stop --policy policies/default.yaml")
def stop(
    policy: PolicyOption = None,
    run_dir: RunDirOption = None,
    deadline: Annotated[float, typer.Option(help="Seconds to wait at most.", min=0.0)] = 60.0,
) -> None:
    """End serving and the daemon; without a daemon, what a former one left running."""
    folder = _run_dir(policy, run_dir)
    from healer.daemon import read_address

    if read_address(folder) is None and (folder / "config.json").exists():
        from elastic.controller.executor import end_group

        typer.echo(f"no daemon runs here; ended {end_group(folder)} processes that one had left serving")
        return
    client = _client(policy, run_dir)
    client.post("/stop", {})
    end = time.monotonic() + deadline
    while client.address.alive:
        if time.monotonic() > end:
            raise ElasticError(
                f"the daemon (pid {client.address.pid}) has not ended within {deadline:g} s; see its log"
            )
        time.sleep(POLL_S / 4)
    typer.echo("stopped")


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def demo(context: typer.Context) -> None:
    """Start a small group, kill a rank under traffic, and show how it heals. `healer demo --help` lists its options."""
    from healer.demo import main as demo_main

    raise typer.Exit(demo_main(context.args))


def _run_dir(policy: Path | None, run_dir: Path | None) -> Path:
    if run_dir is not None:
        return run_dir
    if policy is None:
        raise typer.BadParameter("say which daemon: --policy FILE or --run-dir DIRECTORY")
    from healer.policy.load import load_policy

    return Path(load_policy(policy).spec.target.run_dir)


def _client(policy: Path | None, run_dir: Path | None) -> "Client":
    place = _run_dir(policy, run_dir)
    from healer.client import Client

    return Client(place)


def _scan(deadline_s: float) -> dict[str, Any]:
    import asyncio

    import msgspec
    from rich.console import Console

    from healer.clock import SystemClock
    from healer.machine import this_machine
    from healer.scan import scan as scan_once

    clock = SystemClock()
    with Console(stderr=True).status("starting the sensors") as line:
        found: dict[str, Any] = msgspec.to_builtins(
            asyncio.run(scan_once(this_machine(clock), clock, deadline_s, line.update))
        )
    return found


def _history(run_dir: Path, incident: str | None) -> Any:
    from healer.client import Client, NoDaemon
    from healer.daemon import journal_path
    from healer.incidents import summarise
    from healer.journal import incident_entries, open_readonly, timeline

    try:
        client = Client(run_dir)
    except NoDaemon:
        import contextlib

        import msgspec

        with contextlib.closing(open_readonly(journal_path(run_dir))) as journal:
            if incident is None:
                return msgspec.to_builtins(summarise(incident_entries(journal, 50)))
            entries = timeline(journal, incident)
        if not entries:
            raise ElasticError(f"no incident {incident!r}; `healer history` lists them") from None
        return msgspec.to_builtins({"incident": summarise(entries)[0], "entries": entries})
    from urllib.parse import quote

    return client.get("/history" if incident is None else f"/history/{quote(incident, safe='')}")


def _wait_for(client: "Client", target: list[int], deadline_s: float) -> None:
    from rich.console import Console

    end = time.monotonic() + deadline_s
    with Console(stderr=True).status("waiting") as line:
        while (found := client.get("/status"))["group"]["live"] != target or found["group"]["sequence"]:
            if found["group"]["target"] != target:
                raise ElasticError(f"the target is now {found['group']['target']}: somebody else changed it")
            if time.monotonic() > end:
                raise ElasticError(f"not within {deadline_s:g} s: {found['why']}; `healer status` shows more")
            line.update(found["group"]["sequence"] or found["why"] or "waiting")
            time.sleep(POLL_S)


def main() -> None:
    """Errors end in one message and a non-zero exit code, without a traceback."""
    try:
        app(prog_name="healer")
    except ElasticError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(Exit.ERROR)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
