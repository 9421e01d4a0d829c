"""How long a dead rank is noticed: `python -m chaos.bench`.

One group, many faults, each while 16 clients read; then the daemon at rest. The raw samples and a summary are written as
JSON. Exit code: 0 measured, and every answer was right; 1 something was not, or an error; 2 wrong usage.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import msgspec
import psutil
from rich.console import Console

from chaos import inject, sensor_bench
from chaos.bench_report import Bench, Quiet, Sample, SensorTimes, quantile, show, summarise
from chaos.command import end, make_model, run_command, utc_now, write_json
from chaos.machine import machine, versions
from elastic.client import Answer, Tokens, Traffic, random_prompts, stream
from elastic.errors import ElasticError
from healer import drill
from healer.deployment import Deployment, eventually

RANKS, MAX_RANKS, SLOTS_PER_RANK, VOCAB = 4, 6, 8, 512
REQUESTS, TOKENS = 16, 64
DEADLINE_S = 120.0
EARLIEST_S, LATEST_S = 0.1, 1.0
"""The fault comes this long after the clients have begun."""
QUIET_RUNS, STARTS = 5, 5

Signal = Literal["kill", "stop"]
INJECTORS = {"kill": inject.kill, "stop": inject.stop}


class Options(msgspec.Struct, frozen=True):
    kills: int
    signal: Signal
    seed: int
    redundancy: int
    sensors: int
    """GPU faults of each kind that are played to the sensors."""
    rest_s: float
    """How long the daemon is watched at rest."""
    out: Path


@dataclass
class Clients:
    """Each asks its prompt again and again, so that there is traffic for as long as a healing takes."""

    base: str
    prompts: Sequence[Tokens]

    def __post_init__(self) -> None:
        self.answers: list[list[Answer]] = [[] for _ in self.prompts]
        self._go_on = True

    def stop(self) -> None:
        """Let each finish the answer that it reads."""
        self._go_on = False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=len(self.prompts) + 4)
        async with httpx.AsyncClient(limits=limits, trust_env=False) as client:
            await asyncio.gather(*(self._ask(client, i) for i in range(len(self.prompts))))

    async def _ask(self, client: httpx.AsyncClient, i: int) -> None:
        while self._go_on and not (self.answers[i] and self.answers[i][-1].error):
            answer = Answer()
            self.answers[i].append(answer)
            await stream(client, self.base, self.prompts[i], TOKENS, deadline_s=DEADLINE_S, answer=answer)


class Run:
    def __init__(self, options: Options, deployment: Deployment, say: Callable[[str], None]) -> None:
        self._options, self._deployment, self._say = options, deployment, say
        self._prompts = random_prompts(REQUESTS, VOCAB, options.seed)
        self._expected: list[Tokens] = []

    async def faults(self) -> tuple[Sample, ...]:
        """Start the group and hurt it. Raises ElasticError where something cannot be measured."""
        deployment, draw = self._deployment, random.Random(self._options.seed)
        await deployment.start(DEADLINE_S)
        warm = await Traffic(deployment.gateway(), self._prompts, TOKENS).run()
        self._expected = [a.tokens for a in warm]
        if wrong := drill.wrong(warm, self._expected):
            raise ElasticError(f"without any fault: {'; '.join(wrong)}")
        samples = []
        for number in range(1, self._options.kills + 1):
            sample = await self._sample(draw.randrange(RANKS), draw.uniform(EARLIEST_S, LATEST_S))
            samples.append(sample)
            self._say(
                f"{number:3d} of {self._options.kills}: slot {sample.slot}, pause {sample.pause_s * 1e3:.0f} ms, covered "
                f"{sample.coverage_s * 1e3:.0f} ms, full {sample.capacity_s:.2f} s, {sample.replayed} replayed"
                + "".join(f"\n      wrong: {problem}" for problem in sample.problems)
            )
        return tuple(samples)

    async def _sample(self, slot: int, after_s: float) -> Sample:
        deployment = self._deployment
        before, known = await deployment.counters(), await drill.incidents(deployment)
        replays = await drill.replays(deployment)
        clients = Clients(deployment.gateway(), self._prompts)
        asking = asyncio.create_task(clients.run())
        try:
            await asyncio.sleep(after_s)
            (fault,) = INJECTORS[self._options.signal](deployment.run_dir, [slot])
            healing = await drill.healed(deployment, known, fault.sent, DEADLINE_S, lambda _: None)
            await deployment.settled(DEADLINE_S)
            clients.stop()
            await asking
        finally:
            asking.cancel()
        after = await deployment.counters()
        answers = [a for each in clients.answers for a in each]
        problems = [w for a, want in zip(clients.answers, self._expected, strict=True) for w in _wrong(a, want)]
        problems += [
            f"slot {s} captured again or its addresses changed"
            for s in before.keys() - {slot}
            if after[s]["captures"] != before[s]["captures"] or after[s]["address_changes"]
        ]
        return Sample(
            slot=slot,
            detect_s=healing.detect_s,
            verdict_s=healing.verdict_s,
            pause_s=max(healing.pause_s.values(), default=0.0),
            pauses_s=healing.pause_s,
            coverage_s=healing.coverage_s,
            capacity_s=healing.capacity_s,
            silence_s=drill.longest_gap_s(answers, fault.sent, fault.sent + healing.capacity_s),
            in_flight=drill.in_flight(answers, fault.sent),
            replayed=await drill.replays(deployment) - replays,
            requests=len(answers),
            cover=healing.cover,
            refill=healing.refill,
            steps=healing.steps,
            tokens_equal=not problems,
            problems=tuple(problems),
        )

    async def quiet(self) -> Quiet:
        """The group after its faults, and the daemon at rest and at its start."""
        self._say("without a fault, and at rest")
        deployment = self._deployment
        steps, rates, silences = [], [], []
        for _ in range(QUIET_RUNS):
            first = await self._rounds()
            answers = await Traffic(deployment.gateway(), self._prompts, TOKENS).run()
            began, ended = min(a.times[0] for a in answers), max(a.times[-1] for a in answers)
            await asyncio.sleep(0.3)  # the rounds come with the next heartbeat
            steps.append((ended - began) / max(1, await self._rounds() - first))
            rates.append(sum(len(a.tokens) for a in answers) / (ended - began))
            silences.append(drill.longest_gap_s(answers, began, ended))
        members = inject.living_ranks(deployment.run_dir).values()
        rank_rss = max(psutil.Process(m.pid).memory_info().rss for m in members)
        rss, cpu = await self._rest()
        return Quiet(
            step_s=quantile(steps, 0.5),
            tokens_per_s=quantile(rates, 0.5),
            silence_s=quantile(silences, 0.5),
            daemon_rss_mb=rss / 1e6,
            daemon_cpu_percent=cpu * 100,
            start_s=tuple([await self._start_again() for _ in range(STARTS)]),
            rank_rss_mb=rank_rss / 1e6,
        )

    async def _rounds(self) -> int:
        group = (await self._deployment.get("/status"))["group"]
        return max(int(s["round"]) for s in group["slots"])

    async def _rest(self) -> tuple[int, float]:
        """Bytes, and seconds of CPU a second, of a daemon that nobody asks anything."""
        daemon = psutil.Process((await self._deployment.get("/status"))["pid"])
        await asyncio.sleep(2.0)
        used, began = sum(daemon.cpu_times()[:2]), time.monotonic()
        await asyncio.sleep(self._options.rest_s)
        return daemon.memory_info().rss, (sum(daemon.cpu_times()[:2]) - used) / (time.monotonic() - began)

    async def _start_again(self) -> float:
        """End the daemon, not the group, and start another; seconds until its API answers."""
        deployment = self._deployment
        await asyncio.to_thread(deployment.kill_daemon, signal.SIGTERM)
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:

            async def answers() -> float | None:
                await client.get(deployment.api() + "/livez", timeout=1.0)
                return time.monotonic()

            began = time.monotonic()
            deployment.spawn()
            took_s = await eventually(answers, "the API answers", DEADLINE_S) - began
        await deployment.settled(DEADLINE_S)
        return took_s


def _wrong(answers: Sequence[Answer], want: Tokens) -> list[str]:
    return drill.wrong(answers, [want] * len(answers))


async def _sensors(count: int, out: Console) -> SensorTimes:
    """Where there is no C compiler the stand-in for NVML cannot be built: said, and left out."""
    out.print("faults of GPUs, played to the sensors")
    try:
        return await sensor_bench.measure(count)
    except ElasticError as error:
        out.print(f"  not measured: {error}")
        return SensorTimes()


async def _bench(options: Options, out: Console) -> int:
    facts, began = machine(), utc_now()
    target = {
        "ranks": RANKS,
        "maxRanks": MAX_RANKS,
        "slotsPerRank": SLOTS_PER_RANK,
        "redundantExperts": options.redundancy,
    }
    deployment = Deployment(Path("model"), target=target)
    keep = False
    try:
        await make_model(deployment.root / "model", VOCAB)
        run = Run(options, deployment, out.print)
        samples = await deployment.watched(run.faults())
        quiet = await run.quiet()
        await deployment.stop()
        sensors = await _sensors(options.sensors, out)
        keep = any(s.problems for s in samples)
    except Exception:
        keep = True
        raise
    finally:
        end(deployment, keep=keep)
    bench = Bench(
        machine=facts,
        versions=versions(),
        began=began,
        load_after=os.getloadavg(),
        options={"kills": options.kills, "signal": options.signal, "seed": options.seed},
        config=target | {"requests": REQUESTS, "tokens": TOKENS},
        summary=summarise(samples, quiet, sensors),
        sensors=sensors,
        quiet=quiet,
        samples=samples,
        problems=tuple(p for s in samples for p in s.problems),
    )
    show(bench, out)
    write_json(options.out, bench)
    out.print(f"written to {options.out}")
    return int(bool(bench.problems))


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    return run_command(lambda: _bench(options, Console(highlight=False, width=100)))


def _options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m chaos.bench",
        description="Measure how a small group on this machine heals, under traffic, and the daemon at rest.",
        epilog="example: python -m chaos.bench --redundancy 0 --out bench.json",
    )
    parser.add_argument("--kills", type=_count, default=20, metavar="N", help="faults; default: %(default)s")
    parser.add_argument("--signal", choices=("kill", "stop"), default="kill", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, slots and moments; default: %(default)s")
    parser.add_argument(
        "--redundancy",
        type=int,
        default=8,
        metavar="N",
        help="replicas a layer beyond one of each; default: %(default)s",
    )
    parser.add_argument(
        "--rest",
        type=_seconds,
        default=15.0,
        metavar="S",
        help="seconds that the daemon is watched at rest; default: %(default)g",
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/bench-cpu.json"), help="default: %(default)s")
    parser.add_argument(
        "--sensors", type=_count, default=20, metavar="N", help="GPU faults of each kind; default: %(default)s"
    )
    given = parser.parse_args(arguments)
    return Options(given.kills, given.signal, given.seed, given.redundancy, given.sensors, given.rest, given.out)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 3600")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 10_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 10000")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
