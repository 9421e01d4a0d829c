"""What a rank's log says: when vLLM captures graphs, with --cudagraph-metrics how many steps ran in which mode since it last said so
(every ten seconds under load), and what a shrink loaded."""

import re
from collections import Counter
from collections.abc import Iterable

CAPTURED = "Graph capturing finished"
_LOADED = re.compile(r"(?P<experts>\d+) experts reloaded, (?P<bytes>\d+) bytes here")
"""elastic.vllm.worker.member, at the end of a shrink."""
_ROW = re.compile(r"\| *\d+ *\| *\d+ *\| *\d+ *\| *(?P<mode>[A-Z_]+) *\| *(?P<count>\d+) *\|")


def captures(lines: Iterable[str]) -> int:
    """How often this rank captured its graphs: once, at its start."""
    return sum(CAPTURED in line for line in lines)


def modes(lines: Iterable[str]) -> dict[str, int]:
    """Steps by mode, such as FULL, PIECEWISE and NONE (eager), of all tables in these lines."""
    found: Counter[str] = Counter()
    for line in lines:
        if row := _ROW.search(line):
            found[row["mode"]] += int(row["count"])
    return dict(found)


def reloaded(lines: Iterable[str]) -> tuple[int, float]:
    """Experts, of all layers, that nobody had after a death and that the group loaded again, and what this rank loaded, in MB."""
    found = [loaded for line in lines if (loaded := _LOADED.search(line))]
    return sum(int(one["experts"]) for one in found), sum(int(one["bytes"]) for one in found) / 1e6
