"""Golden timelines of healing: each file says what somebody would fear, and what must be decided instead."""

from pathlib import Path

import pytest

from healer.policy.decide import decide
from tests.healer.healing_timeline import GOLDEN, play, read, remembered

FILES = sorted(GOLDEN.glob("heal-*.yaml"))


def test_there_are_timelines_and_each_names_its_fear() -> None:
    assert len(FILES) >= 40
    fears = [read(path)["fear"] for path in FILES]
    assert len(set(fears)) == len(fears)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_timeline(path: Path, tmp_path: Path) -> None:
    case = read(path)
    world, told = play(case, tmp_path / "journal.db")
    assert told == case["decisions"], case["fear"]
    for second, part in case.get("says", {}).items():
        sentences = [one.sentence for at, one in world.log if at == second]
        assert any(part in sentence for sentence in sentences), sentences
    if "calls" in case:
        assert world.group.calls == case["calls"]
    # what was written down is what is remembered, and the same state gives the same decisions
    assert remembered(tmp_path / "journal.db") == world.roster.memory
    assert all(decide(world.policy, verdicts, state, now) == found for verdicts, state, now, found in world.states)
