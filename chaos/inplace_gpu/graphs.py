"""Whether a rank runs captured graphs, from its log: vLLM says when it captures, and with --cudagraph-metrics how many steps ran in
which mode since it last said so (every ten seconds under load)."""

import re
from collections import Counter
from collections.abc import Iterable

CAPTURED = "Graph capturing finished"
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
