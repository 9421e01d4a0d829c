"""The load rules against timelines in `golden/load-*.yaml`; `load_timeline` says how to read them."""

from pathlib import Path

import pytest

from healer.policy.reasons import BOTH, SCALING
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


def test_every_reason_that_load_can_give_is_given_in_a_timeline() -> None:
    given = {decision.reason for file in FILES for decision in Timeline(read(file)).play().decisions}
    assert given <= SCALING | BOTH
    assert SCALING - given == set()


def test_there_are_enough_timelines_and_each_says_what_it_is_against() -> None:
    assert len(FILES) >= 20
    fears = [read(file)["fear"] for file in FILES]
    assert len(set(fears)) == len(fears)
