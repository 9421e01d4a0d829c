"""What all parts share: the options, the models, and the file that grows part by part."""

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from chaos.gpu_bench.records import Part, Results, Sample
from elastic.config import GroupConfig
from elastic.errors import ElasticError

VOCAB = 1024
FULL_TOKENS = 256
"""The dispatch limit with all 35 of vLLM's capture sizes."""
LOG_TAIL = 3000
GRACE_S = 30.0
"""A part that has spent its budget ends after the sample at work; one that takes longer than this on top is cut off."""


@dataclass(frozen=True)
class Options:
    cpu: bool
    seed: int
    scale: float
    """Of the number of samples of each part; at least one is taken."""
    budget_s: float
    """For all parts together."""
    parts: tuple[str, ...]
    """Empty: all."""
    work: Path
    """Where checkpoints are kept."""
    out: Path
    add: bool = False
    """Keep the parts of the file that is there already, unless they are run again."""
    pin_cores: bool = True

    def count(self, samples: int) -> int:
        return max(1, round(samples * self.scale))


@dataclass(frozen=True)
class Model:
    """Sizes of a random checkpoint, as `elastic.tools.make_checkpoint` names them."""

    name: str
    layers: int
    experts: int
    hidden: int
    expert_intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    def arguments(self) -> list[str]:
        sizes = {
            "layers": self.layers,
            "experts": self.experts,
            "hidden": self.hidden,
            "expert-intermediate": self.expert_intermediate,
            "heads": self.heads,
            "kv-heads": self.kv_heads,
            "head-dim": self.head_dim,
            "vocab": VOCAB,
            "max-position": 2048,
        }
        return [text for name, value in sizes.items() for text in (f"--{name}", str(value))]


GPU_MODELS = (
    Model("narrow", layers=58, experts=8, hidden=2048, expert_intermediate=128, heads=16, kv_heads=4, head_dim=64),
    Model("short", layers=8, experts=8, hidden=2048, expert_intermediate=128, heads=16, kv_heads=4, head_dim=64),
    Model("wide", layers=2, experts=8, hidden=7168, expert_intermediate=2048, heads=16, kv_heads=4, head_dim=64),
)
"""narrow: as many MoE layers as DeepSeek-V3 has (61 layers, the first 3 dense), small in width. wide: its width."""
CPU_MODELS = (
    Model("narrow", layers=4, experts=8, hidden=64, expert_intermediate=32, heads=4, kv_heads=2, head_dim=16),
    Model("short", layers=2, experts=8, hidden=64, expert_intermediate=32, heads=4, kv_heads=2, head_dim=16),
    Model("wide", layers=2, experts=8, hidden=128, expert_intermediate=64, heads=4, kv_heads=2, head_dim=16),
)


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass
class Running:
    """A part at work: what it has so far is what is written, however it ends."""

    name: str
    title: str
    budget_s: float
    wanted: int
    config: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    began_at: str = ""

    @property
    def spent(self) -> bool:
        return time.monotonic() - self.began > self.budget_s

    def record(self, error: str = "") -> Part:
        return Part(
            name=self.name,
            title=self.title,
            config=self.config,
            budget_s=self.budget_s,
            began=self.began_at,
            took_s=time.monotonic() - self.began,
            wanted=self.wanted,
            samples=tuple(self.samples),
            figures=self.figures,
            error=error,
        )


class Lab:
    """Owns the results. `write` is called with them whenever a part has ended."""

    def __init__(self, options: Options, results: Results, say: Callable[[str], None]) -> None:
        self.options, self.results, self.say = options, results, say
        self._began = time.monotonic()
        self._makers: dict[str, asyncio.Task[Path]] = {}
        self._write: Callable[[Results], None] = lambda _: None

    def on_result(self, write: Callable[[Results], None]) -> None:
        self._write = write

    def wants(self, part: str) -> bool:
        return not self.options.parts or part in self.options.parts

    @property
    def left_s(self) -> float:
        return self.options.budget_s - (time.monotonic() - self._began)

    async def part(self, running: Running, work: Callable[[Running], Awaitable[None]]) -> None:
        """Run one part to its end, its error or its time, and write what it found. Never raises for what it does."""
        running.budget_s = min(running.budget_s, max(1.0, self.left_s - GRACE_S / 2))
        running.began, running.began_at = time.monotonic(), utc_now()
        error, limit = "", None
        try:
            if self.left_s < GRACE_S / 2:
                raise ElasticError("skipped: the time for all parts was spent")
            async with asyncio.timeout(min(running.budget_s + GRACE_S, max(1.0, self.left_s))) as limit:
                await work(running)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            if limit is not None and limit.expired():
                error = f"cut off {time.monotonic() - running.began:.0f} s after its begin, {running.budget_s:.0f} s were its budget"
        self.add(running.record(error))

    def add(self, part: Part) -> None:
        others = tuple(p for p in self.results.parts if p.name != part.name)
        results = msgspec.structs.replace(self.results, parts=(*others, part), took_s=time.monotonic() - self._began)
        self.results = results
        self.say(
            f"{part.name}: {len(part.samples)} samples in {part.took_s:.0f} s"
            + (f"; {part.error}" if part.error else "")
        )
        self._write(results)

    def keep_logs(self, run_dir: Path) -> None:
        """Of a group of which a part ended early: the end of each log, in one file beside the results."""
        with (self.options.out / "gpu-bench.log").open("a") as out:
            for log in sorted((run_dir / "logs").glob("*.log")):
                text = log.read_text(errors="replace")
                out.write(f"==> {log}, {log.stat().st_size} bytes\n{text[-LOG_TAIL:]}\n")

    def judge(self, name: str, samples: Sequence[Sample], notes: Sequence[str]) -> None:
        """The samples of a part again, with what its clients saw, and what else was seen of its group."""
        parts = []
        for part in self.results.parts:
            if part.name == name:
                figures = part.figures | ({"notes": list(notes)} if notes else {})
                part = msgspec.structs.replace(part, samples=tuple(samples), figures=figures)
            parts.append(part)
        self.results = msgspec.structs.replace(self.results, parts=tuple(parts))
        self._write(self.results)

    # --- models ---------------------------------------------------------------------------------------------------

    def model(self, name: str) -> Model:
        return next(m for m in (CPU_MODELS if self.options.cpu else GPU_MODELS) if m.name == name)

    def begin_checkpoints(self, names: tuple[str, ...]) -> None:
        """All at once, in the background."""
        for name in names:
            self._makers[name] = asyncio.create_task(self._make(self.model(name)))

    async def checkpoint(self, name: str) -> Path:
        if name not in self._makers:
            self.begin_checkpoints((name,))
        return await asyncio.shield(self._makers[name])

    async def _make(self, model: Model) -> Path:
        kind = "cpu" if self.options.cpu else "gpu"
        folder = self.options.work / f"bench-{kind}-{model.name}-{model.layers}x{model.experts}x{model.hidden}"
        began = time.monotonic()
        if not folder.exists():
            command = ("-m", "elastic.tools.make_checkpoint", str(folder), *model.arguments())
            maker = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            said, _ = await maker.communicate()
            if maker.returncode:
                raise ElasticError(f"the {model.name} checkpoint could not be made: {said.decode()[-300:]}")
        took = self.results.checkpoints_s | {model.name: time.monotonic() - began}
        self.results = msgspec.structs.replace(self.results, checkpoints_s=took)
        return folder

    def group(self, checkpoint: Path, **changes: Any) -> GroupConfig:
        """Two ranks with a replica of every expert, unless `changes` say otherwise; in a run directory of its own."""
        sizes: dict[str, Any] = {
            "name": "bench",
            "run_dir": tempfile.mkdtemp(prefix="gb-", dir="/tmp"),
            "checkpoint": str(checkpoint),
            "ranks": 2,
            "max_ranks": 2,
            "slots_per_rank": 8,
            "redundant_experts": 8,
            "host_tier": False,
            "prepare_deadline_s": 120.0,
            "ep_backend": "shm" if self.options.cpu else "nixl-ep",
            "pin_cores": self.options.pin_cores,
        }
        return GroupConfig(**(sizes | changes))


def describe(config: GroupConfig, model: Model) -> dict[str, Any]:
    """What a reader needs to judge a part's figures."""
    kept = ("ranks", "max_ranks", "slots_per_rank", "redundant_experts", "spares", "host_tier", "ep_timeout_s")
    values = {name: getattr(config, name) for name in kept}
    values |= {
        "early_release": config.early_release,
        "pin_cores": config.pin_cores,
        "captures": len(config.capture_sizes),
    }
    return values | {"model": model.name, "moe_layers": model.layers, "experts": model.experts, "hidden": model.hidden}


def forget(config: GroupConfig) -> None:
    shutil.rmtree(config.run_dir, ignore_errors=True)
