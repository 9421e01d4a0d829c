"""What the commands share: the application, its exit codes, and the way to a daemon."""

import json
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic.errors import ElasticError
from healer import __version__

if TYPE_CHECKING:
    from healer.client import Client


class Exit(IntEnum):
    OK = 0
    ERROR = 1
    USAGE = 2
    DEGRADED = 3
    LEASE_LOST = 4
    INTERRUPTED = 130


_EPILOG = (
    "Exit codes: 0 all is well; 1 an error, told in one message; 2 wrong usage; 3 from `status`: the group is not "
    "as it should be, from `scan`: this host is not known to be healthy; 4 from `run`: the lease was lost, start it again; 130 after Ctrl-C. "
    "Example: healer run --policy policies/default.yaml"
)

app = typer.Typer(
    name="healer",
    help="Keeps a Mixture-of-Experts serving group healthy: detects dead and hung ranks, releases the others, replaces them.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PolicyOption = Annotated[Path | None, typer.Option("--policy", "-p", help="The policy file that the daemon runs.")]
RunDirOption = Annotated[Path | None, typer.Option(help="The daemon's run directory, instead of --policy.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def exit_code(error: ElasticError) -> Exit:
    from elastic.errors import Superseded

    return Exit.LEASE_LOST if isinstance(error, Superseded) else Exit.ERROR


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


def run_dir_of(policy: Path | None, run_dir: Path | None) -> Path:
    """Raises typer.BadParameter where neither is given, ElasticError for a bad policy."""
    if run_dir is not None:
        return run_dir
    if policy is None:
        raise typer.BadParameter("say which daemon: --policy FILE or --run-dir DIRECTORY")
    from healer.address import address_path, home
    from healer.policy.load import load_policy

    spec = load_policy(policy).spec
    place = Path(spec.target.run_dir)
    own = home(place, dry_run=spec.dry_run)
    # one that acts may have become a dry run by a change of its policy
    return own if address_path(own).exists() else place


def client_of(policy: Path | None, run_dir: Path | None) -> "Client":
    """Raises as `run_dir_of`, and NoDaemon."""
    place = run_dir_of(policy, run_dir)
    from healer.client import Client

    return Client(place)


def echo_json(found: Any) -> None:
    typer.echo(json.dumps(found, indent=1))
