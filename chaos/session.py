"""What `healer-chaos run` does: its scenarios or its random ones, told line by line, with a campaign's record at the end."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from chaos.campaign import Troupe, patience, write_campaign
from chaos.minimise import minimise
from chaos.random_faults import drawn
from chaos.records import Campaign, Run
from chaos.runner import Order
from chaos.scenario_file import Read

A_RUN = {"faults": 5, "gpus": 5, "honest": 20}
"""Faults, by the lot of a random campaign: enough to meet, few enough to look through."""
FAILURES = 5
"""A random campaign ends after so many: they may all be one."""


class Wanted(msgspec.Struct, frozen=True):
    read: tuple[Read, ...]
    random: bool
    hours: float
    faults: int
    lot: str
    """Of `chaos.random_faults.LOTS`."""
    seed: int
    patience: float | None
    """None: from the load of the machine, anew for each run."""
    minimise: bool
    restarts: int
    command: tuple[str, ...]


class Session:
    def __init__(self, wanted: Wanted, out: Path, work: Path, say: Callable[[str], None]) -> None:
        self._wanted, self._out, self._work, self._say = wanted, out, work, say
        self._runs: list[Run] = []

    async def run(self) -> Campaign:
        """Raises ElasticError where nothing can be started at all."""
        wanted, began, wall = self._wanted, time.monotonic(), time.time()
        try:
            async with Troupe(self._work, self._say, wanted.restarts) as troupe:
                async for order in self._orders(began):
                    await self._one(order, troupe)
        finally:
            campaign = write_campaign(self._out, self._runs, wanted.command, wanted.seed, wall)
        self._tell(time.monotonic() - began)
        return campaign

    async def _one(self, order: Order, troupe: Troupe) -> None:
        out = self._out / order.id
        run = await troupe.play(order, out)
        self._say(_line(len(self._runs) + 1, len(self._wanted.read), run))
        failed = run.verdict in ("failed", "error")
        if failed:
            self._say(f"      {run.why}\n      again: {' '.join(run.command)}")
        if failed and self._wanted.minimise and run.faults > 1:
            run = await minimise(order, run, out, troupe, self._say)
            if run.minimal:
                self._say(f"      least: {', '.join(run.minimal)}; again: {' '.join(run.minimal_command)}")
        self._runs.append(run)

    async def _orders(self, began: float) -> AsyncIterator[Order]:
        wanted = self._wanted
        if not wanted.random:
            # those that want the same group one after the other
            for read in sorted(wanted.read, key=lambda r: (r.scenario.spec.group.fresh, r.scenario.spec.group.key)):
                again = ("healer-chaos", "run", str(read.path), "--seed", str(wanted.seed))
                yield Order(read.scenario, read.text, str(read.path), wanted.seed, again, patience(wanted.patience))
            return
        number = 0
        while not self._enough(began):
            number += 1
            scenario, text = drawn(wanted.seed, number, A_RUN[wanted.lot], wanted.lot)
            again = ("healer-chaos", "run", "SCENARIO", "--seed", str(wanted.seed))
            order = Order(scenario, text, "random", wanted.seed, again, patience(wanted.patience))
            path = self._out / order.id / "scenario.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            order.command = ("healer-chaos", "run", str(path), "--seed", str(wanted.seed))
            yield order

    def _enough(self, began: float) -> bool:
        wanted = self._wanted
        if sum(run.verdict in ("failed", "error") for run in self._runs) >= FAILURES:
            self._say(f"ended after {FAILURES} failures")
            return True
        if self._runs and self._runs[-1].verdict == "skipped":
            return True  # all of a random campaign want the same group
        done = sum(run.faults for run in self._runs)
        over = wanted.hours and time.monotonic() - began >= wanted.hours * 3600
        return bool(over or (wanted.faults and done >= wanted.faults))

    def _tell(self, took_s: float) -> None:
        runs, counts = self._runs, Counter(run.verdict for run in self._runs)
        outcomes: Counter[str] = Counter()
        for run in runs:
            outcomes.update(run.ledger.outcomes)
        self._say("")
        for run in runs:
            if run.verdict == "skipped":
                self._say(f"skipped {run.scenario.name}: {run.why}")
        sent = sum(run.ledger.sent for run in runs)
        self._say(
            f"{len(runs)} runs in {took_s:.0f} s: "
            + ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))
        )
        self._say(
            f"{sum(run.faults for run in runs)} faults; {sent} requests: "
            + (", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items())) or "none")
        )
        self._say(f"records: {self._out}; `healer-chaos report {self._out}` makes a page of them")


def _line(number: int, of: int, run: Run) -> str:
    whole = next((e.found for e in run.expectations if e.name == "whole-within"), "")
    healed = f"whole after {whole}" if whole.endswith(" s") else whole
    total = f"{number:3d} of {of}" if of else f"{number:3d}"
    facts = [healed, f"{run.ledger.sent} requests", f"longest gap {run.ledger.longest_gap_s:.2f} s"]
    told = ", ".join(facts) if run.verdict in ("passed", "failed") else run.why
    return f"{total}  {run.verdict:7} {run.ended - run.began:6.1f} s  {run.scenario.name}: {told}"
