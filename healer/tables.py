"""What the command line prints: the JSON of the API as tables that fit 100 columns."""

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_STATE = {"ok": "green", "healthy": "green", "live": "green", "healed": "green", "starting": "cyan", "booting": "cyan"}
_STATE |= {"degraded": "yellow", "unknown": "yellow", "reduced": "yellow", "open": "yellow", "ready": "cyan"}
_STATE |= {"unhealthy": "red", "lost": "red", "quarantined": "red", "stopping": "red", "empty": "dim"}


def console() -> Console:
    """As wide as the terminal, at most 100 columns; without a terminal just that, so that output does not depend on it."""
    found = Console(highlight=False)
    return Console(highlight=False, width=min(found.width, 100) if found.is_terminal else 100)


def show_status(out: Console, status: dict[str, Any]) -> None:
    group = status["group"]
    title = f"{escape(group['name'])} is {_coloured(status['state'])}"
    out.print(f"{title}: epoch {group['epoch']}, {len(group['live'])} of {len(group['target'])} ranks live")
    if status["why"]:
        out.print(f"  why        {escape(status['why'])}")
    if status["serving"]:
        out.print(f"  serving    {escape(status['serving'])}")
    incident = status["incident"]
    if incident:
        slots = ", ".join(map(str, incident["slots"]))
        out.print(
            f"  incident   {incident['id']}: {incident['cause']}, slots {slots}; `healer history {incident['id']}`"
        )
    if group["sequence"]:
        out.print(f"  sequence   {escape(group['sequence'])}")
    out.print(
        f"  can lose   {group['losses_survivable']} more ranks; experts without a live copy: {group['uncovered']}"
    )
    out.print(f"  decision   {escape(status['decision'] or 'none yet')}")
    if status["dry_run"]:
        out.print("  dry run    nothing is acted upon")
    if status["journal"]["error"]:
        out.print(f"  journal    [red]cannot be written: {escape(status['journal']['error'])}[/red]")
    out.print(_slots(status))


def _slots(status: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("SLOT", "STATE", "VERDICT", "PID", "BEAT", "ROUND", "RUN", "WAIT", "EXPERTS", "CAPTURES", "MOVED"):
        table.add_column(name, justify="left" if name in ("STATE", "VERDICT") else "right", no_wrap=True)
    verdicts = {(v["rank"]["slot"], v["rank"]["incarnation"]): v for v in status["verdicts"]}
    for slot in status["group"]["slots"]:
        member = slot["member"]
        if member is None:
            table.add_row(str(slot["slot"]), _coloured(slot["state"]), *[""] * 9)
            continue
        verdict = verdicts.get((member["slot"], member["incarnation"]))
        age = slot["last_beat_age_s"]
        table.add_row(
            str(slot["slot"]),
            _coloured(slot["state"]),
            _coloured(verdict["health"] if verdict else "-"),
            str(member["pid"]),
            "-" if age is None else _seconds(age),
            str(slot["round"]),
            str(slot["running"]),
            str(slot["waiting"]),
            str(slot["experts"]),
            str(slot["counters"]["captures"]),
            str(slot["counters"]["address_changes"]),
        )
    return table


def show_history(out: Console, incidents: list[dict[str, Any]]) -> None:
    if not incidents:
        out.print("no incident yet")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("INCIDENT", "OPENED", "CAUSE", "SLOTS", "PAUSE", "COVERED", "FULL", "MOVED", "OUTCOME"):
        table.add_column(name, justify="right" if name in ("PAUSE", "COVERED", "FULL", "MOVED") else "left")
    for one in incidents:
        table.add_row(
            one["id"],
            _when(one["opened_wall"]),
            ", ".join(one["causes"]),
            ", ".join(map(str, one["slots"])),
            _optional(one["pause_s"]),
            _optional(one["coverage_s"]),
            _optional(one["capacity_s"]),
            size(sum(one["moved_bytes"].values())),
            _coloured(one["outcome"]),
        )
    out.print(table)


def show_timeline(out: Console, incident: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    slots = ", ".join(map(str, incident["slots"]))
    out.print(f"{incident['id']}: {', '.join(incident['causes'])}, slots {slots}, {_coloured(incident['outcome'])}")
    start = incident["opened_wall"]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("TIME", justify="right", no_wrap=True)
    table.add_column("KIND", no_wrap=True)
    table.add_column("WHAT", overflow="fold")
    for entry in entries:
        for text in _lines(entry):
            table.add_row(f"{(entry['wall'] - start) * 1000:+.1f} ms", entry["kind"], escape(text))
    out.print(table)


def _lines(entry: dict[str, Any]) -> list[str]:
    body = entry["body"]
    match entry["kind"]:
        case "evidence":
            subject, by = body["subject"], body["reporter"]
            who = f" (says rank {by['slot']}.{by['incarnation']})" if by else ""
            value = f"{body['value']:.2f}" if isinstance(body["value"], float) else body["value"]
            return [
                f"rank {subject['slot']}.{subject['incarnation']}: {body['what']} {value}, from {body['source']}{who}"
            ]
        case "verdict":
            return [f"{body['verdict']['health']}: {body['verdict']['sentence']}"]
        case "decision":
            return [body["sentence"]]
        case "action":
            return [f"{body['step']} {body.get('wanted') or 'slots ' + ', '.join(map(str, body['slots']))}"]
        case "outcome" if "report" in body:
            return _report(body["report"])
        case "outcome":
            return [f"refused: {body['refused']}"]
    known = {k: v for k, v in body.items() if k not in ("event", "incident")}
    return [body["event"] + (": " + ", ".join(f"{k} {_short(v)}" for k, v in known.items()) if known else "")]


def _report(report: dict[str, Any]) -> list[str]:
    lines = [f"{report['kind']} of slots {report['slots']} {report['outcome']} at epoch {report['epoch']}"]
    lines[0] += f" in {_seconds(report['ended'] - report['began'])}: {report['reason']}"
    lines += [
        f"  {p['name']} {_seconds(p['end'] - p['start'])}" for p in sorted(report["phases"], key=lambda p: p["start"])
    ]
    lines += [f"  pause on slot {slot}: {_seconds(pause)}" for slot, pause in report["pause_s"].items()]
    for slot, loaded in report["loaded"].items():
        moved = [f"{s} {size(loaded[s]['bytes'])}" for s in ("peer", "host", "disk") if loaded[s]["tensors"]]
        lines.append(f"  weights into slot {slot}: {', '.join(moved) or 'none'}")
    return lines


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, dict):
        return ", ".join(f"{k}={_short(v)}" for k, v in value.items() if k != "at")
    return str(value)


def _coloured(word: str) -> str:
    style = _STATE.get(word)
    return f"[{style}]{word}[/{style}]" if style else word


def _when(wall: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(wall))


def _optional(seconds: float | None) -> str:
    return "-" if seconds is None else _seconds(seconds)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
