"""A slot with a history starts a rank only if its device proves itself: real ranks, and arithmetic that is broken below them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from healer.deployment import Deployment, eventually

SITE = '''
"""A device that answers every query and multiplies wrongly, in the rank processes of one slot."""
import os, sys
from pathlib import Path

line = " ".join(sys.orig_argv)
if "elastic.rank " in line and "--slot 1 " in line and Path(__file__).with_name("broken").exists():
    import torch

    product = torch.Tensor.__matmul__

    def wrong(left, right):
        found = product(left, right)
        found.view(-1)[0] += left.dtype == torch.float32
        return found

    torch.Tensor.__matmul__ = wrong
'''


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    return tmp_path


@pytest.fixture
def group(checkpoint: Path, site: Path) -> Iterator[Deployment]:
    made = Deployment(checkpoint, spec={"healing": {"probation": {"check": True, "holdDown": "10m"}}})
    yield made
    made.end()


@pytest.mark.slow
async def test_a_device_that_computes_wrongly_does_not_come_back_from_quarantine(group: Deployment, site: Path) -> None:
    await group.start()
    assert not any("probe" in text for text in _logs(group).values()), "a slot without a history is trusted"
    answer = await group.post("/quarantine", {"slot": 1, "for_s": 3.0, "reason": "a doubtful board"})
    assert answer.status_code == 202, answer.text
    assert json.loads((group.run_dir / "suspects.json").read_text()) == [1]
    (site / "broken").touch()

    async def given_up() -> dict[str, Any] | None:
        status: dict[str, Any] = await group.get("/status")
        return status if "does not start and needs a human" in status["decision"] else None

    status = await eventually(given_up, "the slot is given up", 120)
    assert "probe: arithmetic" in status["decision"]
    assert status["group"]["live"] == [0, 2, 3], "it never served"
    assert status["healing"]["probation"] == [1]
    (site / "broken").unlink()
    assert (await group.post("/scale", {"ranks": 4})).status_code == 202
    await group.settled(60)
    newest = max(
        _logs(group).items(), key=lambda item: int(item[0].split(".")[1]) if item[0].startswith("rank-1.") else -1
    )
    assert newest[0].startswith("rank-1.")
    assert "probe: the device is sound" in newest[1]


def _logs(group: Deployment) -> dict[str, str]:
    return {path.name: path.read_text() for path in (group.run_dir / "logs").glob("rank-*.log")}
