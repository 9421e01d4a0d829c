"""What `healer policy explain`, `replay` and `diff` print: tables that fit 100 columns."""

import difflib
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from healer.load.decision import ScaleDecision
from healer.policy.explain import Explained
from healer.policy.replay import Replayed, Row


class Difference(msgspec.Struct, frozen=True):
    """A row that only one of two policies has."""

    only: str
    """`old` or `new`."""
    row: Row


def differences(old: Replayed, new: Replayed, *, every: bool = False) -> Iterator[Difference]:
    """By time. Rows that say the same within the same second count as the same. `every`: also of rows that do not matter."""
    before_rows, after_rows = ([row for row in one.rows if every or row.matters] for one in (old, new))
    before, after = ([(round(row.at_s), *row.key) for row in rows] for rows in (before_rows, after_rows))
    found: list[Difference] = []
    for op, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if op != "equal":
            found += [Difference("old", row) for row in before_rows[a:b]]
            found += [Difference("new", row) for row in after_rows[c:d]]
    yield from sorted(found, key=lambda one: one.row.at_s)


def show_replay(out: Console, replay: Replayed, *, every: bool) -> None:
    rows = [row for row in replay.rows if every or row.matters]
    table = _table("AT", "WHAT", "RULE", "WHY")
    for row in rows:
        table.add_row(f"{row.at_s:.1f} s", row.what, escape(row.rule or "-"), escape(row.sentence))
    if rows:
        out.print(table)
    else:
        out.print("nothing would have been done" + ("" if every else "; --all shows what was considered"))
    _totals(out, replay)


def show_difference(out: Console, old: Replayed, new: Replayed, *, every: bool) -> None:
    found = list(differences(old, new, every=every))
    table = _table("AT", "ONLY", "WHAT", "RULE", "WHY")
    for one in found:
        row, colour = one.row, "red" if one.only == "old" else "green"
        table.add_row(
            f"{row.at_s:.1f} s", f"[{colour}]{one.only}[/]", row.what, escape(row.rule or "-"), escape(row.sentence)
        )
    if found:
        out.print(table)
    else:
        out.print("both policies would have done " + ("and said the same" if every else "the same"))
    for name, replay in (("old", old), ("new", new)):
        out.print(f"{name}: ", end="")
        _totals(out, replay)


def show_explained(out: Console, told: Explained) -> None:
    if told.scaling is not None:
        return _scaling(out, told.scaling, told.missing)
    table = _table("RULE", "OUTCOME", "WHY")
    for one in told.rules:
        table.add_row(escape(one.rule), one.outcome, escape("; ".join(map(str, one.because)) or "-"))
    out.print(table)
    if told.assumed:
        out.print(f"taken to be: {escape(', '.join(f'{key}={value}' for key, value in told.assumed.items()))}")
    if told.ladder:
        out.print(
            f"actions: {', '.join(told.ladder)} (bounds, guards and what was tried before are not looked at here)"
        )
    elif not told.asks:
        out.print("no rule matches: nothing is done, since the rank is not unhealthy")
    else:
        out.print("no rule matches: a human is asked")
    return None


def _scaling(out: Console, decision: ScaleDecision, missing: tuple[str, ...]) -> None:
    table = _table("RULE", "STANCE", "WANTS", "WHY")
    for vote in decision.votes:
        table.add_row(escape(vote.rule), vote.stance.value, str(vote.wanted), escape(vote.text))
    if decision.votes:
        out.print(table)
    if missing:
        out.print(f"missing, since the event gives no value: {', '.join(missing)} (a number, or {missing[0]}=idle)")
    out.print(f"{decision.reason.value}: {escape(decision.sentence)}")


def _totals(out: Console, replay: Replayed) -> None:
    out.print(
        f"{escape(replay.policy)}: {_count(replay.actions, 'action')} in {replay.span_s:.0f} s, "
        f"{_count(replay.calls, 'call')} for a human, "
        f"{_count(max(0, len(replay.sizes) - 1), 'change')} of size, {_count(replay.reversals, 'reversal')}, "
        f"{replay.rank_hours:.2f} rank-hours"
    )
    for note in replay.notes:
        out.print(f"  note: {escape(note)}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, justify="right" if name in ("AT", "WANTS") else "left", overflow="fold")
    return table
