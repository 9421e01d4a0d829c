"""A long run under random faults: `python -m chaos.soak --hours 2 --every 20 --seed 1`.

Clients ask without a pause while ranks and the daemon are killed and stopped and the group is scaled. Every answer is compared
with the fault-free one; memory and descriptors of every process are watched. Exit code: 0 nothing lost, and nothing grew;
1 something was, or an error; 2 wrong usage.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from rich.console import Console

from chaos import inject
from chaos.command import end, make_model, run_command, utc_now, write_json
from chaos.machine import machine, versions
from chaos.soak_report import Growth, Hit, Reading, Request, Soak, grown, write_markdown
from elastic.client import Answer, Tokens, Traffic, random_prompts, stream
from elastic.errors import ElasticError
from elastic.view import Member
from healer.deployment import Deployment, eventually

RANKS, MAX_RANKS, SLOTS_PER_RANK, VOCAB = 4, 6, 8, 512
CLIENTS, TOKENS, PROMPTS = 8, 48, 32
DEADLINE_S, SAMPLE_S = 180.0, 2.0
HEAL_S = 240.0
"""The daemon starts a replacement three times, for 60 s each (`healing.deadlines.prepare`), before it asks for another way."""
SPREAD = 0.5
"""A fault comes at the interval, give or take this share of it."""


class Options(msgspec.Struct, frozen=True):
    hours: float
    every_s: float
    seed: int
    out: Path


class Clients:
    """Each asks one prompt after the other; every request is compared with what it must be."""

    def __init__(self, base: str, prompts: Sequence[Tokens], expected: Sequence[Tokens], draw: random.Random) -> None:
        self.requests: Counter[str] = Counter()
        """By `Request`."""
        self.problems: list[str] = []
        self.longest_silence_s = 0.0
        self._base, self._prompts, self._expected, self._draw = base, prompts, expected, draw
        self._go_on = True

    def stop(self) -> None:
        """Let each finish what it reads."""
        self._go_on = False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=CLIENTS + 4)
        async with httpx.AsyncClient(limits=limits, trust_env=False) as client, asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(self._ask(client))

    async def _ask(self, client: httpx.AsyncClient) -> None:
        while self._go_on:
            i, answer = self._draw.randrange(len(self._prompts)), Answer()
            await stream(client, self._base, self._prompts[i], TOKENS, deadline_s=DEADLINE_S, answer=answer)
            self.longest_silence_s = max(self.longest_silence_s, answer.longest_gap_s)
            if answer.error is not None:
                self._note("failed", f"prompt {i}: {answer.error}")
                await asyncio.sleep(1.0)
            elif answer.tokens != self._expected[i] or answer.finish != "length":
                self._note(
                    "wrong", f"prompt {i}: {len(answer.tokens)} tokens, finish {answer.finish!r}, not as expected"
                )
            else:
                self.requests["right"] += 1

    def _note(self, outcome: Request, text: str) -> None:
        self.requests[outcome] += 1
        self.problems.append(f"request {outcome}: {text}")


class Faults:
    """What may happen to a deployment. Each returns when it has been done, not when it is healed."""

    def __init__(self, deployment: Deployment, draw: random.Random) -> None:
        self._deployment, self._draw = deployment, draw
        self.target = list(range(RANKS))
        self.hurt: list[Member] = []
        """Ranks that somebody must replace."""

    @property
    def all(self) -> dict[str, Callable[[], Awaitable[str]]]:
        return {
            "kill a rank": self._kill,
            "stop a rank": self._stop,
            "kill two ranks": self._kill_two,
            "kill a rank, then another": self._kill_then_kill,
            "kill the daemon": self._kill_daemon,
            "kill a rank, then the daemon": self._kill_rank_and_daemon,
            "stop the daemon for a while": self._stop_daemon,
            "scale": self._scale,
        }

    def _slots(self, count: int) -> list[int]:
        return sorted(self._draw.sample(sorted(inject.living_ranks(self._deployment.run_dir)), count))

    async def _kill(self) -> str:
        slots = self._slots(1)
        self._hurt(inject.kill(self._deployment.run_dir, slots))
        return f"slot {slots[0]}"

    def _hurt(self, injections: Sequence[inject.Injection]) -> None:
        self.hurt += [injection.member for injection in injections]

    async def _stop(self) -> str:
        slots = self._slots(1)
        self._hurt(inject.stop(self._deployment.run_dir, slots))
        return f"slot {slots[0]}"

    async def _kill_two(self) -> str:
        slots = self._slots(2)
        self._hurt(inject.kill(self._deployment.run_dir, slots))
        return f"slots {slots}"

    async def _kill_then_kill(self) -> str:
        first, after_s = await self._kill(), self._draw.uniform(0.0, 3.0)
        await asyncio.sleep(after_s)
        return f"{first}, {after_s:.2f} s later {await self._kill()}"

    async def _kill_daemon(self) -> str:
        self._deployment.kill_daemon()
        self._deployment.spawn(write=False)
        return ""

    async def _kill_rank_and_daemon(self) -> str:
        # into the release and cover of a few tens of milliseconds, or into the refill of seconds
        what, after_s = (
            await self._kill(),
            self._draw.choice([self._draw.uniform(0.0, 0.05), self._draw.uniform(0.0, 3.0)]),
        )
        await asyncio.sleep(after_s)
        await self._kill_daemon()
        return f"{what}, the daemon {after_s:.3f} s later"

    async def _stop_daemon(self) -> str:
        daemon, for_s = self._deployment.daemon, self._draw.uniform(0.5, 4.0)
        assert daemon is not None
        daemon.send_signal(signal.SIGSTOP)
        await asyncio.sleep(for_s)
        daemon.send_signal(signal.SIGCONT)
        return f"{for_s:.1f} s"

    async def _scale(self) -> str:
        sizes = [n for n in range(RANKS - 1, MAX_RANKS + 1) if n != len(self.target)]
        size = self._draw.choice(sizes)
        answer = await self._deployment.post("/scale", {"ranks": size})
        if answer.is_error:
            raise ElasticError(f"the daemon refused {size} ranks: {answer.text}")
        self.target = answer.json()["target"]
        return f"to {size} ranks"


class Run:
    def __init__(self, options: Options, deployment: Deployment, say: Callable[[str], None]) -> None:
        self._options, self._deployment, self._say = options, deployment, say
        self._draw = random.Random(options.seed)
        self._began = 0.0
        self.hits: list[Hit] = []
        self.readings: list[Reading] = []
        self.problems: list[str] = []

    async def soak(self) -> Clients:
        """Raises ElasticError where the group does not even serve without a fault."""
        deployment, prompts = self._deployment, random_prompts(PROMPTS, VOCAB, self._options.seed)
        await deployment.start(HEAL_S)
        warm = await Traffic(deployment.gateway(), prompts, TOKENS).run()
        if failed := [a.error for a in warm if a.error]:
            raise ElasticError(f"without any fault: {failed[0]}")
        clients = Clients(deployment.gateway(), prompts, [a.tokens for a in warm], random.Random(self._options.seed))
        self._began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(clients.run())
            watching = tasks.create_task(self._watch())
            try:
                await self._hurt(Faults(deployment, self._draw))
            finally:
                clients.stop()
                await asking
                watching.cancel()
        return clients

    async def _hurt(self, faults: Faults) -> None:
        end = self._began + self._options.hours * 3600
        while (now := time.monotonic()) < end:
            name = self._draw.choice(sorted(faults.all))
            what, healed_s, problem = "", None, ""
            try:
                faults.hurt.clear()
                what = await faults.all[name]()
                healed_s = await self._healed(faults)
            except ElasticError as error:
                problem = f"{name} {what} at {now - self._began:.0f} s: {error}"
                self.problems.append(problem)
            self.hits.append(Hit(at_s=now - self._began, fault=name, what=what, healed_s=healed_s, problem=problem))
            shown = f"whole after {healed_s:.2f} s" if healed_s is not None else f"NOT HEALED: {problem}"
            self._say(f"{now - self._began:7.1f} s  {name} {what}: {shown}")
            if problem:
                return
            pause_s = self._options.every_s * self._draw.uniform(1 - SPREAD, 1 + SPREAD)
            await asyncio.sleep(max(0.0, min(end, now + pause_s) - time.monotonic()))

    async def _healed(self, faults: Faults) -> float:
        began, target = time.monotonic(), faults.target

        async def whole() -> bool | None:
            status = await self._deployment.get("/status")
            ranks = inject.living_ranks(self._deployment.run_dir)
            good = status["state"] == "ok" and status["group"]["live"] == target and not status["group"]["sequence"]
            replaced = not any(ranks.get(member.slot) == member for member in faults.hurt)
            return True if good and replaced and sorted(ranks) == target else None

        await eventually(whole, f"slots {target} serve", HEAL_S)
        return time.monotonic() - began

    async def _watch(self) -> None:
        while True:
            for each in await asyncio.to_thread(self._processes):
                self.readings.append(each)
            await asyncio.sleep(SAMPLE_S)

    def _processes(self) -> list[Reading]:
        found = []
        for each in self._deployment.processes():
            with contextlib.suppress(psutil.Error):
                line = each.cmdline()
                kind = next((k for k in ("rank", "gateway") if f"elastic.{k}" in line), "daemon")
                reading = Reading(
                    at_s=time.monotonic() - self._began,
                    kind=kind,
                    pid=each.pid,
                    started=each.create_time(),
                    rss_mb=each.memory_info().rss / 1e6,
                    fds=each.num_fds(),
                    threads=each.num_threads(),
                )
                found.append(reading)
        members = {member.pid for member in inject.living_ranks(self._deployment.run_dir).values()}
        # one that boots has a process, but nobody talks to it yet
        steady = members == {reading.pid for reading in found if reading.kind == "rank"}
        return [msgspec.structs.replace(reading, ranks=len(members) if steady else 0) for reading in found]


async def _soak(options: Options, out: Console) -> int:
    began, facts = utc_now(), machine()
    target: dict[str, Any] = {"ranks": RANKS, "maxRanks": MAX_RANKS, "slotsPerRank": SLOTS_PER_RANK}
    deployment = Deployment(Path("model"), target=target)
    keep = True
    try:
        await make_model(deployment.root / "model", VOCAB)
        run = Run(options, deployment, out.print)
        clients = await run.soak()
        problems = [*run.problems, *clients.problems]
        growth = grown(run.readings)
        problems += [g.sentence for g in growth if g.too_much]
        await deployment.stop()
        left = [" ".join(p.cmdline()) for p in deployment.processes()]
        problems += [f"left running after stop: {line}" for line in left]
        keep = bool(problems)
    finally:
        end(deployment, keep=keep)
    report = _report(began, facts, options, run, clients, growth, problems)
    write_json(options.out, report)
    write_markdown(report, options.out.with_suffix(".md"))
    out.print(f"{dict(clients.requests)}; {len(run.hits)} faults; {len(problems)} problems; written to {options.out}")
    for problem in problems:
        out.print(f"wrong: {problem}")
    return int(bool(problems))


def _report(
    began: str,
    facts: Any,
    options: Options,
    run: Run,
    clients: Clients,
    growth: tuple[Growth, ...],
    problems: Sequence[str],
) -> Soak:
    return Soak(
        machine=facts,
        versions=versions(),
        began=began,
        load_after=os.getloadavg(),
        hours=options.hours,
        every_s=options.every_s,
        seed=options.seed,
        requests=dict(clients.requests),
        longest_silence_s=clients.longest_silence_s,
        faults=tuple(run.hits),
        growth=growth,
        problems=tuple(problems),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    return run_command(lambda: _soak(options, Console(highlight=False, width=100)))


def _options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m chaos.soak",
        description="Hurt a small group on this machine at random for hours, and check that nothing is lost and nothing grows.",
        epilog="example: python -m chaos.soak --hours 2 --every 20 --seed 1",
    )
    parser.add_argument("--hours", type=_positive, default=2.0, help="how long; default: %(default)g")
    parser.add_argument("--every", type=_positive, default=20.0, help="seconds between faults; default: %(default)g")
    parser.add_argument("--seed", type=int, default=1, help="of faults, moments and prompts; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("docs/results/soak.json"), help="default: %(default)s")
    given = parser.parse_args(arguments)
    return Options(given.hours, given.every, given.seed, given.out)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 10000")
    return value


if __name__ == "__main__":
    sys.exit(main())
