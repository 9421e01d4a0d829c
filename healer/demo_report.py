"""What the demo has seen, as a record, and as tables that fit 100 columns."""

from typing import Literal

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from elastic.protocol import Source
from healer.drill import SOURCES, Healing
from healer.tables import console, size

Fault = Literal["kill", "stop"]

_SAID = {"kill": "SIGKILL", "stop": "SIGSTOP"}
_DID = {"kill": "died", "stop": "hung"}
_FROM = {"peer": "a live peer", "host": "host memory", "disk": "disk"}
_WHAT = {
    "decide": "the daemon judges, writes it down and gives the order",
    "release": "survivors drop the step that waits for the dead rank",
    "park": "all stand at the same round boundary",
    "cover": "experts without a live copy are loaded",
    "commit": "all take over the new map, in place",
    "resume": "until every survivor has committed its first step",
    "vacate": "buffers to be filled anew leave the map",
    "refill: boot": "a new process starts and registers its memory",
    "refill: load": "it loads and warms up while the others serve",
    "refill: capture": "of it: its step graphs",
    "refill: connect": "all connect to it, masked",
    "refill: park": "all stand at the same round boundary",
    "refill: commit": "all take over the map with the new rank",
    "refill: resume": "until every rank has committed its first step",
}


class Survivor(msgspec.Struct, frozen=True):
    slot: int
    pause_s: float | None
    """Longest gap between two committed steps; None: it was idle."""
    captures: tuple[int, int]
    """Step graphs captured, before the fault and after the healing."""
    address_changes: tuple[int, int]
    same_process: bool


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    fault: Fault
    slot: int
    fault_at_s: float
    """After the start of the requests."""
    requests: int
    tokens: int
    """Of each answer."""
    in_flight: int
    """Requests that had begun and not ended when the fault came."""
    completed: int
    replayed: int
    """Moved to another rank, and continued from prompt plus the tokens already sent."""
    tokens_equal: bool
    """To the fault-free run, during the fault and once more on the healed group."""
    silence_s: float
    """The longest that any client went without a token after the fault."""
    usual_silence_s: float
    """The same in the fault-free run."""
    live_again: bool
    healing: Healing
    survivors: tuple[Survivor, ...]
    problems: tuple[str, ...]
    """What should not be, one sentence each; empty when all went well."""
    took_s: float


def problems_of(
    wrong: list[str], in_flight: int, slot: int, live_again: bool, survivors: tuple[Survivor, ...]
) -> tuple[str, ...]:
    found = list(wrong)
    if not in_flight:
        found.append("no request was in flight when the fault came, so nothing was shown; try more --tokens")
    if not live_again:
        found.append(f"slot {slot} is not live again")
    for one in survivors:
        if one.captures[0] != one.captures[1]:
            found.append(f"slot {one.slot} captured again: {one.captures[0]} graphs before, {one.captures[1]} after")
        if any(one.address_changes):
            found.append(f"slot {one.slot} saw {one.address_changes[1]} addresses change")
        if not one.same_process:
            found.append(f"slot {one.slot} was not hurt, yet its process was replaced")
    return tuple(found)


def show(report: DemoReport, out: Console | None = None) -> None:
    out = out or console()
    out.print()
    out.print(_timeline(report))
    out.print()
    out.print(_survivors(report))
    out.print()
    out.print(_moved(report.healing))
    out.print()
    out.print(_summary(report))
    out.print()
    for problem in report.problems:
        out.print(f"[red]wrong:[/red] {escape(problem)}")
    if not report.problems:
        out.print(
            f"[green]ok[/green]: slot {report.slot} {_DID[report.fault]}, {report.completed} of {report.requests} requests completed, "
            "every token as without the fault"
        )


def _timeline(report: DemoReport) -> Table:
    table = _table("STEP", ">AT", ">TOOK", "WHAT")
    sent = f"{_SAID[report.fault]} to slot {report.slot}, {report.in_flight} of {report.requests} requests in flight"
    table.add_row(report.fault, _ms(0.0), "", sent)
    for step in report.healing.steps:
        what = report.healing.evidence if step.name == "detect" else _WHAT.get(step.name, "")
        table.add_row(step.name, _ms(step.at_s), _ms(step.took_s), escape(what))
    return table


def _survivors(report: DemoReport) -> Table:
    table = _table(">SURVIVOR", ">PAUSE", ">CAPTURES BEFORE", ">AFTER", ">ADDRESS CHANGES", "PROCESS")
    for one in report.survivors:
        table.add_row(
            f"slot {one.slot}",
            "idle" if one.pause_s is None else _ms(one.pause_s),
            str(one.captures[0]),
            str(one.captures[1]),
            str(one.address_changes[1]),
            "the same" if one.same_process else "replaced",
        )
    return table


def _moved(healing: Healing) -> Table:
    table = _table("WEIGHTS FROM", ">TO COVER", ">", ">TO REFILL", ">")
    for name in SOURCES:
        table.add_row(_FROM[name], *_source(healing.cover[name]), *_source(healing.refill[name]))
    return table


def _source(source: Source) -> tuple[str, str]:
    # an expert counts as one tensor
    return (f"{source.tensors} tensors", size(source.bytes)) if source.tensors else ("-", "")


def _summary(report: DemoReport) -> Table:
    healing, table = report.healing, Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    again = "live again" if report.live_again else "not live"
    rows = {
        "experts covered": f"{_ms(healing.coverage_s)} after the fault",
        "full size": f"{_ms(healing.capacity_s)} after the fault, slot {report.slot} is {again}",
        "longest silence": f"{_ms(report.silence_s)} for a client, {_ms(report.usual_silence_s)} without a fault",
        "requests": f"{report.completed} of {report.requests} completed, {report.replayed} replayed on another rank",
        "tokens equal": "yes, to the fault-free run; and once more on the healed group"
        if report.tokens_equal
        else "no",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _table(*names: str) -> Table:
    """A name that starts with ">" makes a column of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(
            name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=name != "WHAT"
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
