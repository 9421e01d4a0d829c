"""What the command line prints: the JSON of the API as tables that fit 100 columns."""

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_STATE = {"ok": "green", "healthy": "green", "live": "green", "healed": "green", "starting": "cyan", "booting": "cyan"}
_STATE |= {"degraded": "yellow", "unknown": "yellow", "reduced": "yellow", "open": "yellow", "ready": "cyan"}
_STATE |= {"blind": "yellow", "silent": "yellow", "off": "dim", "dead": "red"}
_STATE |= {"unhealthy": "red", "lost": "red", "quarantined": "red", "stopping": "red", "empty": "dim"}


def console() -> Console:
    """As wide as the terminal, at most 100 columns; without a terminal just that, so that output does not depend on it."""
    found = Console(highlight=False)
    return Console(highlight=False, width=min(found.width, 100) if found.is_terminal else 100)


def show_status(out: Console, status: dict[str, Any]) -> None:
    group = status["group"]
    title = f"{escape(group['name'])} is {_coloured(status['state'])}"
    out.print(f"{title}: epoch {group['epoch']}, {len(status['live'])} of {len(group['target'])} ranks are live")
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
    if status["scaling"]:
        out.print(f"  load       {escape(status['scaling']['sentence'] or 'not looked at yet')}")
        for problem in status["scaling"]["problems"]:
            out.print(f"  signal     [yellow]{escape(problem)}[/yellow]")
    if status["dry_run"]:
        out.print("  dry run    nothing is acted upon")
    _held_back(out, status)
    if status["journal"]["error"]:
        out.print(f"  journal    [red]cannot be written: {escape(status['journal']['error'])}[/red]")
    out.print(_slots(status))
    if status["gpus"]:
        out.print(_gpus(status["gpus"], status["placed"]))
    for verdict in (*status["hosts"], *status["gpus"]):
        if verdict["cause"] != "none":
            out.print(f"  {escape(verdict['sentence'])}")


def _held_back(out: Console, status: dict[str, Any]) -> None:
    """What keeps the daemon, or a part of the group, from working as the policy file says."""
    healing, file, lease = status["healing"], status["policy_file"], status["lease"]
    if lease:
        out.print(
            f"  lease      {escape(lease['role'])}, term {lease['term']}; held by {escape(lease['holder'] or 'nobody')}"
        )
    if healing["paused"]:
        out.print(f"  paused     by {escape(healing['paused'])}; `healer resume` ends a pause that was asked for")
    if healing["breaker"]:
        out.print(f"  breaker    [yellow]open: {escape(healing['breaker'])}[/yellow]; `healer breaker reset` closes it")
    for name in ("quarantined", "probation"):
        if healing[name]:
            out.print(f"  {name:<10} slots {', '.join(map(str, healing[name]))}")
    if file["rejected"]:
        out.print(f"  policy     [yellow]the file was rejected: {escape(file['rejected'])}[/yellow]")
        out.print(f"             the policy in force is {file['digest']}, loaded {_when(file['loaded_wall'])}")
    spares = status["group"]["spares"]
    if spares:
        shown = (f"{s['number']} {s['state']}" + (f" ({s['why']})" if s["why"] else "") for s in spares)
        out.print("  spares     " + escape(", ".join(shown)))


def _slots(status: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("SLOT", "STATE", "VERDICT", "PID", "BEAT", "ROUND", "RUN", "WAIT", "EXPERTS", "CAPTURES", "MOVED"):
        table.add_column(name, justify="left" if name in ("STATE", "VERDICT") else "right", no_wrap=True)
    verdicts = {(v["subject"]["slot"], v["subject"]["incarnation"]): v for v in status["verdicts"]}
    for slot in status["group"]["slots"]:
        member = slot["member"]
        if member is None:
            table.add_row(str(slot["slot"]), _coloured(slot["state"]), *[""] * 9)
            continue
        verdict = verdicts.get((member["slot"], member["incarnation"]))
        age = slot["last_beat_age_s"]
        table.add_row(
            str(slot["slot"]),
            _coloured(slot["state"] if slot["state"] != "live" or slot["slot"] in status["live"] else "dead"),
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


def _gpus(verdicts: list[dict[str, Any]], placed: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("GPU", "ADDRESS", "VERDICT", "CAUSE", "RANKS"):
        table.add_column(name, no_wrap=True)
    for verdict in verdicts:
        gpu = verdict["subject"]
        ranks = [f"{p['rank']['slot']}.{p['rank']['incarnation']}" for p in placed if p["gpu"] == gpu]
        cause = verdict["cause"] if verdict["cause"] != "none" else ""
        table.add_row(gpu["uuid"][:12] or "?", gpu["pci"], _coloured(verdict["health"]), cause, ", ".join(ranks))
    return table


def show_sensors(out: Console, sensors: list[dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("SENSOR", "STATE", "LAST READING", "READINGS", "MEAN", "MAX", "CPU", "WHY"):
        left = name in ("SENSOR", "STATE", "WHY")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "WHY", overflow="fold")
    for sensor in sensors:
        cost = sensor["cost"]
        table.add_row(
            sensor["name"],
            _coloured(sensor["state"]),
            f"{_seconds(sensor['age_s'])} ago" if sensor["readings"] else "none yet",
            str(sensor["readings"]),
            _seconds(cost["mean_s"]),
            _seconds(cost["max_s"]),
            _seconds(cost["cpu_s"]),
            escape(sensor["why"]),
        )
    out.print(table)


def show_scan(out: Console, found: dict[str, Any]) -> None:
    out.print(f"this host is {_coloured(found['health'])}, scanned in {_seconds(found['took_s'])}")
    if found["why"]:
        out.print(f"  why  {escape(found['why'])}")
    if found["gpus"]:
        out.print(_gpus(found["gpus"], []))
    for verdict in (*found["hosts"], *found["gpus"]):
        if verdict["cause"] != "none" and verdict["sentence"] not in found["why"]:
            out.print(f"  {escape(verdict['sentence'])}")
    show_sensors(out, found["sensors"])


def show_diagnosis(out: Console, found: dict[str, Any]) -> None:
    """A trace that was judged again: what changed when, then the incidents."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("TIME", justify="right", no_wrap=True)
    table.add_column("VERDICT", no_wrap=True)
    table.add_column("WHAT", overflow="fold")
    for moment in found["moments"]:
        at = f"{moment['at'] - found['began']:.3f} s"
        for verdict in moment["verdicts"]:
            table.add_row(at, _coloured(verdict["health"]), escape(verdict["sentence"]))
        for step, incident in moment["incidents"]:
            table.add_row(at, "", f"{incident} {step}")
        for refined in moment["refined"]:
            table.add_row(at, "", escape(refined["sentence"]))
    out.print(table)
    if not found["incidents"]:
        out.print("no incident")
    for one in found["incidents"]:
        slots = ", ".join(map(str, one["slots"]))
        end = "open at the end" if one["closed_at"] is None else f"closed {one['closed_at'] - found['began']:.3f} s"
        opened = f"opened {one['opened_at'] - found['began']:.3f} s, {end}"
        out.print(f"{one['id']}: {', '.join(one['causes'])}, slots {slots}, {opened}")
        out.print(f"  {escape(one['sentence'])}")
    if found["cut"]:
        out.print(f"note: {found['cut']}", markup=False)


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
            return [f"{_subject(subject)}: {body['what']} {value}, from {body['source']}{who}"]
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
    if body["event"] == "incident-refined":
        return [f"the cause is {body['cause']}: {body['sentence']}"]
    known = {k: v for k, v in body.items() if k not in ("event", "incident")}
    return [body["event"] + (": " + ", ".join(f"{k} {_short(v)}" for k, v in known.items()) if known else "")]


def _subject(subject: dict[str, Any]) -> str:
    match subject["kind"]:
        case "rank":
            return f"rank {subject['slot']}.{subject['incarnation']}"
        case "gpu":
            return f"{subject['uuid'][:12] or 'GPU'} at {subject['pci']}"
    return f"host {subject['name']}"


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
