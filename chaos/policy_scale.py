"""What the rules cost: `python -m chaos.policy_scale`.

Groups of 100 to 10,000 ranks, 20 signals of each rank a second, 500 load rules, 500 healing rules. Each size is measured in a
process of its own: the processor time of one second's work (filing the readings, putting them together, judging every load
rule), the memory, and the processor time from conclusive evidence to a decision (`chaos.decision_scale`).
The text of the endpoints is parsed apart, since the daemon parses only the lines that it needs.
"""

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from chaos.decision_scale import Reaction, react
from chaos.decision_scale import rules as healing_rules
from chaos.machine import Machine, machine, versions
from elastic.controller.records import GroupStatus, SlotStatus
from elastic.protocol import Counters
from elastic.view import Member
from healer.clock import SystemClock
from healer.load.autoscaler import Autoscaler
from healer.load.decision import Stance
from healer.load.exposition import Endpoint, Kind, Query
from healer.load.readings import Reading
from healer.policy.load import parse_policy
from healer.policy.schema import Policy

SIZES = (100, 300, 1024, 3000, 10_000)
SIGNALS, RULES = 20, 500
SECONDS = 30
CPU_AIM_PERCENT, MEMORY_AIM_MB, AIM_RANKS = 10.0, 300.0, 1024
DECISION_AIM_MS = 50.0


class Point(msgspec.Struct, frozen=True):
    ranks: int
    second_ms: float
    """Processor time of one second's work, the mean."""
    worst_ms: float
    parse_ms: float
    """Processor time to read the text of all ranks' signals once, in addition; not the first time, which learns the
    series."""
    rss_mb: float
    reaction: Reaction

    @property
    def cpu_percent(self) -> float:
        """Of one core, at one evaluation a second; parsing included."""
        return (self.second_ms + self.parse_ms) / 10


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    versions: dict[str, str]
    signals: int
    rules: int
    seconds: int
    points: tuple[Point, ...]


def policy(ranks: int) -> Policy:
    signals: dict[str, Any] = {
        f"s{i}": {
            "source": "prometheus",
            "url": "http://127.0.0.1:9/metrics",
            "metric": f"vllm:signal_{i}",
            "scope": "rank",
            "rankLabel": "engine",
            "aggregate": ("sum", "mean", "max")[i % 3],
        }
        for i in range(SIGNALS)
    }
    rules: list[dict[str, Any]] = []
    for i in range(RULES):
        name = f"s{i % SIGNALS}"
        if i % 2:
            rules.append({"kind": "targetTracking", "name": f"r{i}", "signal": name, "target": 5.0})
        else:
            other, limit = f"s{(i * 7 + 3) % SIGNALS}", 100.0 * ranks
            when = f"{name} > {limit} && {other} / ranks > 3.0"
            rules.append({"kind": "threshold", "name": f"r{i}", "when": when, "scale": "up", "for": "30s"})
    target = {"kind": "embedded", "checkpoint": "x", "runDir": "x", "slotsPerRank": 8}
    spec = {"target": target | {"ranks": ranks, "maxRanks": ranks}, "load": {"signals": signals, "rules": rules}}
    spec["healing"] = {"rules": healing_rules(RULES, ranks)}
    document = {"apiVersion": "healer/v1", "kind": "Policy", "metadata": {"name": "scale"}, "spec": spec}
    return parse_policy(msgspec.json.encode(document).decode(), name="scale", base=Path("/tmp"))


def measure(ranks: int, seconds: int) -> Point:
    """In this process; `rss_mb` is all that it has."""
    draw, clock = random.Random(1), SystemClock()
    live = tuple(range(ranks))
    slots = tuple(SlotStatus(s, "live", Member(s, 0, 1, 1, ""), 0.1, 1, 0, 0, Counters(), 8) for s in live)
    group = GroupStatus("scale", 1, live, live, ranks, None, "", 0, ranks - 1, slots)
    made = policy(ranks)
    scaler = Autoscaler(made, clock, lambda: group, lambda: "", lambda: "")
    costs, now = [], 1000.0
    for _ in range(seconds):
        now += 1.0
        readings = [Reading(f"s{i}", now, {slot: draw.random() * 10 for slot in live}) for i in range(SIGNALS)]
        began = time.process_time()
        scaler.readings.add(readings)
        decision = scaler.tick(now)
        costs.append((time.process_time() - began) * 1000)
        assert decision is not None
        assert not any(vote.stance is Stance.MISSING for vote in decision.votes)
    rss_mb = psutil.Process().memory_info().rss / 1e6
    parse_ms = _parse_ms(ranks, draw)
    return Point(ranks, sum(costs) / len(costs), max(costs), parse_ms, rss_mb, react(made, ranks))


def _parse_ms(ranks: int, draw: random.Random) -> float:
    lines = [
        f'vllm:signal_{i}{{engine="{slot}",model_name="m"}} {draw.random() * 10}'
        for i in range(SIGNALS)
        for slot in range(ranks)
    ]
    queries = [Query(f"s{i}", f"vllm:signal_{i}", Kind.GAUGE, slot_label="engine") for i in range(SIGNALS)]
    # one endpoint for each 100 ranks: no page is larger than what the scraper takes
    pages = ["\n".join(lines[k :: max(1, ranks // 100)]) for k in range(max(1, ranks // 100))]
    endpoints = [Endpoint(queries) for _ in pages]
    costs = []
    for _ in range(3):
        began = time.process_time()
        for endpoint, page in zip(endpoints, pages, strict=True):
            endpoint.read(page, 0.0)
        costs.append((time.process_time() - began) * 1000)
    return min(costs)


def show(found: Scale, out: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in (
        "RANKS",
        "A SECOND'S WORK",
        "WORST",
        "PARSING",
        "OF ONE CORE",
        "MEMORY",
        "ONE DIES",
        "WORST",
        "ALL DIE",
        "WORST",
    ):
        table.add_column(name, justify="right")
    for p in found.points:
        table.add_row(
            f"{p.ranks:,}", f"{p.second_ms:.1f} ms", f"{p.worst_ms:.1f} ms", f"{p.parse_ms:.1f} ms",
            f"{p.cpu_percent:.1f} %", f"{p.rss_mb:.0f} MB",
            *(f"{value:.1f} ms" for value in msgspec.structs.astuple(p.reaction)),
        )  # fmt: skip
    out.print(table)


def plot(found: Scale, out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    ranks = [p.ranks for p in found.points]
    axis.loglog(ranks, [p.second_ms for p in found.points], marker="o", label="one second's work, mean")
    axis.loglog(ranks, [p.worst_ms for p in found.points], marker=".", label="worst second")
    axis.loglog(ranks, [p.parse_ms for p in found.points], marker="s", label="parsing all endpoints, in addition")
    axis.loglog(ranks, [p.reaction.one_worst_ms for p in found.points], marker="v", label="decision, one dies, worst")
    axis.loglog(ranks, [p.reaction.all_worst_ms for p in found.points], marker="^", label="decision, all die, worst")
    axis.axhline(CPU_AIM_PERCENT * 10, color="grey", linestyle=":", label=f"{CPU_AIM_PERCENT:g} % of one core")
    axis.set_xlabel(f"ranks, {found.signals} signals of each a second, {found.rules} rules")
    axis.set_ylabel("processor time, ms")
    axis.legend(fontsize="small")
    figure.savefig(out, format="svg", metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 within the aims; 1 not; 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m chaos.policy_scale", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(SIZES), help="sizes; default: %(default)s")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="simulated, of each size; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("docs/results/policy-scale.json"), help="default: %(default)s")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        print(msgspec.json.encode(measure(given.one, given.seconds)).decode())
        return 0
    facts, points = machine(), []
    for ranks in given.ranks:
        command = [sys.executable, "-m", "chaos.policy_scale", "--one", str(ranks), "--seconds", str(given.seconds)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        points.append(msgspec.json.decode(done.stdout, type=Point))
    found = Scale(
        machine=facts, versions=versions(), signals=SIGNALS, rules=RULES, seconds=given.seconds, points=tuple(points)
    )
    out = Console(highlight=False, width=100)
    show(found, out)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    plot(found, given.out.with_suffix(".svg"))
    out.print(f"written to {given.out} and {given.out.with_suffix('.svg')}")
    within = [p for p in points if p.ranks <= AIM_RANKS]
    late = any(max(p.reaction.one_worst_ms, p.reaction.all_worst_ms) > DECISION_AIM_MS for p in within)
    return int(late or any(p.cpu_percent > CPU_AIM_PERCENT or p.rss_mb > MEMORY_AIM_MB for p in within))


if __name__ == "__main__":
    sys.exit(main())
