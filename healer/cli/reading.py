"""`healer status`, `sensors`, `scan`, `diagnose`, `history` and `export`: what is, and what was."""

import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from elastic.errors import ElasticError
from healer.cli.common import Exit, JsonOption, PolicyOption, RunDirOption, client_of, echo_json, run_dir_of


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: healer status --policy policies/default.yaml --json")(status)
    app.command(epilog="Example: healer sensors --policy policies/default.yaml")(sensors)
    app.command(epilog="Example: healer scan --json")(scan)
    app.command(epilog="Example: healer diagnose trace.jsonl --json")(diagnose)
    app.command(epilog="Example: healer history inc-3 --policy policies/default.yaml")(history)
    app.command(epilog="Example: healer export --policy policies/default.yaml > journal.jsonl")(export)


def status(policy: PolicyOption = None, run_dir: RunDirOption = None, as_json: JsonOption = False) -> None:
    """Show the group, its ranks and what the daemon thinks of them. Exit code 3: degraded."""
    found = client_of(policy, run_dir).get("/status")
    if as_json:
        echo_json(found)
    else:
        from healer.tables import console, show_status

        show_status(console(), found)
    raise typer.Exit(Exit.OK if found["state"] == "ok" else Exit.DEGRADED)


def sensors(policy: PolicyOption = None, run_dir: RunDirOption = None, as_json: JsonOption = False) -> None:
    """Show the sensors: whether they see, since when, and what they cost. Without --policy and --run-dir: those of this host,
    started for a moment."""
    if policy is None and run_dir is None:
        found = _scan(10.0)["sensors"]
    else:
        found = client_of(policy, run_dir).get("/status")["sensors"]
    if as_json:
        echo_json(found)
    else:
        from healer.tables import console, show_sensors

        show_sensors(console(), found)


def scan(
    as_json: JsonOption = False,
    deadline: Annotated[float, typer.Option(help="Seconds to wait for readings at most.", min=0.1)] = 15.0,
) -> None:
    """Read every sensor of this host once and judge, without a policy. Exit code 3: not healthy, or not known to be."""
    found = _scan(deadline)
    if as_json:
        echo_json(found)
    else:
        from healer.tables import console, show_scan

        show_scan(console(), found)
    raise typer.Exit(Exit.OK if found["health"] == "healthy" else Exit.DEGRADED)


def diagnose(
    trace: Annotated[Path, typer.Argument(help="A file that `healer run --record` has written.")],
    as_json: JsonOption = False,
) -> None:
    """Judge a recorded trace again: which verdict changed when and why, and the incidents with their causes."""
    from healer.replay import replayed
    from healer.trace import Trace

    found = replayed(Trace(trace))
    if as_json:
        echo_json(found)
    else:
        from healer.tables import console, show_diagnosis

        show_diagnosis(console(), found)


def history(
    incident: Annotated[str | None, typer.Argument(help="One incident, as a timeline.")] = None,
    policy: PolicyOption = None,
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show past incidents as a table, or one as a timeline. Works without a running daemon too."""
    found = _history(run_dir_of(policy, run_dir), incident)
    if as_json:
        echo_json(found)
        return
    from healer.tables import console, show_history, show_timeline

    if incident is None:
        show_history(console(), found)
    else:
        show_timeline(console(), found["incident"], found["entries"])


def export(
    policy: PolicyOption = None,
    run_dir: RunDirOption = None,
    incident: Annotated[str | None, typer.Option(help="Only the entries of this incident, such as inc-3.")] = None,
) -> None:
    """Print the journal as JSON lines, oldest entry first. Works beside a running daemon and without one."""
    import contextlib

    import msgspec

    from healer.address import journal_path
    from healer.journal import exported, open_readonly

    encoder, out, empty = msgspec.json.Encoder(), sys.stdout.buffer, True
    with contextlib.closing(open_readonly(journal_path(run_dir_of(policy, run_dir)))) as journal:
        for entry in exported(journal, incident or ""):
            out.write(encoder.encode(entry) + b"\n")
            empty = False
    out.flush()
    if incident and empty:
        raise ElasticError(f"no incident {incident!r}; `healer history` lists them")


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
    from healer.address import journal_path
    from healer.client import Client, NoDaemon
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
    return client.get("/incidents" if incident is None else f"/incidents/{quote(incident, safe='')}")
