"""What a launcher leaves on the disk over months."""

from pathlib import Path

import pytest

from elastic.config import GroupConfig
from elastic.launch.base import Launched
from elastic.launch.local import KEPT_LOGS, LocalLauncher
from elastic.paths import log_path


def test_a_slot_that_fails_for_months_keeps_its_newest_logs_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GroupConfig(
        name="g",
        run_dir=str(tmp_path),
        checkpoint="model",
        ranks=1,
        max_ranks=12,
        slots_per_rank=1,
        capture_sizes=(32,),
    )
    launcher = LocalLauncher(config)

    def spawn(name: str, arguments: list[str]) -> Launched:
        path = log_path(tmp_path, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
        return Launched(1, 1)

    monkeypatch.setattr(launcher, "_spawn", spawn)
    spawn("rank-11.0", [])
    spawn("gateway", [])
    for incarnation in range(KEPT_LOGS + 15):
        launcher.launch(1, incarnation)
    left = sorted(path.name for path in (tmp_path / "logs").iterdir())
    mine = [name for name in left if name.startswith("rank-1.")]
    assert len(mine) == KEPT_LOGS
    assert f"rank-1.{KEPT_LOGS + 14}.log" in mine
    assert "rank-1.0.log" not in mine
    assert {"rank-11.0.log", "gateway.log"} <= set(left)
