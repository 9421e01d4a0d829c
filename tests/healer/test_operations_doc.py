"""docs/operations.md and the unit beside it: what stands there works."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer.main

from healer.cli import app
from healer.orders import ORDERS
from healer.policy.load import parse_policy
from tests.healer.support import POLICY

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "operations.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(# operations: [^\n]+)\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(("name", "text"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_every_example_is_a_valid_part_of_a_policy(name: str, text: str, tmp_path: Path) -> None:
    indented = "".join(f"  {line}\n" for line in text.splitlines())
    parse_policy(POLICY + indented, name=name, base=tmp_path)


def test_every_command_and_every_order_is_there() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    named = set(re.findall(r"`healer ([a-z]+)", TEXT))
    assert named <= set(commands)
    assert set(re.findall(r"`POST (/[a-z/]+)", TEXT)) == {*ORDERS, "/stop"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    unit = (DOCS / "healer.service").read_text()
    # what is named there is not on this machine
    unit = unit.replace("/opt/healer/.venv/bin/healer", "/bin/true").replace("User=healer\n", "")
    (tmp_path / "healer.service").write_text(unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "healer.service")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if "healer.service" in line]
    assert said == []
