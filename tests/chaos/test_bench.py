"""The benchmark runs, says what it measured, and ends all that it started."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    """With a directory for temporary files of its own, short enough for sockets."""
    command = [sys.executable, "-m", "chaos.bench", *options]
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        env = os.environ | {"TMPDIR": folder}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_a_bench_writes_raw_samples_and_their_summary(tmp_path: Path) -> None:
    out = tmp_path / "results" / "bench.json"
    done = bench("--kills", "1", "--rest", "1", "--redundancy", "0", "--sensors", "1", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_bytes())
    (sample,) = found["samples"]
    assert sample["tokens_equal"]
    assert sample["in_flight"] > 0
    assert sample["cover"]["host"]["tensors"] > 0 == sample["cover"]["peer"]["tensors"]
    for name in ("detect_s", "verdict_s", "pause_s", "coverage_s", "capacity_s", "silence_s"):
        assert found["summary"][name] == dict.fromkeys(("p50", "p95", "max"), sample[name])
        assert sample[name] > 0
    assert all(value > 0 for name, value in found["quiet"].items() if name not in ("start_s", "daemon_cpu_percent"))
    assert all(start_s > 0 for start_s in found["quiet"]["start_s"])
    assert {"python", "torch", "nixl", "healer"} <= found["versions"].keys()
    assert found["config"]["redundantExperts"] == 0
    assert found["problems"] == []
    assert sample["detect_s"] <= sample["verdict_s"] <= sample["coverage_s"]
    if shutil.which("cc"):
        for name in ("xid_verdict_s", "action_verdict_s", "kernel_log_verdict_s"):
            assert all(0 < value < 5 for value in found["sensors"][name])
            assert found["summary"][name]["p50"] > 0


@pytest.mark.parametrize("options", [["--kills", "0"], ["--signal", "hup"], ["--rest", "-1"], ["--rest", "x"]])
def test_a_bench_refuses_wrong_options(options: list[str]) -> None:
    done = bench(*options)
    assert done.returncode == 2
    assert options[0] in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bench_that_cannot_start_says_why(tmp_path: Path) -> None:
    done = bench("--redundancy", "17", "--out", str(tmp_path / "bench.json"))
    assert done.returncode == 1
    assert "redundant" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "bench.json").exists()
