"""`python -m chaos.vllm_gpu`: see `--help`. Exit code: 0 all parts ran and nobody saw a fault that healer should have hidden; 1 not
so; 2 wrong usage."""

import argparse
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from chaos.command import run_command, utc_now
from chaos.machine import gpus, machine
from chaos.vllm_gpu import command, report
from chaos.vllm_gpu.parts import PARTS, Running
from chaos.vllm_gpu.profile import Profile
from chaos.vllm_gpu.records import Part, Results
from chaos.vllm_gpu.scene import Scene

END_S = 20.0
"""Of the budget, kept for the end of all processes and the logs."""
NAME = "vllm-gpu"


class Scenario:
    """Owns the results, and writes them whenever a part has ended."""

    def __init__(self, scene: Scene, results: Results, out: Path, budget_s: float) -> None:
        self._scene, self.results, self._out = scene, results, out
        self._until = time.monotonic() + budget_s - END_S

    async def run(self, names: Sequence[str]) -> int:
        for name in names:
            part = await self._part(name)
            self._scene.say(f"{part.began_s:6.1f} s  {name} took {part.took_s:.1f} s {part.figures} {part.error}")
            if name == "start" and part.error and "ready_s" not in part.figures:
                break  # there is nothing to go on with
        return int(any(part.error for part in self.results.parts))

    async def _part(self, name: str) -> Part:
        title, work = PARTS[name]
        running, scene = Running(self._scene), self._scene
        error = await command.error_of(lambda: work(running), self._until - time.monotonic())
        part = Part(
            name=name,
            title=title,
            began_s=running.began - scene.began,
            took_s=time.monotonic() - running.began,
            event_at_s=running.event_at - running.load_began if running.event_at > running.load_began > 0 else 0.0,
            figures=running.figures,
            load=running.load,
            sequences=running.sequences(),
            boots=running.boots,
            error="; ".join(filter(None, [error, *running.problems])),
        )
        self._add(part)
        return part

    def _add(self, part: Part) -> None:
        self.results = msgspec.structs.replace(
            self.results, parts=(*self.results.parts, part), took_s=self._scene.now_s
        )
        name = f"{NAME}-{self.results.profile}"
        command.write_results(self._out, name, self.results, report.markdown(self.results))


async def scenario(profile: Profile, names: Sequence[str], out: Path, budget_s: float) -> int:
    results = Results(
        machine=machine(),
        gpus=() if profile.faults else gpus(),
        versions=await command.versions_with(profile),
        profile=profile.name,
        args=profile.args,
        sizes=profile.sizes,
        streams=profile.streams,
        tokens=profile.tokens,
        began=utc_now(),
        took_s=0.0,
        parts=(),
    )
    scene = Scene(profile, out, lambda line: print(line, flush=True))
    try:
        return await Scenario(scene, results, out, budget_s).run(names)
    finally:
        scene.end()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m chaos.vllm_gpu",
        description="healer over a real vLLM group on two GPUs: start, scale, kill and retry under load.",
        epilog="example: python -m chaos.vllm_gpu --out /tmp/results --vllm-python /opt/vllm/bin/python",
    )
    command.add_run_options(parser, PARTS)
    command.add_vllm_options(parser, NAME, base_port_of="the rank in slot 0")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = _options(arguments)

    def begin() -> Coroutine[Any, Any, int]:
        work = command.make_folders(given, NAME)
        profile = command.profile_of(given, work, base_port=given.base_port, what="scenario")
        return scenario(profile, given.parts, given.out, given.budget)

    return run_command(begin)


if __name__ == "__main__":
    sys.exit(main())
