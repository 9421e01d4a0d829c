"""`healer-chaos report`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from elastic.errors import ElasticError
from healer.tables import console

WORSE = 1


def report(
    paths: Annotated[list[Path], typer.Argument(help="What `healer-chaos run` wrote; two reports with --compare.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in that directory.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Say what differs between two reports.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a page and a JSON file of what a run left behind.

    With --compare: exit code 1 where something got worse.

    Example: healer-chaos report chaos-runs/last
    """
    try:
        code = _compare(paths, json) if compare else _report(paths, out, json)
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        print(
            f"error: {error.name} is not installed, expected it for a report: pip install 'healer[chaos]'",
            file=sys.stderr,
        )
        raise typer.Exit(2) from None
    raise typer.Exit(code)


def _report(paths: list[Path], out: Path | None, json: bool) -> int:
    from chaos.report import page, source, summary

    if len(paths) != 1:
        raise ElasticError("expected one directory, or two reports with --compare")
    read = source.read(paths[0])
    made = summary.summarise(read)
    out = out or paths[0] / "report.html"
    try:
        page.write(read, made, out)
    except OSError as error:
        raise ElasticError(f"{out}: cannot be written: {error.strerror}") from None
    if json:
        print(out.with_suffix(".json").read_text(), end="")
    else:
        print(f"{made.verdict}: {out}")
    return 0


def _compare(paths: list[Path], json: bool) -> int:
    import msgspec

    from chaos.report import compare

    if len(paths) != 2:
        raise ElasticError("--compare expects two reports: healer-chaos report --compare BEFORE AFTER")
    rows = compare.compare(*(compare.load(path) for path in paths))
    if json:
        print(msgspec.json.encode(rows).decode())
    else:
        compare.show(rows, console())
    return WORSE if any(row.judgement == "worse" for row in rows) else 0
