"""`healer-chaos inject KIND`: the injectors by hand, on a deployment that runs.

What lasts is taken back after `--for`, or when the command is interrupted: so nothing is left behind by accident. What needs a
daemon or a group that a scenario started itself (a second daemon, a full disk, a clock that jumps) is not offered here.
"""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import httpx
import msgspec
import typer
from pydantic import ValidationError

from chaos.injectors.base import Done, Place
from chaos.injectors.registry import kinds
from elastic import process
from elastic.errors import ElasticError
from healer.address import read_address
from healer.policy.schema.base import parse_duration

REFUSED = 1
HERE = (
    "terminate",
    "oom",
    "throttle",
    "slow",
    "mask",
    "link-lost",
    "link-delay",
    "completion-late",
    "completion-drop",
    "transfer-late",
    "transfer-drop",
    "transfer-kill",
    "gateway-kill",
    "daemon-stop",
    "daemon-kill",
    "journal-locked",
)
"""Of all kinds, those that a deployment which somebody else started can be given."""
FOREVER_S = 86400.0


class Attached:
    """The daemon of a deployment that somebody else started; see `chaos.injectors.base.Daemons`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def pid(self) -> int:
        address = read_address(self._run_dir)
        return address.pid if address is not None and process.is_alive(address.pid, address.pid_start) else 0

    def kill(self) -> None:
        address = read_address(self._run_dir)
        if address is not None:
            process.send_signal(address.pid, address.pid_start, signal.SIGKILL)

    def start(self) -> None:
        """Whoever started the daemon starts the next."""

    def start_second(self) -> int:
        raise ElasticError("a second daemon is started by hand: `healer run` with the same policy")

    def order(self, path: str, body: dict[str, Any]) -> None:
        address = read_address(self._run_dir)
        if address is None:
            raise ElasticError(f"{self._run_dir}: no daemon runs")
        with httpx.Client(trust_env=False) as client:
            answer = client.post(address.http + path, json=body, timeout=30)
        if answer.is_error:
            raise ElasticError(f"POST {path}: {answer.status_code} {answer.text[:300]}")


def register(app: typer.Typer) -> None:
    for kind in HERE:
        help_ = (kinds()[kind].__doc__ or "").split("\n\n")[0].replace("\n    ", " ")
        app.command(kind, help=f"{help_}\n\nExample: healer-chaos inject {_example(kind)}")(_command(kind))


def _example(kind: str) -> str:
    fields = kinds()[kind].model_fields
    if "peer" in fields:
        return f"{kind} --slot 0 --set peer=2 --for 3s"
    if "slots" in fields and kind != "gateway-kill":
        return f"{kind} --slot 1{' --for 3s' if kinds()[kind].lasts else ''}"
    return f"{kind}{' --for 3s' if kinds()[kind].lasts else ''}"


def _command(kind: str) -> Callable[..., None]:
    def command(
        slot: Annotated[list[int] | None, typer.Option("--slot", min=0, help="Slot of the rank.")] = None,
        run_dir: Annotated[
            Path, typer.Option("--run-dir", envvar="HEALER_RUN_DIR", help="The group's run directory.")
        ] = Path("run"),
        parameter: Annotated[
            list[str] | None, typer.Option("--set", help="A parameter, such as peer=2 or delay=5ms.")
        ] = None,
        for_: Annotated[str, typer.Option("--for", help="Take it back after this, such as 3s.")] = "",
        json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        inject_one(kind, slot or [], run_dir, parameter or [], for_, json)

    return command


def inject_one(kind: str, slots: list[int], run_dir: Path, parameters: list[str], for_: str, json: bool) -> None:
    """Raises Exit: 1 refused, nothing was done; 2 wrong usage."""
    injector_of = kinds()[kind]
    try:
        wanted: dict[str, Any] = {"kind": kind} | dict(map(_parameter, parameters))
        if slots:
            wanted |= {"slot": slots[0]} if "slot" in injector_of.model_fields else {"slots": slots}
        injector = injector_of.model_validate(wanted)
        for_s = parse_duration(for_) if for_ else 0.0
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise typer.BadParameter(f"{where}: {first['msg']}".lstrip(": ")) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    place = Place(run_dir=run_dir, draw=random.Random(), daemons=Attached(run_dir))
    try:
        injector.checked(place)
        done = injector.inject(place)
    except (ElasticError, OSError) as error:
        typer.echo(
            msgspec.json.encode({"error": str(error)}).decode() if json else f"healer-chaos: {error}", err=not json
        )
        raise typer.Exit(REFUSED) from None
    if not json:
        members = ", ".join(map(str, done.members)) or (f"daemon, pid {done.daemon_pid}" if done.daemon_pid else "done")
        typer.echo(f"{kind}: {members}")
        if done.take_back is not None:
            typer.echo(f"  stands for {for_}" if for_ else "  stands until Ctrl-C")
    if done.take_back is not None:
        _stand(done, for_s or FOREVER_S)
    if json:
        typer.echo(msgspec.json.encode({"injected": kind, "members": done.members, "at": done.at}).decode())


def _stand(done: Done, for_s: float) -> None:
    """Take it back, whatever ends the wait."""
    assert done.take_back is not None

    def over(*_: int | FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, over)
    try:
        time.sleep(for_s)
    except KeyboardInterrupt:
        typer.echo("taking it back", err=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        done.take_back()


def _parameter(text: str) -> tuple[str, Any]:
    """Raises ValueError."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is not valid, expected KEY=VALUE")
    if value in ("true", "false"):
        return key, value == "true"
    for number in (int, float):
        try:
            return key, number(value)
        except ValueError:
            continue
    return key, value
