"""What the start of a rank is made of: the silences in its log, all its processes together, since one starts the next. vLLM stamps
its lines to a second."""

import re
import time
from collections.abc import Iterable, Iterator

from chaos.vllm_gpu.records import Gap

LEAST_S = 2.0
SHOWN_CHARS = 80
_LINE = re.compile(r"\((?P<process>\w+) pid=\d+\) \w+ (?P<at>\d\d-\d\d \d\d:\d\d:\d\d) (?:\[[^]]*\] )?(?P<text>.*)")


def _stamps(lines: Iterable[str], year: int) -> Iterator[tuple[float, str, str]]:
    for line in lines:
        if found := _LINE.match(line):
            at = time.mktime(time.strptime(f"{year}-{found['at']}", "%Y-%m-%d %H:%M:%S"))
            yield at, found["process"], found["text"].strip()[:SHOWN_CHARS] or "its banner"


def gaps(lines: Iterable[str], launched: float, ready_s: float, most: int = 6) -> tuple[Gap, ...]:
    """Of a log from its launch (seconds of the wall clock) until `ready_s` later: the longest silences, in their order."""
    last, found = launched, []
    stamps = sorted(_stamps(lines, time.localtime(launched).tm_year), key=lambda stamp: stamp[0])
    for at, process, text in stamps:
        if at > launched + ready_s + 1:
            break
        if at - last >= LEAST_S:
            found.append(Gap(process, last - launched, at - last, text))
        last = max(last, at)
    longest = sorted(found, key=lambda gap: -gap.took_s)[:most]
    return tuple(sorted(longest, key=lambda gap: gap.at_s))
