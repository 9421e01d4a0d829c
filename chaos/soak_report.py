"""What a soak found: requests by outcome, faults and how long each took to heal, and what grew."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from chaos.machine import Machine

Request = Literal["right", "wrong", "failed"]

WATCHED_S = 120.0
"""A process that lived for less says nothing about growth."""
FEWEST = 12
"""Readings without which nothing is said either."""
SETTLED_SHARE, SETTLED_S = 0.25, 60.0
"""Of a process's life, and at least so long: from then on it has booted, on a busy machine too, and loaded what it needs."""
GROWTH_SHARE, GROWTH_MB, GROWTH_FDS, GROWTH_THREADS = 0.10, 10.0, 4, 2
"""More than both of the first two, or than one of the others, is too much."""


class Hit(msgspec.Struct, frozen=True):
    """One fault."""

    at_s: float
    fault: str
    what: str
    healed_s: float | None
    """Until the group was whole; None: it was not."""
    problem: str


class Reading(msgspec.Struct, frozen=True):
    """One process at one moment."""

    at_s: float
    kind: str
    pid: int
    started: float
    """Seconds since the epoch: a pid is given again."""
    rss_mb: float
    fds: int
    threads: int
    ranks: int = 0
    """Live ranks at that moment: with each that a process talks to, it holds more. 0: ranks came or went."""


class Growth(msgspec.Struct, frozen=True):
    """One process over its settled life, while as many ranks ran as most of the time: the most that it held in the first
    quarter, the least in the last. What it holds comes and goes with its peers and with each healing; what leaks stays."""

    kind: str
    pid: int
    lived_s: float
    rss_mb: tuple[float, float]
    fds: tuple[float, float]
    threads: tuple[float, float]

    @property
    def too_much(self) -> bool:
        mb, fds, threads = (b - a for a, b in (self.rss_mb, self.fds, self.threads))
        grew = mb > GROWTH_MB and mb > GROWTH_SHARE * self.rss_mb[0]
        return grew or fds > GROWTH_FDS or threads > GROWTH_THREADS

    @property
    def sentence(self) -> str:
        return (
            f"{self.kind} {self.pid} grew in {self.lived_s:.0f} s: {self.rss_mb[0]:.1f} to {self.rss_mb[1]:.1f} MB, "
            f"{self.fds[0]:g} to {self.fds[1]:g} descriptors, {self.threads[0]:g} to {self.threads[1]:g} threads"
        )


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    versions: dict[str, str]
    began: str
    load_after: tuple[float, float, float]
    hours: float
    every_s: float
    seed: int
    requests: dict[str, int]
    longest_silence_s: float
    """That any client had between two tokens."""
    faults: tuple[Hit, ...]
    growth: tuple[Growth, ...]
    problems: tuple[str, ...]


def grown(readings: Sequence[Reading]) -> tuple[Growth, ...]:
    """Every process that was watched for long enough."""
    lives: dict[tuple[int, float], list[Reading]] = defaultdict(list)
    for reading in readings:
        lives[reading.pid, reading.started].append(reading)
    found = []
    for (pid, _), life in lives.items():
        lived_s = life[-1].at_s - life[0].at_s
        if lived_s < WATCHED_S:
            continue
        settled = [r for r in life if r.at_s >= life[0].at_s + max(SETTLED_S, SETTLED_SHARE * lived_s)]
        steady = [r.ranks for r in settled if r.ranks]
        usual = statistics.mode(steady) if steady else 0
        alike = [r for r in settled if r.ranks == usual]
        if not usual or len(alike) < FEWEST:
            continue
        quarter = len(alike) // 4
        first, last = alike[:quarter], alike[-quarter:]

        def pair(values: str, first: list[Reading] = first, last: list[Reading] = last) -> tuple[float, float]:
            return (
                max(getattr(r, values) for r in first),
                min(getattr(r, values) for r in last),
            )

        found.append(Growth(life[0].kind, pid, lived_s, pair("rss_mb"), pair("fds"), pair("threads")))
    return tuple(found)


def write_markdown(soak: Soak, path: Path) -> None:
    healed = [h.healed_s for h in soak.faults if h.healed_s is not None]
    by_fault: dict[str, list[float]] = defaultdict(list)
    for hit in soak.faults:
        if hit.healed_s is not None:
            by_fault[hit.fault].append(hit.healed_s)
    lines = [
        "# Soak",
        "",
        f"{soak.hours * 60:.0f} minutes, a fault about every {soak.every_s:g} s (seed {soak.seed}), begun {soak.began}, on "
        f"{soak.machine.cores} cores ({soak.machine.cpu}), load {soak.machine.load[0]:.1f} by other work at its beginning. "
        "Made by `python -m chaos.soak`.",
        "",
        f"Requests: {soak.requests.get('right', 0)} right, {soak.requests.get('wrong', 0)} wrong, "
        f"{soak.requests.get('failed', 0)} failed. The longest silence of a client: {soak.longest_silence_s:.2f} s. "
        f"Faults: {len(soak.faults)}, healed: {len(healed)}.",
        "",
        "| Fault | Times | Median until whole, s | Longest, s |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {len(times)} | {statistics.median(times):.2f} | {max(times):.2f} |"
        for name, times in sorted(by_fault.items())
    ]
    lines += [
        "",
        "Of each process that was watched for two minutes or more, the most that it held in the first quarter of its settled life "
        "and the least in the last, while the usual number of ranks ran:",
        "",
        "| Process | Watched, s | Memory, MB | Descriptors | Threads |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {g.kind} {g.pid} | {g.lived_s:.0f} | {g.rss_mb[0]:.1f} to {g.rss_mb[1]:.1f} | {g.fds[0]:g} to {g.fds[1]:g} "
        f"| {g.threads[0]:g} to {g.threads[1]:g} |"
        for g in sorted(soak.growth, key=lambda g: (g.kind, -g.lived_s))
    ]
    lines += ["", "Problems:" if soak.problems else "No problem was found.", ""]
    lines += [f"- {problem}" for problem in soak.problems]
    path.write_text("\n".join(lines).rstrip() + "\n")
