"""The worker's part against vLLM's own functions (the scripts inplace_*_units.py), in vLLM's interpreter, which has no pytest: it is
lent this one's."""

import os
import re
import subprocess
import sysconfig

import pytest

from tests.vllm import inplace_moe, real

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.environ.get("VLLM_CPU"), reason="VLLM_CPU names no environment (chaos/vllm_cpu/make.sh)"),
]

RUN = """
import sys
sys.path.append(sys.argv[1])
import pytest
sys.exit(pytest.main(["-rA", "-p", "no:cacheprovider", "-c", sys.argv[2], "--import-mode=importlib", sys.argv[3]]))
"""


@pytest.mark.parametrize("name", [f"inplace_{part}_units.py" for part in ("worker", "abort", "exchange", "release")])
def test_the_workers_part_fits_vllms_own_functions(name: str) -> None:
    script = real.ROOT / "tests/vllm" / name
    command = [str(inplace_moe.PYTHON), "-c", RUN, sysconfig.get_paths()["purelib"]]
    command += [str(real.ROOT / "pyproject.toml"), str(script)]
    found = subprocess.run(
        command,
        cwd=real.ROOT,
        env=inplace_moe.environment(),
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    passed = re.search(r"(\d+) passed", found.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= len(re.findall(r"^def test_", script.read_text(), re.MULTILINE)) > 0
