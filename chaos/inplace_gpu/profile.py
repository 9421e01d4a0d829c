"""How the group of this benchmark is started: the profile of chaos.vllm_gpu, with more ranks, other redundancy, and with or
without healer's plugin."""

import dataclasses
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.vllm_gpu.profile import Profile

ROOT = Path(__file__).parents[2]
CPU_WORKER = ROOT / "chaos/vllm_cpu/plugins/in_place_worker"
MOST_RANKS = 4
STEP_INTERVAL = "step_interval"


@dataclass(frozen=True)
class InPlaceProfile(Profile):
    ranks: int = 3
    in_place: bool = True
    spares: int = 0

    def policy(self, run_dir: Path) -> dict[str, Any]:
        found = super().policy(run_dir)
        found["target"] |= {
            "ranks": self.ranks,
            "maxRanks": MOST_RANKS,
            "gpus": self.shared(MOST_RANKS),
            "spares": self.spares,
            "inPlace": "auto" if self.in_place else "off",
        }
        return found


def of(
    base: Profile,
    *,
    site: Path,
    ranks: int,
    in_place: bool,
    redundant: int | None = None,
    balance_every: int | None = None,
    spares: int = 0,
) -> InPlaceProfile:
    """`base` with `ranks` ranks and so many `spares`. `site`: a folder for what an installed healer is to vLLM, used with the plugin only, since
    vLLM loads every plugin that it finds. `redundant`: rows for further copies of experts, in all, rounded up to what divides by
    the ranks. `balance_every`: steps between two rounds of vLLM's balancer."""
    args, env = list(base.args), dict(base.env)
    at = args.index("--eplb-config") + 1
    balancer = json.loads(args[at])
    wanted = balancer["num_redundant_experts"] if redundant is None else redundant
    balancer["num_redundant_experts"] = wanted + -(base.experts + wanted) % ranks
    if balance_every is not None:
        balancer |= {STEP_INTERVAL: balance_every, "window_size": min(balance_every, balancer.get("window_size", 1000))}
    args[at] = json.dumps(balancer, separators=(",", ":"))
    places = env.get("PYTHONPATH", "").split(":")
    if base.faults is None:
        args.append("--cudagraph-metrics")
    else:
        env |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if in_place:
        if base.faults is not None:
            args[args.index("--worker-cls") + 1] = "vllm_in_place_worker.InPlaceStubWorker"
            places.insert(0, str(CPU_WORKER))
        places = [str(distribution(site)), str(ROOT), *places]
    env["PYTHONPATH"] = ":".join(filter(None, places))
    given = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return InPlaceProfile(**(given | {"args": tuple(args), "env": env}), ranks=ranks, in_place=in_place, spares=spares)


def distribution(folder: Path) -> Path:
    """What an installed healer is to vLLM: its entry points, from pyproject.toml."""
    metadata = folder / "healer-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: healer\nVersion: 0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder
