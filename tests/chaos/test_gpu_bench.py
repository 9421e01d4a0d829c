"""The GPU benchmark's harness, without a GPU: tiny models, real groups, clients, faults and daemons."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from chaos.gpu_bench.__main__ import PARTS
from chaos.gpu_bench.lab import CPU_MODELS


def bench(out: Path, *options: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    """With a directory for temporary files of its own, short enough for sockets."""
    command = [sys.executable, "-m", "chaos.gpu_bench", "--cpu", "--out", str(out), *options]
    with tempfile.TemporaryDirectory(prefix="gb-", dir="/tmp") as folder:
        env = os.environ | {"TMPDIR": folder}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


def parts_of(out: Path) -> dict[str, Any]:
    found = json.loads((out / "gpu-bench-cpu.json").read_bytes())
    return {part["name"]: part for part in found["parts"]}


@pytest.mark.slow
def test_kills_with_spares_are_measured_from_the_ranks_own_records(tmp_path: Path) -> None:
    done = bench(tmp_path, "--parts", "kill", "--samples", "0.06")
    assert done.returncode == 0, done.stdout + done.stderr
    kill = parts_of(tmp_path)["kill"]
    assert [sample["slots"] for sample in kill["samples"]] == [[0], [1]]
    for sample in kill["samples"]:
        assert sample["tokens_equal"]
        assert sample["answers"] > 0
        (survivor,) = sample["survivors"]
        assert survivor["captures"][0] == survivor["captures"][1] > 0
        assert survivor["address_changes"] == [0, 0]
        assert survivor["longest_gap_s"] > 0
        loss, join = sample["sequences"]
        assert (loss["kind"], join["kind"]) == ("loss", "join")
        assert sample["seen_s"] < loss["first_step_s"][str(survivor["slot"])] < sample["capacity_s"]
        (joiner,) = join["joiners"].values()
        assert joiner["spare"]
    text = (tmp_path / "gpu-bench-cpu.md").read_text()
    assert "no figure of a GPU" in text
    assert "2 of 2 |" in text


def test_a_part_that_fails_is_recorded_with_its_logs_and_the_rest_goes_on(tmp_path: Path) -> None:
    # the checkpoint is there, and half of it is lost
    model = next(m for m in CPU_MODELS if m.name == "narrow")
    broken = tmp_path / "work" / f"bench-cpu-narrow-{model.layers}x{model.experts}x{model.hidden}"
    make = ("-m", "elastic.tools.make_checkpoint", str(broken), *model.arguments())
    subprocess.run([sys.executable, *make], check=True, capture_output=True)
    next(broken.glob("model-00002*.safetensors")).unlink()
    done = bench(tmp_path, "--parts", "copy,kill", "--samples", "0.1", "--work", str(tmp_path / "work"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    found = parts_of(tmp_path)
    assert "the group could not be formed" in found["kill"]["error"]
    assert "safetensors" in found["kill"]["error"]
    assert "error: " in (tmp_path / "gpu-bench.log").read_text()
    assert found["copy"]["figures"]["ceiling_bytes_per_s"] > 0
    assert "wrong: kill: " in done.stderr
    # and what is run again is added to what is there
    again = bench(tmp_path, "--parts", "copy", "--add")
    assert again.returncode == 1
    assert parts_of(tmp_path).keys() == {"copy", "kill"}


def test_without_a_gpu_it_says_how_to_try_it_out(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "chaos.gpu_bench", "--out", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/nowhere"}, check=False)
    assert done.returncode == 1
    assert "--cpu" in done.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("options", [["--parts", "kill,none"], ["--samples", "0"], ["--budget", "x"]])
def test_wrong_options_are_refused(tmp_path: Path, options: list[str]) -> None:
    done = bench(tmp_path / "none", *options)
    assert done.returncode == 2
    assert options[0] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_runs_and_what_must_hold_holds(tmp_path: Path) -> None:
    done = bench(tmp_path, "--samples", "0.1", "--budget", "800", timeout_s=850)
    assert done.returncode == 0, done.stdout + done.stderr
    found = parts_of(tmp_path)
    assert found.keys() == set(PARTS)
    assert not [part["error"] for part in found.values() if part["error"]]
    assert set(found["witnesses"]["figures"]["notices_s"][0]) == {"lifeline", "pidfd", "proc", "socket"}
    assert found["orphans"]["samples"][0]["sequences"][0]["moved"]["host"]["bytes"] > 0
    assert found["logits"]["figures"]["alone_after_the_loss"]["tokens_equal"]
    assert [s["slots"] for s in found["shared-gpus"]["samples"]] == [[0], [2], [3], [1, 2]]
    assert all(s["seen_s"] > 0.5 for s in found["stop"]["samples"])
