"""The coordinator dies in an idle group, with vLLM's own coordinator and nothing else of vLLM running."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.vllm import inplace_moe
from tests.vllm.real import ROOT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not os.environ.get("VLLM_CPU"), reason="VLLM_CPU names no environment (chaos/vllm_cpu/make.sh)"),
]

WAKE = [0, -1]


@pytest.mark.parametrize(
    ("who", "starts"),
    [("coordinator", 2), ("process", 1)],
)
def test_a_wave_that_died_with_its_coordinator_starts_all_the_same(tmp_path: Path, who: str, starts: int) -> None:
    """Every engine is called: an idle one would never join the one that has a request."""
    command = [str(inplace_moe.PYTHON), str(ROOT / "tests/vllm/inplace_waves.py"), str(tmp_path), who]
    done = subprocess.run(
        command, env=inplace_moe.environment(), capture_output=True, text=True, check=False, timeout=450
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # a fresh group is not called: nobody can be waiting
    assert found["first"] == [["ready"]] * 3
    assert all(WAKE in heard and "ready" in heard for heard in found["again"]), found
    assert found["starts"] == starts
