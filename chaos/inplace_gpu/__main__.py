"""`python -m chaos.inplace_gpu`: see `--help`. Exit code: 0 all parts ran and missed nothing; 1 not so; 2 wrong usage."""

import argparse
import asyncio
import dataclasses
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from chaos.command import run_command, utc_now
from chaos.inplace_gpu import growth, kills, overhead, report
from chaos.inplace_gpu.profile import MOST_RANKS, InPlaceProfile, of
from chaos.inplace_gpu.records import Case, Part, Results
from chaos.inplace_gpu.watch import ROUTER, Clients
from chaos.machine import gpus, machine
from chaos.vllm_gpu import command
from chaos.vllm_gpu.scene import Scene

NAME = "inplace-gpu"
END_S = 25.0
"""Of the budget, kept for the end of all processes and the logs."""
SECOND_AFTER_S = (0.5, 2.5, 4.5, 6.0)
"""A joiner from a spare takes 4 to 8 s on an H200 from the others' first step to the commit; where it has served already, the second
death is one of a whole group."""
PORTS = 40
"""Between the two groups' ports."""


class Run:
    """Owns both groups and the results, which are written whenever a part has ended."""

    def __init__(self, stock: Scene, plugin: Scene, given: argparse.Namespace, results: Results) -> None:
        self.stock, self.plugin, self.given, self.results = stock, plugin, given, results
        self._began = time.monotonic()
        self._until = self._began + given.budget - END_S
        self._started: dict[int, dict[str, Any]] = {}
        self._stock_ended = False

    async def group(self, scene: Scene) -> dict[str, Any]:
        """Started if it is not yet. Raises ElasticError."""
        if id(scene) not in self._started:
            await scene.write_model()
            self._started[id(scene)] = await kills.start(scene)
        return self._started[id(scene)]

    async def alone(self) -> dict[str, Any]:
        """The group with the plugin, and no other beside it."""
        if not self._stock_ended:
            self._stock_ended = True
            await asyncio.to_thread(self.stock.end)
        return await self.group(self.plugin)

    async def part(self, name: str) -> None:
        title, work = PARTS[name]
        began = time.monotonic()
        part = Part(name=name, title=title, began_s=began - self._began, took_s=0.0, figures={})
        self.results = msgspec.structs.replace(self.results, parts=(*self.results.parts, part))
        error = await command.error_of(lambda: work(self), self._until - began)
        now = self.current
        problems = [f"slot {case.slot}: {text}" for case in now.cases for text in case.problems]
        self.add(took_s=time.monotonic() - began, error="; ".join(filter(None, [error, now.error, *problems])))
        print(
            f"{part.began_s:6.1f} s  {name} took {self.current.took_s:.1f} s {now.figures} {self.current.error}",
            flush=True,
        )

    @property
    def current(self) -> Part:
        return self.results.parts[-1]

    def add(self, **fields: Any) -> None:
        """Change the part that runs, and write the file."""
        part = msgspec.structs.replace(self.current, **fields)
        took_s = time.monotonic() - self._began
        self.results = msgspec.structs.replace(self.results, parts=(*self.results.parts[:-1], part), took_s=took_s)
        name = f"{NAME}-{self.results.profile}"
        command.write_results(self.given.out, name, self.results, report.markdown(self.results))

    def add_case(self, case: Case) -> None:
        self.add(cases=(*self.current.cases, case))
        print(
            f"          slot {case.slot} {'load' if case.under_load else 'idle'}: healed {case.healed_s:.2f} s, "
            f"filled {case.filled_s:.1f} s {'; '.join(case.problems)}",
            flush=True,
        )

    def end(self) -> None:
        if not self._stock_ended:
            self.stock.end()
        self.plugin.end()


async def _overhead(run: Run) -> None:
    stock, plugin = await run.group(run.stock), await run.group(run.plugin)
    run.add(figures={"stock_ready_s": stock["ready_s"], "plugin_ready_s": plugin["ready_s"]})
    await kills.spares_stand_by(run.plugin, all_=True)
    found = await overhead.windows(run.stock, run.plugin, run.given.windows, run.given.window)
    compared = overhead.compare(found)
    # stub workers leave two cores too noisy to be judged
    run.add(windows=found, compared=compared, error="" if run.given.profile == "cpu" else overhead.missed(compared))


async def _restart(run: Run) -> None:
    await run.group(run.stock)
    figures: dict[str, Any] = {}
    began = time.monotonic()
    load = await overhead.restart(run.stock, 1, figures)
    run.add(figures=figures, load=load.report(), sequences=run.stock.sequences(began, began))


async def _kills(run: Run, slots: Sequence[int], **how: Any) -> None:
    """`how`: of `kills.case`."""
    run.add(figures={"ready_s": (await run.alone())["ready_s"]})
    for slot in slots:
        run.add_case(await kills.case(run.plugin, slot, streams=run.given.streams, **how))


async def _load(run: Run) -> None:
    await _kills(run, kills.slots_of(run.plugin), under_load=True)


async def _idle(run: Run) -> None:
    await _kills(run, kills.slots_of(run.plugin), under_load=False)


async def _round(run: Run) -> None:
    await _kills(run, kills.slots_of(run.plugin), under_load=True, in_round=True)


async def _second(run: Run) -> None:
    """Each slot once as the second one, at a later moment each time."""
    ranks = run.given.ranks
    for number, after_s in enumerate(SECOND_AFTER_S):
        slot = (number + 1) % ranks
        await _kills(run, [number % ranks], under_load=True, second=kills.Second(slot, after_s))


async def _scale(run: Run) -> None:
    await run.alone()
    scene, figures, began = run.plugin, dict[str, Any](), time.monotonic()
    clients = Clients(scene, [], streams=run.given.streams, router=await scene.router())
    try:
        await kills.scale(scene, figures, clients)
    finally:
        seen = clients.loads[ROUTER].report()
        error = f"{seen.errors} errors and {seen.wrong} wrong answers" if seen.errors or seen.wrong else ""
        run.add(figures=figures, load=seen, sequences=scene.sequences(began, began), error=error)


async def _cycles(run: Run) -> None:
    """The last rank lives through all of them: its memory must not grow."""
    last = run.given.ranks - 1
    try:
        await _kills(run, [cycle % last for cycle in range(run.given.cycles)], under_load=True, quiet=False)
    finally:
        figures, grown = growth.held(run.current.cases, last)
        run.add(figures=run.current.figures | figures, error=grown)


PARTS: dict[str, tuple[str, Callable[[Run], Awaitable[None]]]] = {
    "overhead": ("stock and plugin in turn, without a fault", _overhead),
    "restart": ("SIGKILL of a rank in the stock group, which is started anew", _restart),
    "load": ("SIGKILL of each slot under load", _load),
    "idle": ("SIGKILL of each slot of an idle group", _idle),
    "round": ("SIGKILL of each slot when a round of vLLM's balancer has begun", _round),
    "second": ("SIGKILL of another slot while one is being filled", _second),
    "scale": ("vLLM's own scaling after the refills", _scale),
    "cycles": ("deaths and refills under load, again and again", _cycles),
}
"""In their order: the stock group is ended before the first death in the other one."""


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m chaos.inplace_gpu",
        description="A vLLM group heals around dead ranks without a restart: kills, refills, scaling, and what the plugin costs.",
        epilog="example: python -m chaos.inplace_gpu --out /tmp/results --parts load,idle --vllm-python /opt/vllm/bin/python",
    )
    command.add_run_options(parser, PARTS)
    add = parser.add_argument
    add("--ranks", type=int, default=3, choices=range(2, MOST_RANKS + 1), help="of the group; default: %(default)d")
    add(
        "--redundant",
        type=int,
        metavar="N",
        help="rows for further copies of experts; few: deaths leave experts without one",
    )
    add(
        "--balance-every",
        type=int,
        metavar="STEPS",
        help="between two rounds of vLLM's balancer; few: deaths fall into one",
    )
    add("--spares", type=int, default=0, help="warm spare processes of the group with the plugin; default: none")
    add(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="for the ranks of both groups; may be given again",
    )
    add("--streams", type=int, default=4, help="clients of each rank and of the router; default: %(default)d")
    add("--cycles", type=int, default=20, help="of the part cycles; default: %(default)d")
    add("--windows", type=int, default=6, help="pairs of the part overhead; default: %(default)d")
    add("--window", type=float, default=5.0, metavar="S", help="length of one; default: %(default)g")
    command.add_vllm_options(parser, NAME, base_port_of="the stock group's slot 0")
    given = parser.parse_args(arguments)
    if given.spares < 0:
        parser.error("--spares must not be negative")
    if min(given.streams, given.cycles, given.windows) < 1 or given.window <= 0:
        parser.error("--streams, --cycles, --windows and --window must be positive")
    # stub workers have no balancer, and two ranks at least are to be left
    never = {"round" if given.profile == "cpu" else "", "second" if given.ranks < MOST_RANKS else ""}
    given.parts = tuple(part for part in PARTS if part in given.parts and part not in never)
    return given


def _profile(given: argparse.Namespace, work: Path, *, in_place: bool) -> InPlaceProfile:
    """Raises ElasticError."""
    own = work / ("plugin" if in_place else "stock")
    own.mkdir(parents=True, exist_ok=True)
    port = given.base_port + (PORTS if in_place else 0)
    base = command.profile_of(given, own, base_port=port, what="benchmark")
    if given.profile != "cpu":
        # one model and one cache for both groups
        caches = {"VLLM_CACHE_ROOT": str(work / "cache"), "TRITON_CACHE_DIR": str(work / "cache/triton")}
        base = dataclasses.replace(base, model=work / "model", env=base.env | caches)
    base = dataclasses.replace(base, env=base.env | dict(given.env))
    return of(
        base,
        site=work / "site",
        ranks=given.ranks,
        in_place=in_place,
        redundant=given.redundant,
        balance_every=given.balance_every,
        spares=given.spares if in_place else 0,
    )


async def benchmark(given: argparse.Namespace, stock: InPlaceProfile, plugin: InPlaceProfile) -> int:
    def scene(profile: InPlaceProfile, name: str) -> Scene:
        folder = given.out / f"logs-{name}"
        folder.mkdir(exist_ok=True)
        return Scene(profile, folder, lambda line: print(line, flush=True))

    results = Results(
        machine=machine(),
        gpus=gpus() if given.profile == "h200" else (),
        versions=await command.versions_with(stock),
        profile=given.profile,
        ranks=given.ranks,
        spares=plugin.spares,
        args=plugin.args,
        env=dict(given.env),
        streams=given.streams,
        tokens=plugin.tokens,
        began=utc_now(),
        took_s=0.0,
        parts=(),
    )
    run = Run(scene(stock, "stock"), scene(plugin, "plugin"), given, results)
    try:
        for name in given.parts:
            await run.part(name)
    finally:
        run.end()
    return int(any(part.error for part in run.results.parts))


def main(arguments: Sequence[str] | None = None) -> int:
    given = _options(arguments)

    def begin() -> Coroutine[Any, Any, int]:
        work = command.make_folders(given, NAME)
        stock, plugin = (_profile(given, work, in_place=in_place) for in_place in (False, True))
        return benchmark(given, stock, plugin)

    return run_command(begin)


if __name__ == "__main__":
    sys.exit(main())
