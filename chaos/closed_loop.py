"""The load rules in a closed loop: `python -m chaos.closed_loop`.

Clients drive a real group through a ramp, a spike, a day and a stop: once with load rules, then with as few and with as
many ranks as the rules may choose. Beside each other: time to the first token, and rank-seconds. Every answer is compared
with the first one to the same prompt. Exit code: 0 measured, and the sizes followed; 1 not, or an error; 2 wrong usage.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from chaos.bench_report import quantile
from chaos.closed_loop_report import Asked, Loop, Moment, Run, Summary, plot, show, write_markdown
from chaos.command import end, make_model, run_command, utc_now
from chaos.load_shape import HIGH, Shape
from chaos.machine import machine, versions
from elastic.client import Answer, Tokens, random_prompts, stream
from elastic.errors import ElasticError
from healer.deployment import Deployment

FEWEST, MOST, SLOTS_PER_RANK, MAX_SEQS, VOCAB, TOKENS = 2, 6, 8, 4, 512, 24
DEADLINE_S, SAMPLE_S = 120.0, 0.5
MOST_REVERSALS = 1
"""Of the size for each peak of the load: up, and down again."""

RULES: dict[str, Any] = {
    "interval": "500ms",
    "cooldown": "3s",
    "fitMargin": 0.2,
    "signals": {
        "waiting": {"metric": "waiting", "staleAfter": "3s"},
        "kvUse": {"metric": "kvUse", "scope": "rank", "aggregate": "mean", "staleAfter": "3s"},
    },
    "rules": [
        {"kind": "targetTracking", "name": "queue", "signal": "waiting", "target": 1},
        {"kind": "targetTracking", "name": "sequences", "signal": "kvUse", "target": 0.7},
    ],
    "behavior": {
        "scaleUp": {"stabilizationWindow": "1s", "policies": [{"type": "ranks", "value": 2, "period": "3s"}]},
        "scaleDown": {"stabilizationWindow": "10s", "policies": [{"type": "ranks", "value": 2, "period": "5s"}]},
    },
}


class Options(msgspec.Struct, frozen=True):
    pace: float
    seed: int
    out: Path


class Drive:
    """One group, one run through the shape."""

    def __init__(self, deployment: Deployment, shape: Shape, prompts: Sequence[Tokens]) -> None:
        self._deployment, self._shape, self._prompts = deployment, shape, prompts
        self._began = 0.0
        self.asked: list[Asked] = []
        self.moments: list[Moment] = []
        self.problems: dict[str, None] = {}
        self._expected: dict[int, Tokens] = {}

    @property
    def _second(self) -> float:
        return time.monotonic() - self._began

    async def run(self) -> None:
        await self._deployment.start(DEADLINE_S)
        base, limits = self._deployment.gateway(), httpx.Limits(max_connections=HIGH + 4)
        self._began = time.monotonic()
        async with (
            httpx.AsyncClient(limits=limits, trust_env=False, verify=False) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for client in range(HIGH):
                tasks.create_task(self._client(http, base, client))
            tasks.create_task(self._watch())

    async def _client(self, http: httpx.AsyncClient, base: str, client: int) -> None:
        while (second := self._second) < self._shape.seconds:
            if client >= self._shape.clients(second):
                await asyncio.sleep(0.05)
                continue
            began, answer = time.monotonic(), Answer()
            await stream(http, base, self._prompts[client], TOKENS, deadline_s=DEADLINE_S, answer=answer)
            if answer.error or not answer.times:
                self.problems[f"a request failed: {answer.error or 'no token came'}"] = None
                continue
            if answer.tokens != self._expected.setdefault(client, answer.tokens):
                self.problems[f"client {client} got other tokens than before"] = None
            part = self._shape.at(second).name
            self.asked.append(Asked(round(second, 3), part, round(answer.times[0] - began, 4)))

    async def _watch(self) -> None:
        while (second := self._second) < self._shape.seconds:
            with contextlib.suppress(httpx.HTTPError):
                group = (await self._deployment.get("/status"))["group"]
                clients = self._shape.clients(second)
                self.moments.append(Moment(round(second, 3), clients, len(group["target"]), len(group["live"])))
            await asyncio.sleep(SAMPLE_S)


async def _one(name: str, model: Path, options: Options, say: Callable[[str], None], spec: dict[str, Any]) -> Run:
    ranks = spec.pop("ranks")
    target = {
        "ranks": ranks,
        "maxRanks": MOST,
        "slotsPerRank": SLOTS_PER_RANK,
        "redundantExperts": 0,
        "maxSeqs": MAX_SEQS,
        "gateway": {"port": 0},
    }
    deployment, shape = Deployment(model, target=target, spec=spec), Shape(options.pace)
    drive, keep = Drive(deployment, shape, random_prompts(HIGH, VOCAB, options.seed)), True
    say(f"{name}: {shape.seconds:.0f} s")
    try:
        await deployment.watched(drive.run())
        keep = bool(drive.problems)
        await deployment.stop()
    finally:
        end(deployment, keep=keep)
    run = Run(
        name=name,
        summary=summarise(drive.asked, drive.moments, shape),
        asked=tuple(drive.asked),
        moments=tuple(drive.moments),
        problems=tuple(drive.problems),
    )
    say(f"  p95 to the first token {run.summary.ttft_p95_s * 1000:.0f} ms, {run.summary.rank_seconds:.0f} rank-seconds")
    return run


def reversals_by_peak(moments: Sequence[Moment], shape: Shape) -> dict[str, int]:
    """How often the target size turned from growing to shrinking, by peak of the load and what follows it. Every peak that the
    size follows has one such reversal; where a change is late, it falls into the next peak's time."""
    steps = [(b.at_s, b.target - a.target) for a, b in pairwise(moments) if a.target != b.target]
    turns = [at for (_, before), (at, after) in pairwise(steps) if before > 0 > after]
    return {name: sum(begin <= at < end for at in turns) for name, begin, end in shape.peaks}


def summarise(asked: Sequence[Asked], moments: Sequence[Moment], shape: Shape) -> Summary:
    """Raises ElasticError where nothing was answered."""
    if not asked or len(moments) < 2:
        raise ElasticError("nothing was answered, so there is nothing to measure")
    first = [one.ttft_s for one in asked]
    sizes = [m.target for m in moments]
    steps = [b - a for a, b in pairwise(sizes) if a != b]
    parts = dict.fromkeys(one.part for one in asked)
    return Summary(
        requests=len(asked),
        ttft_p50_s=quantile(first, 0.5),
        ttft_p95_s=quantile(first, 0.95),
        ttft_p95_by_part_s={p: quantile([a.ttft_s for a in asked if a.part == p], 0.95) for p in parts},
        rank_seconds=sum(a.live * (b.at_s - a.at_s) for a, b in pairwise(moments)),
        smallest=min(sizes),
        largest=max(sizes),
        last=sizes[-1],
        changes=len(steps),
        reversals=sum((a > 0) != (b > 0) for a, b in pairwise(steps)),
        reversals_by_peak=reversals_by_peak(moments, shape),
    )


def followed(run: Run) -> tuple[str, ...]:
    """What of the sizes was not as the load asked for; empty: all was."""
    found = []
    if run.summary.largest < MOST - 1:
        found.append(f"at {HIGH} clients no more than {run.summary.largest} ranks were asked for")
    if run.summary.last != FEWEST:
        found.append(f"after the stop {run.summary.last} ranks are left, not {FEWEST}")
    # late ones fall into the next peak's time, so they are counted up to the end of each
    for number, peak in enumerate(run.summary.reversals_by_peak, 1):
        times = sum(list(run.summary.reversals_by_peak.values())[:number])
        if times > number * MOST_REVERSALS:
            found.append(
                f"{peak}: the size had turned around {times} times by its end, after {number} peaks of the load"
            )
    return tuple(found)


async def _loop(options: Options, out: Console) -> int:
    facts, began = machine(), utc_now()
    bounds = {"minRanks": FEWEST, "maxRanks": MOST}
    store = Deployment(Path("model"))  # a place for the model that all runs share
    try:
        model = store.root / "model"
        await make_model(model, VOCAB)
        plans: tuple[tuple[str, dict[str, Any]], ...] = (
            ("load rules", {"ranks": FEWEST, "load": RULES, "bounds": bounds}),
            (f"always {FEWEST} ranks", {"ranks": FEWEST}),
            (f"always {MOST} ranks", {"ranks": MOST}),
        )
        runs = [await _one(name, model, options, out.print, spec) for name, spec in plans]
    finally:
        store.end()
    loop = Loop(
        machine=facts,
        versions=versions(),
        began=began,
        load_after=os.getloadavg(),
        pace=options.pace,
        config={"max_seqs": MAX_SEQS, "tokens": TOKENS, "slots_per_rank": SLOTS_PER_RANK},
        rules=RULES,
        problems=(*followed(runs[0]), *(f"{r.name}: {p}" for r in runs for p in r.problems)),
        runs=tuple(runs),
    )
    show(loop, out)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(msgspec.json.encode(loop) + b"\n")
    write_markdown(loop, options.out.with_suffix(".md"))
    plot(loop, options.out.with_suffix(".svg"))
    out.print(f"written to {options.out}, .md and .svg")
    return int(bool(loop.problems))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.closed_loop", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pace", type=float, default=1.0, help="2: everything twice as slow; default: %(default)g")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("docs/results/autoscale.json"), help="default: %(default)s")
    given = parser.parse_args(arguments)
    if not 0.1 <= given.pace <= 100:
        parser.error("--pace: expected 0.1 to 100")
    options = Options(given.pace, given.seed, given.out)
    return run_command(lambda: _loop(options, Console(highlight=False, width=100)))


if __name__ == "__main__":
    sys.exit(main())
