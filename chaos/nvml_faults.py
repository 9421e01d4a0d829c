"""`healer-chaos fake-nvml` and `healer-chaos inject nvml`: GPU faults on machines without a GPU.

They write the script of the stand-in for NVML (`chaos.fake_nvml`); whatever has loaded it sees the fault at its next call.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from chaos import fake_nvml
from chaos.fake_nvml import HEALTHY, Script
from elastic.errors import ElasticError

REFUSED = 1

XID_EVENT = 0x8


def _xid(script: Script, gpu: int, value: int) -> None:
    script.event(gpu, XID_EVENT, value)


def _heal(script: Script, gpu: int, value: int) -> None:
    script.say(
        f"call {gpu} * ok", *[f"set {gpu} {key} {healthy}" for key, healthy in HEALTHY.items()], _order(script, {})
    )


def _order(script: Script, instead: Mapping[int, str]) -> str:
    """All boards, each under its own number unless another text, or none, is to stand for it."""
    listed = [instead.get(gpu, str(gpu)) for gpu in range(script.gpus)]
    return f"order {' '.join(text for text in listed if text)}"


FAULTS: Mapping[str, tuple[str, int, Callable[[Script, int, int], None]]] = {
    "xid": ("an XID event; VALUE is the code", 79, _xid),
    "lost": ("every call says that the GPU is lost", 15, lambda s, g, v: s.call(g, "*", f"err {v}")),
    "unlisted": ("NVML lists it no more and closes the gap", 0, lambda s, g, v: s.say(f"call {g} * err 15", _order(s, {g: ""}))),
    "reset-required": ("every call asks for a reset first", 16, lambda s, g, v: s.call(g, "*", f"err {v}")),
    "recovery-action": ("field 230 is VALUE", 1, lambda s, g, v: s.field(g, 230, v)),
    "hang": ("no call comes back until it is healed", 0, lambda s, g, v: s.call(g, "*", "hang")),
    "delay": ("each call takes VALUE milliseconds", 100, lambda s, g, v: s.call(g, "*", f"delay {v}")),
    "crash": ("the library crashes whoever asks for it", 0, lambda s, g, v: s.call(g, "nvmlDeviceGetMemoryInfo", "crash")),
    "ecc-correctable": (
        "VALUE correctable errors a second", 20_000, lambda s, g, v: s.say(f"set {g} ecc.corrected.volatile.dram 0+{v}/s"),
    ),
    "ecc-uncorrectable": (
        "VALUE uncorrectable errors", 1, lambda s, g, v: s.say(f"set {g} ecc.uncorrected.volatile.dram {v}"),
    ),
    "remap-pending": ("a row waits to be remapped", 1, lambda s, g, v: s.say(f"set {g} remap.pending {v}")),
    "remap-failed": ("a row could not be remapped", 1, lambda s, g, v: s.say(f"set {g} remap.failed {v}")),
    "throttled": ("clock event reasons are VALUE", 0x40, lambda s, g, v: s.say(f"set {g} clocks {v}")),
    "nvlink-down": ("all its links are inactive", 0, lambda s, g, v: s.say(f"set {g} nvlink {v}")),
    "fabric-failed": ("its registration has status VALUE", 999, lambda s, g, v: s.say(f"set {g} fabric.status {v}")),
    "heal": ("takes back everything on this GPU", 0, _heal),
}  # fmt: skip
"""By name: what happens, the VALUE where none is given, and how it is written."""


def fake_nvml_command(
    folder: Annotated[Path, typer.Argument(help="Where the library and its script go.")],
    gpus: Annotated[int, typer.Option(min=1, max=64, help="How many GPUs it has.")] = 8,
) -> None:
    """Build a stand-in for NVML with healthy GPUs, and say how to use it.

    Example: healer-chaos fake-nvml gpus --gpus 4
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        library = fake_nvml.build(folder)
        script = Script.healthy(folder / "script", gpus)
    except (ElasticError, OSError) as error:
        typer.echo(f"healer-chaos: {error}", err=True)
        raise typer.Exit(REFUSED) from None
    variables = {"LD_LIBRARY_PATH": str(library), **fake_nvml.environment(script.path.absolute())}
    typer.echo(f"{gpus} GPUs; load them with")
    for name, value in variables.items():
        typer.echo(f"  export {name}={value}")
    typer.echo(f"and break one with\n  healer-chaos inject nvml xid --gpu 0 --script {script.path}")


def inject_nvml_command(
    fault: Annotated[str, typer.Argument(help=f"One of {', '.join(FAULTS)}.")],
    script: Annotated[Path, typer.Option(envvar=fake_nvml.SCRIPT_VARIABLE, help="Script of the stand-in.")],
    gpu: Annotated[int, typer.Option(min=0, help="Number of the GPU, from 0.")],
    value: Annotated[int | None, typer.Option(min=0, help="What it is about: an XID, a rate, a code.")] = None,
) -> None:
    """Play a GPU fault through the stand-in for NVML.

    Example: healer-chaos inject nvml recovery-action --value 1 --gpu 3 --script gpus/script
    """
    if fault not in FAULTS:
        raise typer.BadParameter(f"{fault!r} is none of {', '.join(FAULTS)}")
    what, usual, play = FAULTS[fault]
    try:
        opened = Script.open(script)
        if gpu >= opened.gpus:
            raise ElasticError(f"{script}: has the GPUs 0 to {opened.gpus - 1}, no {gpu}")
        play(opened, gpu, usual if value is None else value)
    except (ElasticError, OSError) as error:
        typer.echo(f"healer-chaos: {error}", err=True)
        raise typer.Exit(REFUSED) from None
    typer.echo(f"{fault}: GPU {gpu}: {what.replace('VALUE', str(usual if value is None else value))}")
    if fault != "heal":
        typer.echo(f"  undo: healer-chaos inject nvml heal --gpu {gpu} --script {script}")
