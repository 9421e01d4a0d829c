"""What an operator can ask of the daemon: each command is one call of its API, and prints what became of it.

A call that gets no answer is sent again under the same key, so that it is carried out once.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic.errors import ElasticError
from healer.cli.common import JsonOption, PolicyOption, RunDirOption, client_of, echo_json

if TYPE_CHECKING:
    from healer.client import Client

POLL_S = 0.2

SlotArgument = Annotated[int, typer.Argument(help="The slot.", min=0)]
ReasonOption = Annotated[str, typer.Option(help="Why; kept in the journal.")]

breaker_app = typer.Typer(no_args_is_help=True, help="The circuit breaker.")


def register(app: typer.Typer) -> None:
    for command, example in (
        (scale, "scale 6 --wait"),
        (pause, 'pause --reason "switch firmware"'),
        (resume, "resume"),
        (drain, "drain 3"),
        (replace, 'replace 3 --reason "slow"'),
        (quarantine, "quarantine 3 --for 12h"),
        (release, "release 3"),
        (cancel, "cancel"),
    ):
        app.command(epilog=f"Example: healer {example} --policy policies/default.yaml")(command)
    breaker_app.command(epilog="Example: healer breaker reset --policy policies/default.yaml")(reset)
    app.add_typer(breaker_app, name="breaker")


def scale(
    ranks: Annotated[int, typer.Argument(help="How many ranks should serve.")],
    policy: PolicyOption = None,
    run_dir: RunDirOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until the group has that size.")] = False,
    deadline: Annotated[float, typer.Option(help="Seconds to wait at most.", min=0.0)] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Set the number of ranks. The daemon changes the group in the background."""
    client = client_of(policy, run_dir)
    answer = client.post("/scale", {"ranks": ranks})
    target = answer["target"]
    if wait:
        _wait_for(client, target, deadline)
    if as_json:
        echo_json(answer)
    else:
        typer.echo(f"{'live' if wait else 'target'}: {len(target)} ranks on slots {', '.join(map(str, target))}")


def pause(
    policy: PolicyOption = None,
    run_dir: RunDirOption = None,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Have the daemon observe and report only, across its restarts, until `healer resume`. Orders are still carried out."""
    _order(policy, run_dir, "/pause", {"reason": reason}, as_json)


def resume(policy: PolicyOption = None, run_dir: RunDirOption = None, as_json: JsonOption = False) -> None:
    """Have the daemon heal and scale again."""
    _order(policy, run_dir, "/resume", {}, as_json)


def drain(
    slot: SlotArgument, policy: PolicyOption = None, run_dir: RunDirOption = None, as_json: JsonOption = False
) -> None:
    """Let one rank go: its requests are handed over and its experts moved first. The slot leaves the target."""
    _order(policy, run_dir, "/drain", {"slot": slot}, as_json)


def replace(
    slot: SlotArgument,
    policy: PolicyOption = None,
    run_dir: RunDirOption = None,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Give one rank up at once and start another in its slot; its requests are replayed on the others."""
    _order(policy, run_dir, "/replace", {"slot": slot, "reason": reason}, as_json)


def quarantine(
    slot: SlotArgument,
    policy: PolicyOption = None,
    run_dir: RunDirOption = None,
    for_: Annotated[str | None, typer.Option("--for", help="Such as 30m or 12h; absent: until it is released.")] = None,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Keep a slot empty, across restarts of the daemon, for a time or until `healer release`."""
    body: dict[str, Any] = {"slot": slot, "reason": reason}
    if for_ is not None:
        from healer.policy.schema import parse_duration

        try:
            body["for_s"] = parse_duration(for_)
        except ValueError as error:
            raise typer.BadParameter(f"--for: {error}") from None
    _order(policy, run_dir, "/quarantine", body, as_json)


def release(
    slot: SlotArgument, policy: PolicyOption = None, run_dir: RunDirOption = None, as_json: JsonOption = False
) -> None:
    """End a quarantine; a slot that healing had taken out is filled again."""
    _order(policy, run_dir, "/release", {"slot": slot}, as_json)


def cancel(policy: PolicyOption = None, run_dir: RunDirOption = None, as_json: JsonOption = False) -> None:
    """Give up what is being prepared: slots that are empty leave the target. Nothing that serves is touched."""
    _order(policy, run_dir, "/cancel", {}, as_json)


def reset(policy: PolicyOption = None, run_dir: RunDirOption = None, as_json: JsonOption = False) -> None:
    """Allow destructive steps again after the circuit breaker has opened."""
    _order(policy, run_dir, "/breaker/reset", {}, as_json)


def _order(policy: Path | None, run_dir: Path | None, path: str, body: dict[str, Any], as_json: bool) -> None:
    answer = client_of(policy, run_dir).post(path, body)
    if as_json:
        echo_json(answer)
    else:
        typer.echo(answer["sentence"])


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
