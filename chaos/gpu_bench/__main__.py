"""`python -m chaos.gpu_bench`: see `--help`. Exit code: 0 all parts ran and what must hold held; 1 not so; 2 wrong usage."""

import argparse
import contextlib
import gc
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from chaos.gpu_bench import report
from chaos.gpu_bench.alone import run_alone
from chaos.gpu_bench.lab import Lab, Options, utc_now
from chaos.gpu_bench.parts import run_late, run_main, run_shared
from chaos.gpu_bench.records import Results
from chaos.gpu_bench.under_daemon import run_under_daemon
from chaos.machine import gpus, machine, versions
from elastic.errors import ElasticError
from healer.interrupt import Interrupted, run_to_its_end

PARTS = (
    *("copy", "recapture", "kill", "scale", "logits", "orphans", "orphans-wide", "daemon", "stop", "agent"),
    *("shared-gpus", "witnesses", "timeout-1s", "timeout-30s"),
)
MODELS = {"orphans-wide": ("wide",), "shared-gpus": ("short",), "timeout-1s": ("short",), "timeout-30s": ("short",)}


def _gpu_versions() -> dict[str, str]:
    found = {}
    for name in ("nixl-cu13", "nixl-cu12", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


async def bench(options: Options) -> int:
    found = gpus()
    if not options.cpu and not found:
        raise ElasticError("no NVIDIA GPU is seen here (nvidia-smi); --cpu runs the harness without one")
    results = Results(
        machine=machine(),
        gpus=() if options.cpu else found,
        versions=versions() | _gpu_versions(),
        began=utc_now(),
        seed=options.seed,
        cpu=options.cpu,
        checkpoints_s={},
        took_s=0.0,
        parts=(),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    name = "gpu-bench-cpu" if options.cpu else "gpu-bench"
    if options.add:
        results = _added(results, options.out / f"{name}.json")
    lab = Lab(options, results, lambda line: print(line, flush=True))

    def write(now: Results) -> None:
        (options.out / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(now)) + b"\n")
        (options.out / f"{name}.md").write_text(report.markdown(now))

    lab.on_result(write)
    wanted = [part for part in PARTS if lab.wants(part)]
    lab.begin_checkpoints(tuple(dict.fromkeys(m for part in wanted for m in MODELS.get(part, ("narrow",)))))
    # what the targets are about comes first, should the time run out
    await run_alone(lab, "copy", "recapture")
    await run_main(lab)
    await run_under_daemon(lab)
    await run_alone(lab, "agent")
    await run_shared(lab)
    await run_alone(lab, "witnesses")
    await run_late(lab)
    print()
    print(report.markdown(lab.results))
    wrong = report.problems(lab.results)
    for problem in wrong:
        print(f"wrong: {problem}", file=sys.stderr)
    print(f"written to {options.out / name}.json and .md")
    return int(bool(wrong))


def _added(results: Results, path: Path) -> Results:
    """`results` with the parts of an earlier file. Raises ElasticError where that is of another machine or version."""
    if not path.exists():
        return results
    try:
        before = msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.MsgspecError as error:
        raise ElasticError(f"{path}: cannot be added to: {error}") from error
    if (before.gpus, before.versions) != (results.gpus, results.versions):
        raise ElasticError(
            f"{path}: is of other GPUs or versions ({before.gpus}, {before.versions}); choose another --out"
        )
    return msgspec.structs.replace(results, parts=before.parts, checkpoints_s=before.checkpoints_s)


def _options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m chaos.gpu_bench",
        description="Measure how a group on GPUs heals, under traffic, and what the alternatives cost.",
        epilog="example: python -m chaos.gpu_bench --parts kill,orphans --out /tmp/results",
    )
    parser.add_argument("--parts", type=_parts, default=(), help=f"some of: {','.join(PARTS)}; default: all")
    parser.add_argument(
        "--cpu", action="store_true", help="run the harness on a machine without a GPU, with tiny models"
    )
    parser.add_argument("--samples", type=_positive, default=1.0, metavar="X", help="times the usual number of samples")
    parser.add_argument(
        "--budget", type=_positive, default=570.0, metavar="S", help="seconds in all; default: %(default)g"
    )
    parser.add_argument("--add", action="store_true", help="keep the other parts of the file in --out")
    parser.add_argument("--no-pin-cores", action="store_true", help="let each rank run on any core")
    parser.add_argument("--seed", type=int, default=0, help="of prompts; default: %(default)s")
    work = Path(tempfile.gettempdir())
    parser.add_argument("--work", type=Path, default=work, help="where checkpoints are kept; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder; default: %(default)s")
    given = parser.parse_args(arguments)
    return Options(
        cpu=given.cpu,
        seed=given.seed,
        scale=given.samples,
        budget_s=given.budget,
        parts=given.parts,
        work=given.work,
        out=given.out,
        add=given.add,
        pin_cores=not given.no_pin_cores,
    )


def _parts(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if unknown := [part for part in chosen if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    return chosen


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= 36_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        # as the daemon and the ranks do
        sys.setswitchinterval(0.0005)
        gc.collect()
        gc.freeze()
        return run_to_its_end(bench(options))
    except Interrupted as interrupted:
        print(interrupted, file=sys.stderr)
        return interrupted.exit_code
    except (ElasticError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
