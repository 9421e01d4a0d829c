"""The load rules against timelines in `golden/load-*.yaml`; `load_timeline` says how to read them."""

from pathlib import Path

import pytest

from healer.load.decision import ScaleReason
from tests.healer.load_timeline import GOLDEN, Timeline, read

FILES = sorted(GOLDEN.glob("load-*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_golden_load_timeline(file: Path) -> None:
    scenario = read(file)
    played = Timeline(scenario).play()
    assert played.changes == scenario["changes"], scenario["fear"]
    for second, part in scenario.get("says", {}).items():
        decision = played.decisions[int(second)]
        assert part == str(decision.reason) or part in decision.sentence, f"{file.name}, second {second}: {decision}"


def test_every_reason_is_explained_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "autoscaling.md").read_text()
    assert [reason for reason in ScaleReason if f"`{reason}`" not in text] == []


def test_there_are_enough_timelines_and_each_says_what_it_is_against() -> None:
    assert len(FILES) >= 20
    fears = [read(file)["fear"] for file in FILES]
    assert len(set(fears)) == len(fears)
